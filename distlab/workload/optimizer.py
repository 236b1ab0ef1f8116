"""The optimizer of LAB_OPTIMIZER, and the names under which its state is compared.

SGD is plain, without momentum: its update is the gradient, so that nothing hides a wrong scale. AdamW divides by the
gradient's own size and does hide it, which is why the proof uses SGD (and a step of AdamW apart).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distlab.config import Config


class PlainSGD:
    """w becomes w - lr·g: what torch.optim.SGD does without momentum, to the bit.

    Any optimizer of torch.optim imports torch.compile's machinery when it is made, 800 modules: 0.8 s of each rank's
    start, and with four ranks on two cores a second and a half before the first step. The lesson's one line needs none.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [
            {"params": self.parameters, "lr": lr}
        ]  # where torch's keep their rate
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        lr: float = self.param_groups[0]["lr"]
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-lr)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None


Optimizer = PlainSGD | torch.optim.Optimizer


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> Optimizer:
    """A fresh optimizer over `parameters`, with the learning rate of `config`."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.learning_rate)
    return PlainSGD(parameters, config.learning_rate)


def prime(optimizer: Optimizer) -> None:
    """Give AdamW the state that it makes itself in its first step: zeros, which a checkpoint is loaded into."""
    if isinstance(optimizer, PlainSGD):
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def named_tensors(model: nn.Module, optimizer: Optimizer, kind: str) -> Iterator[tuple[str, Tensor]]:
    """This rank's "gradients", "weights" or "optimizer" state under dense names ('exp_avg.<parameter>', ...), in the
    same order on every rank."""
    for name, parameter in model.named_parameters():
        for key, tensor in tensors_of(kind, optimizer, parameter).items():
            yield f"{key}.{name}" if key else name, tensor


def tensors_of(
    kind: str, optimizer: Optimizer, stepped: nn.Parameter, summed: nn.Parameter | None = None
) -> dict[str, Tensor]:
    """The gradient or weights of one parameter under "", or its optimizer state by key; AdamW's number of steps is a
    scalar. The gradient is that of `summed`, where it is not the parameter itself that it is summed for."""
    if kind == "optimizer":
        return {key: value for key, value in optimizer.state[stepped].items() if isinstance(value, Tensor)}
    tensor = stepped.detach() if kind == "weights" else (stepped if summed is None else summed).grad
    return {} if tensor is None else {"": tensor}


def live_state(named: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Tensor]:
    """What a checkpoint holds of these parameters: 'weights.<parameter>' and 'optimizer.<key>.<parameter>', as they are
    trained on."""
    prime(optimizer)
    state: dict[str, Tensor] = {}
    for name, parameter in named:
        state[f"weights.{name}"] = parameter.detach()
        state |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    return state
