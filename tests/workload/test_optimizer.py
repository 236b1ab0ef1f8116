"""Plain SGD is torch's, to the bit, and costs a rank nothing to import."""

import subprocess
import sys

import torch
from torch import nn

from distlab.config import Config
from distlab.workload.optimizer import PlainSGD, make_optimizer, named_tensors


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(5, 3, dtype=torch.float64)


def trained(optimizer_of: type) -> list[torch.Tensor]:
    model = linear()
    optimizer = optimizer_of(model.parameters(), lr=0.3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_plain_sgd_is_torchs_to_the_bit() -> None:
    for ours, torchs in zip(trained(PlainSGD), trained(torch.optim.SGD), strict=True):
        assert torch.equal(ours, torchs)


def test_a_parameter_without_a_gradient_stays() -> None:
    model = linear()
    before = [parameter.clone() for parameter in model.parameters()]
    PlainSGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_state_has_dense_names() -> None:
    model = linear()
    adamw = make_optimizer(model.parameters(), Config.read({"LAB_OPTIMIZER": "adamw"}))
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    adamw.step()
    assert {name for name, _ in named_tensors(model, adamw, "optimizer")} == {
        f"{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in ("weight", "bias")
    }
    assert list(named_tensors(model, make_optimizer(model.parameters(), Config.read({})), "optimizer")) == []


def test_a_step_of_sgd_imports_no_compiler() -> None:
    program = """
import sys, torch
from distlab.workload.optimizer import PlainSGD
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
PlainSGD(model.parameters(), 0.1).step()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
