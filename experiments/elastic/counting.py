"""What a step sends and what is held between two steps, beside their formulas: before the first loss, with all ranks.

Each variant takes two steps in a group of all ranks, the second of which is counted: as called by the group, and on the
wire by what the kernel says of the sockets.
"""

from experiments.elastic.net import Net
from experiments.elastic.policy import Policy
from workers.lab import Lab
from workers.measure.formulas.elastic import (
    STEP,
    copy_bytes,
    held_bytes,
    replica_step_bytes,
    sharded_step_bytes,
    step_messages,
)
from workers.measure.formulas.messages import wire_tolerance
from workers.parallel.shards import part, wards
from workers.strategies.sharded_survivor import ShardedSurvivor
from workers.strategies.survivor import Survivor

CONTROL = "tests/experiments/test_elastic.py::test_a_step_that_sends_more_fails_by_name"
HELD_CONTROL = "tests/experiments/test_elastic.py::test_what_is_hoarded_fails_by_name"


def count(lab: Lab, net: Net, policy: Policy, training: Survivor) -> None:
    """Hold a step of one variant against its formulas; a collective of all ranks, none of which may be lost yet."""
    size, ranks, group = lab.world_size, list(range(lab.world_size)), net.group
    group.form(f"count {policy.name}", lab.rank, size, net.lines.book[0], lambda: True)
    lab.exchange.barrier("all have the group")
    training.enter(group, ranks, training.decide({rank: training.report() for rank in ranks}, []))
    training.step(group, lab.rank, size, wish=False)
    before = group.called_bytes
    with lab.count(calls=False) as traffic:
        training.step(group, lab.rank, size, wish=False)
    called = group.called_bytes - before
    lab.exchange.barrier("all have counted")
    group.leave()
    predicted, formula = step_bytes(lab, policy, training)
    lab.compare(
        "called bytes", round(predicted, 3), round(called, 3), "B", 0.0, policy.name, formula, control=CONTROL
    )  # fmt: skip
    if traffic.wire_error is None and size > 1:
        messages = step_messages(
            size, len(training.vectors.weights), training.epoch, sharded=policy.sharded, copies=policy.copies
        )
        tolerance = wire_tolerance(predicted, messages)
        lab.compare(
            "wire bytes", predicted, traffic.wire_bytes, "B", tolerance, policy.name, formula, control=CONTROL
        )  # fmt: skip
    if isinstance(training, ShardedSurvivor):
        own, kept = parts(training, lab.rank, size)
        rows = len(training.piece.moments)
        held = sum(each.nbytes for each in training.held)
        what = "16 B x (own + kept)" if training.copies else "16 B x own"
        lab.compare(
            "moments held", held_bytes(own, kept, rows), held, "B", 0.0, policy.name, what, control=HELD_CONTROL
        )  # fmt: skip


def step_bytes(lab: Lab, policy: Policy, training: Survivor) -> tuple[float, str]:
    """What this rank should send in a step, and the formula."""
    size, total, samples = lab.world_size, len(training.vectors.weights), training.epoch
    if not isinstance(training, ShardedSurvivor):
        return replica_step_bytes(size, total, samples), STEP["replica"]
    own, _ = parts(training, lab.rank, size)
    predicted = sharded_step_bytes(size, total, samples, own)
    copied = copy_bytes(own, len(training.piece.moments)) if policy.copies and size > 1 else 0
    return predicted + copied, STEP["copied" if policy.copies else "sharded"]


def parts(training: ShardedSurvivor, place: int, size: int) -> tuple[int, int]:
    """How many numbers are this member's own, and of how many it keeps copies."""
    lengths = [end - begin for begin, end in (part(training.total, each, size) for each in range(size))]
    return lengths[place], sum(lengths[each] for each in wards(place, size)) if training.copies else 0
