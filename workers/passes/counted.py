"""The counted pass: what a step of a variant sends and holds.

One step, after two that warm up, with one variant alive at a time, under the ledger and the meters of memory, whose
cost the timed pass does not see. A strategy whose steps are not alike says after how many they repeat
(`repeats_after`): so many are counted.
"""

import gc
from collections.abc import Mapping

import torch

from workers.contract import Build, Counted, Strategy
from workers.lab import Lab
from workers.measure.activations import SavedActivations
from workers.measure.ledger import Traffic
from workers.measure.memory import MemoryLedger
from workers.measure.order import Order
from workers.parallel.phases import heard
from workers.passes.again import Passes, check_passes
from workers.report import records
from workers.workload.data import Batches

WARMUP_STEPS = 2  # DDP rebuilds its buckets after the first step


def count(lab: Lab, variants: Mapping[str, Build]) -> dict[str, Counted]:
    """What a step of each variant sends, and the most that it holds, with one variant alive at a time."""
    dtype = getattr(torch, lab.config.dtype)
    batches = lab.batches(dtype)
    counted = {}
    again = {each.name for each in lab.mode.variants if lab.config.recompute and each.recomputes and not each.by_torch}
    for name, build in variants.items():
        lab.at(0, f"count of {name}")
        gc.collect()  # torch's optimizers refer to themselves: what the pass before trained would stand beside this
        with MemoryLedger(lab.device) as memory:
            strategy = build(lab.model(dtype), lab.mesh, lab.config.untimed())
            train(lab, strategy, batches, range(WARMUP_STEPS))
            steps = repeats_after(strategy)
            order, passes = Order(getattr(strategy, "layers", {})), Passes(getattr(strategy, "layers", {}))
            with (
                lab.count() as traffic,
                SavedActivations(memory.saves) as activations,
                memory.step(order),
                heard(order.mark),
                passes.watched(),
            ):
                train(lab, strategy, batches, range(WARMUP_STEPS, WARMUP_STEPS + steps))
            del strategy
        counted[name] = Counted(
            traffic.per(steps), activations.peak_bytes, memory.rest, memory.peak, order, most=memory.most
        )  # fmt: skip
        write_traffic(lab, name, counted[name].traffic)
        if name in again:
            check_passes(lab, name, passes)
        lab.journal.write(records.Activations(name, activations.peak_bytes))
        write_memory(lab, name, memory)
        lab.work.advance()
    return counted


def repeats_after(strategy: Strategy) -> int:
    """After how many steps it makes the same calls again; of one that never does, how many are counted."""
    steps: int = getattr(strategy, "repeats_after", 1)
    return max(1, steps)


def alike(strategy: Strategy) -> bool:
    """Whether it ever makes the same calls again."""
    return getattr(strategy, "repeats_after", 1) > 0


def write_memory(lab: Lab, name: str, memory: MemoryLedger) -> None:
    """What tensors held, and beside it what the process and the container count, which see more than tensors."""
    lab.journal.write(records.Memory(name, memory.peak_bytes))
    lab.journal.write(records.Classes(name, memory.rest, memory.peak))
    lab.journal.write(records.MemoryLine(name, memory.step_s, memory.line()))
    for comparison, (counted, seen) in memory.seen_outside().items():
        lab.compare(
            comparison, counted, seen, variant=name, formula="bytes of tensors", shown="it holds more than tensors"
        )


def train(lab: Lab, strategy: Strategy, batches: Batches, steps: range) -> None:
    for step in steps:
        strategy.backward(lab.dealt(batches, step))
        strategy.update()


def write_traffic(lab: Lab, name: str, traffic: Traffic) -> None:
    for call in traffic.called:
        lab.journal.write(records.Called(name, call.op, call.axis, call.calls, call.raw_bytes, call.called_bytes))
    for peer, wire in traffic.wire.items():
        lab.journal.write(records.Wire(name, peer, wire.sent, wire.retransmitted))
    if traffic.wire_error is not None:
        lab.say(traffic.wire_error, heading="no wire")
