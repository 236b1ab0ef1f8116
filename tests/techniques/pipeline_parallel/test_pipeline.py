"""The pipeline compared with the same layers in one process: every schedule, uneven shapes and sizes, and failures."""

import datetime
import gc
import time
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.techniques.collectives.phases import recorded
from distlab.techniques.pipeline_parallel import schedules
from distlab.techniques.pipeline_parallel.pipeline import Boundaries, Loss, Pipeline, outlined, zeros_like_outline
from distlab.techniques.pipeline_parallel.schedules import Schedule
from tests.techniques.pipeline_parallel.in_flight import most_in_flight
from tests.warm_ranks import MAX, Ranks

pytestmark = pytest.mark.timeout(120)

WIDTHS = (3, 5, 2, 7, 4, 6, 1, 5, 2)  # of the activations between layers; neighbours differ
SIZES = (2, 1, 4, 3, 1)
TIMEOUT_S = 1.5


def layers(num_layers: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(7)
    found: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS[: num_layers + 1]):
        layer = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()).double()
        for parameter in layer.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        found.append(layer)
    return found


def inputs(sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(size, 2, WIDTHS[0], generator=generator, dtype=torch.float64) for size in sizes]  # [b, 2, 3]


def loss(microbatch: int, output: Tensor) -> Tensor:
    return (microbatch + 1) * output.square().sum()


