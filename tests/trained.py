"""Train variants of any mode on the pool and compare them with one process, for the proofs of all modes."""

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.lab.config import Config, ConfigError
from distlab.lab.measure.storages import SavedActivations
from distlab.lab.measure.traffic import Calls
from distlab.lab.rank.mode_loader import load
from distlab.lab.rank.preflight import refuse
from distlab.lab.workload.data import Batches, Microbatch
from distlab.lab.workload.optimizer import local
from distlab.lab.workload.reference import Snapshot, train
from distlab.techniques.collectives.sharded_tensor import LocalShard
from tests.labs import built, copy_state

TOLERANCE = 1e-12
KINDS = ("gradients", "weights", "optimizer")
GATHERED_BY_ALL = ("dp", "cp")  # modes in which all ranks get the dense tensors


def runnable(config: Config, names: tuple[str, ...] = ()) -> list[str]:
    """Return the mode's variants, or those of `names`, that can run with these settings."""
    mode = load(config.run_mode)
    return [name for name in names or mode.names if name not in mode.cannot(config)]


def batches_of(config: Config, *, proof: bool = True) -> Batches:
    dtype = torch.float64 if proof else getattr(torch, config.dtype)
    batches: Any = load(config.run_mode).mistaken(config.bug).batches
    found: Batches = batches(config, proof=proof, device=torch.device("cpu"), dtype=dtype)
    return found


def microbatches_by_step(
    config: Config, group: dist.ProcessGroup, *, proof: bool = True
) -> Callable[[int], list[Microbatch]]:
    """Return a function from a step to this rank's microbatches; ranks along dp have different samples."""
    sizes, batches = load(config.run_mode).axes(config), batches_of(config, proof=proof)
    inner = math.prod(list(sizes.values())[list(sizes).index("dp") + 1 :]) if "dp" in sizes else 1
    replicas = sizes.get("dp", 1)
    return partial(batches.microbatches, shard=group.rank() // inner % replicas, num_shards=replicas)


def microbatches_of(config: Config, group: dist.ProcessGroup, step: int, *, proof: bool = True) -> list[Microbatch]:
    """Return the microbatches of one step."""
    return microbatches_by_step(config, group, proof=proof)(step)


def strategy_of(name: str, group: dist.ProcessGroup, config: Config, dtype: torch.dtype = torch.float64) -> Any:
    mode = load(config.run_mode)
    return built(mode, name, mode.model(config, config.seed).to(dtype), group, config)


def one_process(config: Config, steps: int) -> list[Snapshot]:
    plain = config.model_copy(update={"bug": None})
    model = load(config.run_mode).model(plain, plain.seed).double()
    return list(train(model, batches_of(plain), plain, steps))


def differences(
    group: dist.ProcessGroup, config: Config, names: tuple[str, ...] = (), steps: int = 2
) -> dict[str, dict[str, float]]:
    """Return for each variant, on rank 0, the worst difference to one process of each kind, and on all ranks the worst
    difference between replicated tensors."""
    dense, first = one_process(config, steps) if group.rank() == 0 else [], group.rank() == 0
    found, microbatches_at = {}, microbatches_by_step(config, group)
    for name in runnable(config, names):
        strategy, worst = strategy_of(name, group, config), dict.fromkeys(("losses", *KINDS), 0.0)
        for step in range(steps):
            loss_part = strategy.backward(microbatches_at(step))
            loss = torch.zeros((), dtype=torch.float64) if loss_part is None else loss_part.clone()
            dist.all_reduce(loss, group=group)
            strategy.update()
            for kind in KINDS:
                tensors = dict(strategy.full(kind))
                assert first or not tensors or config.run_mode in GATHERED_BY_ALL
                if first:
                    worst[kind] = max(worst[kind], largest_difference(tensors, getattr(dense[step], kind)))
            if first:
                worst["losses"] = max(worst["losses"], abs(loss.item() - dense[step].loss))
        found[name] = worst | {"replicas": replica_difference(strategy, group)}
    return found


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert set(found) == set(wanted)
    assert all(found[name].shape == wanted[name].shape for name in wanted)
    return max(((found[name] - wanted[name]).abs().max().item() for name in wanted), default=0.0)


def replica_difference(strategy: Any, group: dist.ProcessGroup) -> float:
    """Return the largest difference between replicated weights."""
    replicas = strategy.alike("weights") if hasattr(strategy, "alike") else ()
    everyone: list[Any] = [None] * group.size()  # as arrays, because pickling them takes a tenth of the time
    dist.all_gather_object(everyone, {name: tensor.detach().numpy() for name, tensor in replicas}, group=group)
    first = {name: array for of_rank in reversed(everyone) for name, array in of_rank.items()}
    return max(
        (float(abs(array - first[name]).max()) for of_rank in everyone for name, array in of_rank.items()),
        default=0.0,
    )


def resumed(group: dist.ProcessGroup, config: Config, name: str) -> bool:
    """Return whether a new strategy continues bitwise from the state of another one."""
    others = config.model_copy(update={"seed": config.seed + 1})
    first, second = strategy_of(name, group, config), strategy_of(name, group, others)
    first.backward(microbatches_of(config, group, 0))
    first.update()
    copy_state(first.state_dict(), state := second.state_dict())
    second.load_state_dict(state)
    for strategy in (first, second):
        strategy.backward(microbatches_of(config, group, 1))
        strategy.update()
    one, other = first.state_dict(), second.state_dict()
    return set(one) == set(other) and all(states_equal(one[label], other[label]) for label in one)


def states_equal(one: Any, other: Any) -> bool:
    if isinstance(one, LocalShard):
        return all(torch.equal(a, b) for (_, a), (_, b) in zip(one.boxes, other.boxes, strict=True))
    return torch.equal(local(one), local(other))


class Counted(NamedTuple):
    """A step: called bytes, calls, the peak of bytes kept for the backward pass, and microbatches in flight."""

    nbytes: float
    calls: float
    kept_bytes: int
    in_flight: int


def counted(group: dist.ProcessGroup, config: Config, names: tuple[str, ...] = ()) -> dict[str, Counted]:
    """Return the second step of each variant, because DDP rebuilds its buckets after the first."""
    found, microbatches_at = {}, microbatches_by_step(config, group, proof=False)
    for name in runnable(config, names):
        strategy = strategy_of(name, group, config, getattr(torch, config.dtype))
        for step in range(2):
            with Calls() as calls, SavedActivations() as saved:
                strategy.backward(microbatches_at(step))
                strategy.update()
        ops, in_flight = calls.ops(), getattr(getattr(strategy, "engine", None), "most_in_flight", 0) or 0
        nbytes = sum(op.called_bytes for op in ops)
        found[name] = Counted(nbytes, sum(op.calls for op in ops), saved.peak_bytes, in_flight)
    return found


def count_live_parameters(group: dist.ProcessGroup, config: Config, name: str) -> int:
    """Return the number of parameters that are alive after a trained variant was deleted."""
    mode = load(config.run_mode)
    model = mode.model(config, config.seed).double()
    strategy = built(mode, name, model, group, config)
    strategy.backward(microbatches_of(config, group, 0))
    strategy.update()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, strategy
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


def refusal(config: Config) -> str:
    """Return the only sentence with which these settings are refused."""
    with pytest.raises(ConfigError) as refused:
        refuse(config, load(config.run_mode))
    (sentence,) = refused.value.faults
    return sentence
