"""The memory ledger: bytes by class, at rest and at the peak, compared with the system's own count."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from distlab.lab.config import Config
from distlab.lab.measure.memory import CLASSES, ContainerMemory, MemoryLedger, total
from distlab.lab.measure.storages import COMMUNICATION, SavedActivations
from distlab.lab.workload.model import outline
from tests.warm_ranks import Ranks

P = 8 * 8 + 8 + 4 * 8 + 4  # parameters of `small`


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def stepped(step: Callable[[], object]) -> MemoryLedger:
    """Return the ledger of one step with objects made before it, for tests in which these do not matter."""
    with MemoryLedger() as memory, SavedActivations(memory.saves), memory.step():
        step()
    return memory


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 5) -> None:
    weight = next(model.parameters())
    optimizer.zero_grad()
    model(torch.ones(rows, 8, dtype=weight.dtype)).square().sum().backward()
    optimizer.step()


def most(memory: MemoryLedger) -> dict[str, int]:
    """Return the peak of each class within the step, each at its own time."""
    return {name: max(held[name] for _, held in memory.history()) for name in CLASSES}


def second_step_of_adamw() -> MemoryLedger:
    with MemoryLedger() as memory:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        trained(model, optimizer)
        with memory.step():
            trained(model, optimizer)
    return memory


def test_a_step_of_adamw_by_class() -> None:
    memory = second_step_of_adamw()
    states = {
        "parameters": 4 * P,
        "gradients": 4 * P,
        "optimizer": 8 * P + 4 * 4,
    }  # a count of steps for each of 4 tensors
    assert memory.rest == states | {"activations": 0, "communication": 0}
    assert memory.peak["activations"] > 0
    assert total(memory.rest) < total(memory.peak) <= memory.peak_bytes


def test_the_history_begins_and_ends_at_rest() -> None:
    memory = second_step_of_adamw()
    held = [by_class for _, by_class in memory.history()]
    assert held[0] == held[-1] == memory.rest
    assert min(by_class["gradients"] for by_class in held) == 0  # zero_grad lets them go
    assert max(held, key=total) == memory.peak
    moments = [moment for moment, _ in memory.history()]
    assert moments == sorted(moments)
    assert moments[-1] - moments[0] == memory.step_s


@pytest.mark.parametrize("slow_at", range(0, 33, 8))
def test_the_line_keeps_the_peak_wherever_the_machine_was_slow(slow_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock: 1 s between two readings, and once 1000 s, so that all other events fall into one part of the line."""
    with MemoryLedger() as memory:
        model = small()
        optimizer = torch.optim.SGD(model.parameters())
        trained(model, optimizer)
        readings = itertools.count()
        monkeypatch.setattr(time, "perf_counter", lambda: (now := next(readings)) + 1000 * (now > slow_at))
        with memory.step():
            trained(model, optimizer, rows=1000)
    for points in (200, 7, 1):
        line = memory.line(points)
        totals = [sum(held) for held in zip(*line.values(), strict=True)]
        assert (list(line), len(totals)) == (list(CLASSES), points)
        assert max(totals) == total(memory.peak)
        assert all(held <= total(memory.peak) for held in totals)
        assert totals[-1] >= total(memory.rest)


def test_gradients_that_a_hook_frees_count_as_gradients() -> None:
    """ZeRO-2 consumes gradients in a hook, so that `.grad` never has one."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    memory = stepped(lambda: model(torch.ones(1, 64)).sum().backward())
    assert most(memory)["gradients"] == 4 * 64 * 64  # one at a time
    assert memory.rest == dict.fromkeys(CLASSES, 0)


def test_rest_waits_until_another_thread_frees_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gloo's thread does, after the call has returned."""
    with MemoryLedger() as memory, memory.step():
        held, kept = [torch.ones(1000)], [torch.ones(10)]
        memory._storages.add(held[0], COMMUNICATION)
        memory._storages.add(kept[0], COMMUNICATION)
        monkeypatch.setattr(time, "sleep", lambda _: held.clear())  # the other thread runs during a sleep
    assert memory.rest["communication"] == 4 * 10


def test_recording_gradients_changes_neither_memory_nor_hooks() -> None:
    model = small()
    with MemoryLedger() as recorded, recorded.step():
        model(torch.ones(5, 8)).sum().backward()
    model.zero_grad()
    with MemoryLedger() as unrecorded:
        model(torch.ones(5, 8)).sum().backward()
    before = recorded.peak_bytes - total(recorded.peak)
    assert unrecorded.peak_bytes - before == total(recorded.peak)
    assert all(not parameter._backward_hooks for parameter in model.parameters())

    def failing() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError):
        stepped(failing)
    assert all(not parameter._backward_hooks for parameter in model.parameters())


