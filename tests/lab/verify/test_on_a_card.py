"""What would be wrong on a GPU, seen without one: steps that wait for the processor, and runs whose wire is not visible."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from distlab.lab.config import Config
from distlab.lab.measure.traffic import OPERATIONS, DispatchMode, Ledger
from distlab.lab.rank.mode_loader import load
from distlab.techniques.tensor_parallel.layers import SCATTERING
from tests.labs import TINY, built, run_experiment
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(180)

# Operations whose result the processor needs, so that on a GPU it waits for all that was launched before.
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select")
MODES = ("dp", "fsdp", "tp", "cp", "mesh")
# Which tokens are of this rank's rows of the vocabulary, at both of its ends.
OWN_TOKENS = dict.fromkeys(("megatron", "sequence"), ["aten::nonzero"] * 2)


class Waits(DispatchMode):
    """Notes operations that would hold up a step on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def config_of(name: str, group: dist.ProcessGroup) -> Config:
    ranks = {"WORLD_SIZE": str(group.size()), "RANK": str(group.rank()), "MASTER_ADDR": "127.0.0.1"}
    return Config.read(TINY | ranks | {"RUN_MODE": name, "LAB_LR": "0.1"})


def waits_of(group: dist.ProcessGroup, name: str) -> dict[str, list[str]]:
    """Of each variant by hand what its second step waits for."""
    config, mode = config_of(name, group), load(name)
    impossible, found = mode.cannot(config), {}
    for variant in mode.by_hand:
        if variant in impossible:
            continue
        strategy = built(mode, variant, mode.model(config, 1), group, config)
        replicas = mode.axes(config).get("dp", 1)
        batches = mode.batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
        microbatches = batches.microbatches(0, group.rank() % replicas, replicas)
        strategy.backward(microbatches)
        strategy.update()
        with Waits() as seen:
            strategy.backward(microbatches)
            strategy.update()
        found[variant] = seen.found
    return found


@pytest.mark.parametrize("name", MODES)
def test_no_step_waits_for_the_processor_but_at_a_split_vocabulary(ranks: Ranks, name: str) -> None:
    for found in ranks(2, waits_of, name):
        assert found
        assert {variant: waits for variant, waits in found.items() if waits} == (OWN_TOKENS if name == "tp" else {})


def test_a_step_that_waits_is_seen() -> None:
    with Waits() as seen:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
    assert seen.found == ["aten::_local_scalar_dense", "aten::nonzero"]


# On a device that has no numbers no step can wait for one, and a tensor of the CPU mixes with none of the model's.


class OnDevice(DispatchMode):
    """Refuses collectives of the CPU's tensors, as NCCL does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in OPERATIONS and (on_cpu := [each for each in tree_leaves(args) if is_of_cpu(each)]):
            raise RuntimeError(f"{func._schema.name} gets {len(on_cpu)} tensors of the CPU")
        return func(*args, **(kwargs or {}))


def is_of_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


@pytest.fixture
def alone_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """Rank 0's group of two ranks whose collectives do nothing."""
    monkeypatch.setitem(SCATTERING, "fake", SCATTERING["nccl"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


# For a scale, for what is largest; as above. A `plain` that sends parts of what it has makes room on the CPU, as its page
# of code does.
LOOKS_AT_NUMBERS = {"int8", "topk", "plain", *OWN_TOKENS}


@pytest.mark.parametrize("name", [*MODES, "compress"])
def test_a_step_takes_nothing_of_the_cpu(alone_of_two: dist.ProcessGroup, name: str) -> None:
    config, mode = config_of(name, alone_of_two), load(name)
    device, trained = torch.device("meta"), [each for each in mode.by_hand if each not in LOOKS_AT_NUMBERS]
    assert trained
    batches = mode.batches(config, proof=False, device=device, dtype=torch.float32)
    for variant in trained:
        strategy = built(mode, variant, mode.model(config, 1).to(device), alone_of_two, config)
        microbatches = batches.microbatches(0, 0, mode.axes(config).get("dp", 1))
        with OnDevice():  # type: ignore[no-untyped-call]
            strategy.backward(microbatches)
            strategy.update()


def test_a_step_that_takes_something_of_the_cpu_is_seen(alone_of_two: dist.ProcessGroup) -> None:
    refuses = pytest.raises(RuntimeError, match="allreduce_ gets 1 tensors of the CPU")
    with OnDevice(), refuses:  # type: ignore[no-untyped-call]
        dist.all_reduce(torch.ones(3), group=alone_of_two)
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3) + torch.ones(3, device="meta")


def test_where_the_wire_is_not_visible_called_bytes_decide(ranks: Ranks, tmp_path: Path) -> None:
    run, _ = run_experiment(ranks, 2, tmp_path, RUN_MODE="dp", LAB_BACKEND="nccl", LAB_MODEL="mlp")
    names = {each["name"] for each in run["comparisons"]}
    assert run["verdict"] == "pass"
    assert "called bytes" in names
    assert "wire bytes" not in names


def test_a_ledger_can_ignore_sockets() -> None:
    requests: list[str] = []
    ledger = Ledger(0, 2, lambda key, value: requests.append(key) or [value], unseen="not visible")  # type: ignore[func-returns-value]
    with ledger.count() as traffic:
        pass
    assert traffic.wire_error == "not visible"
    assert (traffic.wire, requests) == ({}, [])


def shared_card(name: str, **more: str) -> Config:
    four = {"RUN_MODE": name, "WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "LAB_DEVICE": "cuda"}
    return Config.read(TINY | four | more)


@pytest.mark.parametrize(("name", "more"), [("comm", {}), ("server", {}), ("cp", {}), ("mesh", {"LAB_MESH": "cp4"})])
def test_what_gloo_cannot_send_from_a_card_is_refused(name: str, more: dict[str, str]) -> None:
    sentences = load(name).refuse(shared_card(name, **more))
    assert any("LAB_BACKEND=gloo cannot send " in sentence for sentence in sentences), sentences
    assert not load(name).refuse(shared_card(name, LAB_BACKEND="nccl", **more))


@pytest.mark.parametrize(
    ("name", "variant"), [("fsdp", "fsdp2"), ("mesh", "dtensor_fsdp2"), ("pp", "torch_1f1b"), ("moe", "ep")]
)
def test_what_dies_of_gloo_on_a_card_is_left_out(name: str, variant: str) -> None:
    depth = {"LAB_DEPTH": "4"}
    assert "gloo" in load(name).cannot(shared_card(name, **depth))[variant]
    assert "gloo" not in load(name).cannot(shared_card(name, LAB_BACKEND="nccl", **depth)).get(variant, "")


def test_one_rank_makes_no_call_of_nccl() -> None:
    config = Config.read(TINY | {"RUN_MODE": "fsdp", "WORLD_SIZE": "1", "LAB_BACKEND": "nccl"})
    calls = {each.variant: each.calls for each in load("fsdp").predict(config) if each.name == "wire bytes"}
    assert {name: calls[name] for name in ("zero1", "zero2", "zero3")} == {"zero1": 0, "zero2": 0, "zero3": 0}