def schedule_of(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    if name == "interleaved":
        return schedules.interleaved(ranks, microbatches, chunks)
    made = {
        "gpipe": schedules.gpipe,
        "1f1b": schedules.one_forward_one_backward,
        "zb_h1": schedules.zb_h1,
    }
    return made[name](ranks, microbatches)


def pipeline_of(group: dist.ProcessGroup, name: str, chunks: int = 1, microbatches: int = len(SIZES)) -> Pipeline:
    num_stages = group.size() * chunks
    stages = {stage: layer for stage, layer in enumerate(layers(num_stages)) if stage % group.size() == group.rank()}
    actions = schedule_of(name, group.size(), microbatches, chunks)[group.rank()]
    return Pipeline(stages, actions, group)


def run(group: dist.ProcessGroup, name: str, chunks: int) -> tuple[float | None, dict[str, Tensor], int]:
    """Run two steps; return the loss, gradients and microbatches in flight of the second, which has other sizes."""
    pipeline = pipeline_of(group, name, chunks)
    pipeline.step(inputs(), loss)
    for layer in pipeline.stages.values():
        layer.zero_grad()
    total = pipeline.step(inputs(SIZES[::-1]), loss)
    gradients = {
        f"{stage}.{key}": parameter.grad
        for stage, layer in pipeline.stages.items()
        for key, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    return None if total is None else total.item(), gradients, pipeline.most_in_flight


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)])
def test_stages_equal_one_process(ranks: Ranks, world_size: int, name: str, chunks: int) -> None:
    dense = nn.ModuleList(layers(world_size * chunks))
    total = torch.zeros((), dtype=torch.float64)
    for microbatch, hidden in enumerate(inputs(SIZES[::-1])):
        for layer in dense:
            hidden = layer(hidden)
        total = total + loss(microbatch, hidden)
    total.backward()
    wanted = {key: parameter.grad for key, parameter in dense.named_parameters()}
    schedule = schedule_of(name, world_size, len(SIZES), chunks)
    seen: set[str] = set()
    for rank, (rank_loss, gradients, in_flight) in enumerate(ranks(world_size, run, name, chunks)):
        assert (rank_loss is None) == (rank < world_size - 1)
        if rank_loss is not None:
            assert rank_loss == pytest.approx(total.item(), abs=1e-12)
        for key, gradient in gradients.items():
            assert (gradient - wanted[key]).abs().max() <= 1e-12, key
        seen |= set(gradients)
        assert in_flight == most_in_flight(schedule[rank])
    assert seen == set(wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_outline_restores_shape_and_dtype(dtype: torch.dtype) -> None:
    for shape in ([], [3], [1, 2, 3, 4]):
        found = zeros_like_outline(outlined(torch.ones(shape, dtype=dtype)), torch.device("cpu"))
        assert (list(found.shape), found.dtype) == (shape, dtype)


# --- phases and memory ---


def phases(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    pipeline = pipeline_of(group, "zb_h1", microbatches=2)
    pipeline.step(inputs(SIZES[:2]), loss)
    with recorded() as spans:
        pipeline.step(inputs(SIZES[:2]), loss)
    return [(span.kind, span.label) for span in spans]


def test_phases_record_the_ranks_actions(ranks: Ranks) -> None:
    first, last = ranks(2, phases)
    assert first == [
        ("forward", "0"), ("send", "0"), ("forward", "1"), ("send", "1"),
        ("receive", "0"), ("input", "0"), ("weight", "0"), ("receive", "1"), ("input", "1"), ("weight", "1"),
        ("wait", ""),
    ]  # fmt: skip
    assert last == [
        ("receive", "0"), ("forward", "0"), ("input", "0"), ("send", "0"), ("receive", "1"), ("forward", "1"),
        ("input", "1"), ("send", "1"), ("weight", "0"), ("weight", "1"), ("wait", ""),
    ]  # fmt: skip


def live_activations(group: dist.ProcessGroup) -> list[int]:
    """How many of the first stage's activations are in memory before each of its backward passes, and at the end."""
    pipeline = pipeline_of(group, "gpipe")
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []
    send, receive = pipeline.boundaries.send_result, pipeline.boundaries.receive_for

    def watching(action: schedules.Action, tensor: Tensor) -> None:
        storages.append(weakref.ref(tensor.untyped_storage()))
        send(action, tensor)

    def counting(action: schedules.Action) -> Tensor:
        alive.append(sum(storage() is not None for storage in storages))
        return receive(action)

    pipeline.boundaries.send_result, pipeline.boundaries.receive_for = watching, counting  # type: ignore[method-assign]
    pipeline.step(inputs(), loss)
    gc.collect()
    return [*alive, sum(storage() is not None for storage in storages)]


def test_activations_are_freed_by_their_backward(ranks: Ranks) -> None:
    first, *_ = ranks(3, live_activations)
    assert first == [5, 4, 3, 2, 1, 0]


# --- failures ---


def short_group(size: int) -> dist.ProcessGroup:
    """The first `size` ranks of the pool, with a short timeout; every rank of the pool has to call this."""
    bound = datetime.timedelta(seconds=TIMEOUT_S)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = bound
    found: dist.ProcessGroup = dist.new_group(list(range(size)), timeout=bound, pg_options=options)
    return found


class Silent(Boundaries):
    """Computes, but does not send results."""

    def send_result(self, action: schedules.Action, tensor: Tensor) -> None:
        """Discard the tensor."""


def failing(group: dist.ProcessGroup, name: str, culprit: int, raises: bool) -> tuple[str, float]:
    """This rank's error, and the seconds until it, if `culprit` fails between receiving and sending."""
    ours = short_group(3)
    if group.rank() >= 3:
        return "", 0.0
    pipeline = pipeline_of(ours, name)
    failing_loss: Loss = partial(broken_loss, raises=raises and group.rank() == culprit)
    started = time.monotonic()
    try:
        pipeline.step(inputs(), loss)
        if group.rank() == culprit and not raises:
            pipeline.boundaries.__class__ = Silent
        pipeline.step(inputs(), failing_loss)
    except (RuntimeError, ArithmeticError) as error:
        return str(error), time.monotonic() - started
    finally:
        dist.destroy_process_group(ours)
    return "", time.monotonic() - started


def broken_loss(microbatch: int, output: Tensor, *, raises: bool) -> Tensor:
    if raises:
        raise ArithmeticError("no loss today")
    return loss(microbatch, output)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_waiting_ranks_name_a_silent_rank(ranks: Ranks, name: str) -> None:
    first, _, last, *_ = ranks(MAX, failing, name, 1, False)
    assert "receive from rank 1 failed" in first[0]
    assert "receive from rank 1 failed" in last[0]
    assert max(first[1], last[1]) < 3 * TIMEOUT_S


def test_an_error_between_receive_and_send_hangs_nobody(ranks: Ranks) -> None:
    first, middle, last, *_ = ranks(MAX, failing, "1f1b", 2, True)
    assert last[0] == "no loss today"
    assert "from rank 2 failed" in middle[0] or "to rank 2 failed" in middle[0]
    assert "rank 1 failed" in first[0]
    assert max(first[1], middle[1]) < 3 * TIMEOUT_S