def test_earlier_memory_has_no_class_and_leaks_are_counted() -> None:
    data = torch.zeros(1000)
    kept: list[Tensor] = []
    memory = stepped(lambda: kept.append(data * 2))
    assert memory.rest == dict.fromkeys(CLASSES, 0) | {"activations": 4000}
    assert stepped(lambda: data * 2).rest == dict.fromkeys(CLASSES, 0)


def test_resized_weights_are_parameters() -> None:
    with MemoryLedger() as memory:
        whole = torch.zeros(100)
        parameter = nn.Parameter(torch.empty(0))
        parameter.data = whole[:90].view(9, 10)
        storage = whole.untyped_storage()
        storage.resize_(0)
        with memory.step():
            storage.resize_(400)
            storage.resize_(0)
    assert memory.rest == dict.fromkeys(CLASSES, 0)
    assert memory.peak == dict.fromkeys(CLASSES, 0) | {"parameters": 400}


def test_master_weights_belong_to_the_optimizer() -> None:
    with MemoryLedger() as memory:
        model = small(torch.bfloat16)
        masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
        with memory.step():
            pass
    assert memory.rest == dict.fromkeys(CLASSES, 0) | {"parameters": 2 * P, "optimizer": 4 * P}
    del masters


def of_communication(group: dist.ProcessGroup) -> list[dict[str, int]]:
    weight, bucket = nn.Parameter(torch.ones(10)), torch.zeros(10)
    weight.grad = bucket
    held: list[Tensor] = []

    def summed(make: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            held.append(make())
            dist.all_reduce(held[-1].detach(), group=group)

        return step

    found = []
    with MemoryLedger() as memory:
        bucket = torch.zeros(10)
        weight.grad = bucket  # a real bucket has many views
        with memory.step():
            dist.all_reduce(bucket, group=group)
    found.append(memory.rest)
    for make in (lambda: torch.ones(7), lambda: (weight * 2).exp()):  # exp saves its result
        found.append(stepped(summed(make)).rest)
    return found


def test_buckets_messages_and_saved_tensors_have_their_classes(ranks: Ranks) -> None:
    nothing = dict.fromkeys(CLASSES, 0)
    for bucket, message, saved in ranks(2, of_communication):
        assert bucket == nothing | {"gradients": 40}
        assert message == nothing | {"communication": 28}
        assert saved == nothing | {"activations": 40}


WEIGHTS, INPUTS, BUCKET, MASTERS, MOMENTS, MESSAGE = 512, 512, 896, 640, 768, 1152  # numbers, the first 3 of 2 bytes


def of_every_class(group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int], tuple[int, int]]:
    """Run a step with bytes of every class; return bytes at rest, at the peak, and saved for the backward pass."""
    with MemoryLedger() as memory:
        weight, master = nn.Parameter(torch.zeros(WEIGHTS, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(MASTERS))
        optimizer = torch.optim.SGD([master])
        optimizer.state[master] = {"moment": torch.zeros(MOMENTS)}
        inputs, bucket = (torch.zeros(length, dtype=torch.bfloat16) for length in (INPUTS, BUCKET))
        message = torch.zeros(MESSAGE)
        with SavedActivations(memory.saves) as saved, memory.step():
            dist.all_reduce(message, group=group)
            (weight * inputs * inputs).sum().backward()  # one tensor that is saved twice
            weight.grad = bucket[:WEIGHTS]  # replaces autograd's own
            message.untyped_storage().resize_(0)  # else the ledger would wait until it is freed
            cycle: list[object] = [torch.zeros(64)]
            cycle.append(cycle)  # freed at rest, but not yet at the end of the step
            del cycle
    del weight, master, optimizer, inputs, bucket, message
    return memory.rest, memory.peak, (saved.peak_bytes, saved.live_bytes)


def test_a_step_with_bytes_of_every_class(ranks: Ranks) -> None:
    held = {"parameters": 2 * WEIGHTS, "gradients": 2 * BUCKET, "optimizer": 4 * (MASTERS + MOMENTS)}
    for rest, peak, saved in ranks(2, of_every_class):
        assert saved == (2 * INPUTS, 0)
        assert rest == held | {"activations": 2 * INPUTS, "communication": 0}
        # When the gradient comes, that of its product is there, too; the loss and its gradient are two numbers.
        beside = peak["activations"] - 2 * INPUTS - 2 * WEIGHTS
        assert 0 <= beside <= 16
        assert peak == held | {
            "gradients": 2 * (BUCKET + WEIGHTS), "activations": peak["activations"], "communication": 4 * MESSAGE,
        }  # fmt: skip


def test_the_peak_of_saved_bytes_may_come_first() -> None:
    with SavedActivations() as saved:
        for length in (INPUTS, INPUTS // 2):
            (nn.Parameter(torch.zeros(length)) * torch.zeros(length)).sum().backward()
    assert (saved.peak_bytes, saved.live_bytes) == (4 * INPUTS, 0)


def of_fully_shard(group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int]]:
    mesh = DeviceMesh.from_group(group, "cpu")
    with MemoryLedger() as memory:
        model = nn.Sequential(nn.Linear(8, 64, bias=False), *[nn.Linear(64, 64, bias=False) for _ in range(2)])
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        trained(model, optimizer)
        with memory.step():
            trained(model, optimizer)
        del model, optimizer
    return memory.rest, most(memory)


def test_fully_shard_stores_a_shard_of_each_class_at_rest(ranks: Ranks) -> None:
    for rest, highest in ranks(2, of_fully_shard):
        share = 4 * (8 * 64 + 2 * 64 * 64) // 2
        assert {name: rest[name] for name in ("parameters", "gradients")} == {"parameters": share, "gradients": share}
        assert rest["optimizer"] == 2 * share + 3 * 4
        assert rest["activations"] == 0
        assert highest["parameters"] >= share + 4 * 64 * 64  # a layer is gathered
        assert highest["gradients"] > share
        assert highest["communication"] > 0


# --- compared with the process's own numbers ---

LARGE = 3200 * 3200


def of_ten_million(_: dist.ProcessGroup, unseen_bytes: int) -> dict[str, tuple[int, int]]:
    """Train a model of 10M parameters with AdamW, 164 MB, next to `unseen_bytes` outside of tensors."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 3200)).sum().backward()
        optimizer.step()

    for size in (32, 3200):  # the first only loads the code
        with MemoryLedger() as memory:
            model = nn.Linear(size, 3200, bias=False) if size == 3200 else nn.Linear(3200, size, bias=False)
            optimizer = torch.optim.AdamW(model.parameters())
            step(model, optimizer)
            other = bytearray(unseen_bytes)
            with memory.step():
                step(model, optimizer)
            del model, optimizer, other
    assert total(memory.rest) == 16 * LARGE + 4
    return memory.compared_with_system()


# The process has 0.4 MB more than the 164 MB of tensors (0.2 %): whole pages, and growth of Python and kernel buffers.
# 3 % is enough for a kernel with huge pages of 2 MiB, in which a storage may begin and end.
TOLERANCE = 0.03


@pytest.mark.parametrize(("unseen_mib", "agree"), [(0, True), (32, False)])
def test_the_process_grows_by_the_bytes_of_tensors(ranks: Ranks, unseen_mib: int, agree: bool) -> None:
    for seen in ranks(1, of_ten_million, unseen_mib << 20):
        if "process bytes" not in seen:
            pytest.skip("no /proc here: the system reports no numbers")
        for name in ("process bytes", "process peak bytes"):
            if name in seen:
                counted, grown = seen[name]
                assert (abs(grown - counted) <= TOLERANCE * counted) == agree, seen


def test_weights_are_not_masters_of_older_tensors() -> None:
    """An earlier test in this process, or a user's file, may have left tensors from before the block."""
    left = small(torch.bfloat16)
    with MemoryLedger() as memory:
        model = small()
        with memory.step():
            model(torch.ones(5, 8))
    assert next(left.parameters()).itemsize == 2
    assert (memory.rest["parameters"], memory.rest["optimizer"]) == (4 * P, 0)


def test_weights_are_not_masters_of_an_outline() -> None:
    """The outline is float32, on the meta device, and shared by all functions that count parameters."""
    outlined = outline(Config.read({"LAB_MODEL": "mlp", "LAB_DEPTH": "1"}))
    with MemoryLedger() as memory:
        model = small(torch.float64)
        with memory.step():
            model(torch.ones(5, 8, dtype=torch.float64))
    assert (memory.rest["parameters"], memory.rest["optimizer"]) == (8 * P, 0)
    assert outline(Config.read({"LAB_MODEL": "mlp", "LAB_DEPTH": "1"})) is outlined


# A container's memory and its limit, read from both kinds of cgroup.


V2 = {"memory.max": "1000\n", "memory.current": "950\n",
      "memory.stat": "anon 5\ninactive_file 150\nactive_file 100\n"}  # fmt: skip
V1 = {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "950",
      "memory/memory.stat": "cache 9\ntotal_inactive_file 50\n"}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "limit", "used", "kept", "share"),
    [
        (V2, 1000, 800, 700, 0.8),  # without the cache
        (V2 | {"memory.max": "max\n"}, None, 800, 700, None),
        (V1, 1000, 900, 900, 0.9),
        # Without a limit it may be the whole machine.
        (V1 | {"memory/memory.limit_in_bytes": "9223372036854771712"}, None, None, None, None),
        ({}, None, None, None, None),
        ({"memory.max": "max\n"}, None, None, None, None),
    ],
    ids=["2", "2 without a limit", "1", "1 without a limit", "none", "no numbers"],
)
def test_a_containers_memory_and_its_limit(
    files: dict[str, str], limit: int | None, used: int | None, kept: int | None, share: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    memory = ContainerMemory(tmp_path)
    assert (memory.limit_bytes, memory.used_bytes(), memory.kept_bytes(), memory.share()) == (limit, used, kept, share)
