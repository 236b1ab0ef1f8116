"""Check each variant against one process that replays the membership record step by step.

The process splits each step's batch over that step's members, sums what each would have computed, and takes the update.
It shares only the model, the data and the rule for distributing samples with the ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.contract import Claims, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import Worst
from distlab.lab.workload.data import Batches
from distlab.lab.workload.reference import OneProcess, Snapshot
from distlab.techniques.collectives.costs import wire_tolerance
from distlab.techniques.elastic.shards import Recut, part
from distlab.techniques.elastic.strategy import (
    OWNERS,
    STEP,
    ShardedSurvivor,
    Survivor,
    replica_step_bytes,
    sharded_step_bytes,
    step_messages,
    stored_bytes,
)

from .network import Net
from .options import Options
from .recovery import Course, Event, Policy

TOLERANCE = 1e-12  # float64
RULE = (
    "an epoch is a permutation drawn from (seed, epoch); the members of a step divide its next LAB_BATCH samples, so"
    " the samples of a lost rank are reassigned (LAB_RESCALE=1: each member keeps its number of samples)"
)


def members_at(record: list[list[Any]], step: int) -> list[int]:
    members: list[int] = [ranks for first, ranks in record if first <= step][-1]
    return members


def is_first(lab: Lab, course: Course) -> bool:
    """Return whether this rank is the first member at the end, which reports for all."""
    return course.finished and lab.rank == members_at(course.record, course.training.steps)[0]


def batch_at(batches: Batches, course: Course, step: int) -> int:
    """Return the samples of a step: LAB_BATCH, or its members' part of it with LAB_RESCALE."""
    if course.training.rescale:
        return sum(batches.kept_sizes(len(members_at(course.record, step))))
    return batches.batch


def assignments(batches: Batches, course: Course) -> Iterator[list[list[int]]]:
    """Yield for each step the samples that its members should have, in member order."""
    seen = 0
    for step in range(course.training.steps):
        size = len(members_at(course.record, step))
        if not course.training.rescale:
            yield [batches.sample_ids(step, place, size) for place in range(size)]
            continue
        assignment = []
        for count in batches.kept_sizes(size):
            assignment.append(batches.ids_from(seen, count))
            seen += count
        yield assignment


def replay(lab: Lab, course: Course) -> tuple[Snapshot, list[float]]:
    """Return weights and losses of one process after all steps; smaller batches have smaller learning rates."""
    batches = lab.batches(torch.float64, proof=True)
    one, losses = OneProcess(lab.model(torch.float64), lab.config), list[float]()
    for assignment in assignments(batches, course):
        samples = sum(map(len, assignment))
        for group in one.optimizer.param_groups:
            group["lr"] = lab.config.learning_rate * (samples / batches.batch)
        share = 1 / (samples * batches.samples.terms)
        losses.append(one.step([part for ids in assignment for part in batches.parts(ids, share)]))
    return one.snapshot(), losses


def named(vector: Tensor, like: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    parts = vector.split([each.numel() for each in like.values()])
    return [(name, part.view_as(each)) for part, (name, each) in zip(parts, like.items(), strict=True)]


def owners(lab: Lab, course: Course) -> Tensor:
    """Return the expected owners: [steps, E], 1 + (rank + 1)/1024 where one rank uses a sample once."""
    batches = lab.batches(torch.float64, proof=True)
    rows = torch.zeros(course.training.steps, batches.num_batches * batches.batch, dtype=torch.float64)
    for step, assignment in enumerate(assignments(batches, course)):
        for rank, ids in zip(members_at(course.record, step), assignment, strict=True):
            rows[step].index_add_(0, torch.tensor(ids), rows.new_full((len(ids),), 1 + (rank + 1) / OWNERS))
    return rows


def check_claims(lab: Lab, course: Course) -> None:
    name, training = course.policy.name, course.training
    if not course.policy.restarts:  # in a restart all ranks start again
        detail = "updates that this rank had applied and that are not valid"
        lab.check("updates kept", course.undone, 0, name, detail)
    if not course.finished:
        return
    lab.check("replicas", course.deviation, 0, name, "weights, moments and history, compared with the first member's")
    course.audit.decide()
    check_redone(lab, course)
    check_interval(lab, course)
    check_shards(lab, course)
    check_rates(lab, course)
    if not is_first(lab, course):
        return
    alone, losses = replay(lab, course)
    assert course.moments is not None
    found = Worst()
    found.compare("weights", named(training.piece.weights, alone.weights), alone.weights, TOLERANCE, "after all steps")
    for key, moments in zip(("exp_avg", "exp_avg_sq") if alone.optimizer else (), course.moments, strict=False):
        wanted = {each: alone.optimizer[f"{key}.{each}"] for each in alone.weights}
        found.compare("optimizer", named(moments, wanted), wanted, TOLERANCE, f"{key} after all steps")
    for step, (mine, loss) in enumerate(zip(training.history[:, -1].tolist(), losses, strict=True)):
        found.note("losses", abs(mine - loss), TOLERANCE, f"step {step}")
    for check, off in found.found.items():
        lab.check(check, *off[:2], name, off.where)
    check_samples(lab, course)


def check_redone(lab: Lab, course: Course) -> None:
    """Check that a loss costs at most the current step, or the steps since the last checkpoint."""
    changes = [event for event in course.events if event.why.startswith("lost") or event.restored]
    if course.lives > 1 or not course.record or lab.rank not in course.record[0][1] or course.record[0][0] > 0:
        return
    most = sum(course.saved_every if change.restored else 1 for change in changes)
    again = course.computed - course.training.steps
    detail = f"steps computed again beyond the {most} that {len(changes)} losses may cost"
    lab.check("redone", max(0, again - most), 0, course.policy.name, detail)


def check_interval(lab: Lab, course: Course) -> None:
    """Check that a return to a checkpoint redoes fewer steps than lie between two; or as many, if all save together and
    one may die meanwhile."""
    redone = [event.applied_before - event.applied for event in course.events if event.restored]
    if redone:
        most = course.saved_every - (not course.policy.sharded)
        detail = "most steps between a checkpoint and a loss that returned to it"
        lab.check("save interval", max(0, *redone), most, course.policy.name, detail)


def check_shards(lab: Lab, course: Course) -> None:
    """Check that no more of the shards was sent than was missing."""
    training = course.training
    if not isinstance(training, ShardedSurvivor):
        return
    for recut in training.recuts:
        lacked = lacking_bytes(training, recut, lab.rank)
        lab.compare(
            "moved bytes", lacked, recut.received_bytes, "B", 0.0, course.policy.name,
            f"16 B x the numbers that rank {lab.rank} lacked of its part over ranks {recut.ranks}",
        )  # fmt: skip


def lacking_bytes(training: ShardedSurvivor, recut: Recut, rank: int) -> int:
    """Return the bytes of the new cut that `rank` needed and did not have."""
    if recut.restored:
        return 0  # all came from one member's disk
    wanted, had = torch.zeros(2, training.total, dtype=torch.bool)
    wanted[slice(*part(training.total, recut.ranks.index(rank), len(recut.ranks)))] = True
    had[slice(*recut.has.get(rank, (0, 0)))] = True
    return 8 * len(training.piece.moments) * int((wanted & ~had).sum())


def check_rates(lab: Lab, course: Course) -> None:
    """Check the learning rate of each step that this rank applied itself, for its members' number of samples."""
    training = course.training
    if not training.rescale:
        return
    found = Worst()
    for step, rate in training.rates.items():
        samples = batch_at(training.batches, course, step)
        wanted = lab.config.learning_rate * samples / lab.config.batch
        where = f"step {step} with {samples} samples: {rate:.3g}, wanted {wanted:.3g}"
        found.note("learning rate", abs(rate / wanted - 1), TOLERANCE, where)
    for check, off in found.found.items():
        lab.check(check, *off[:2], course.policy.name, off.where)


def check_samples(lab: Lab, course: Course) -> None:
    """Check that each epoch uses each sample once, on the rank that the record names."""
    name, steps = course.policy.name, course.training.steps
    batches, seen = lab.batches(torch.float64, proof=True), course.training.history[:, :-1]
    stream = torch.tensor([sample for step in range(steps) for sample in batches.full_ids(step)])
    sizes, wrong = [batch_at(batches, course, step) for step in range(steps)], 0
    for row, ids in zip(seen.floor(), stream[: sum(sizes)].split(sizes), strict=True):
        wrong += int((row - ids.bincount(minlength=len(row))).abs().sum())
    epochs = -(-sum(sizes) // seen.shape[1])
    lab.check("samples", wrong, 0, name, f"of {epochs} epochs, not used exactly once; {RULE}")
    differing = int((seen != owners(lab, course)).sum())
    detail = "samples used by another rank than the membership record says"
    lab.check("record", differing, 0, name, detail)


# Bytes sent in a step and stored between steps, compared with their formulas: before the first loss, on all ranks.
#
# Each variant takes two steps in a group of all ranks, and the second is counted: by the group's calls, and by the
# kernel's byte counts of the sockets.


def count(lab: Lab, net: Net, policy: Policy, training: Survivor) -> None:
    """Check a step of a variant against its formulas; a collective of all ranks, before any is lost."""
    size, ranks, group = lab.world_size, list(range(lab.world_size)), net.group
    net.form_of(f"count {policy.name}", lab.rank, size)
    lab.exchange.barrier("all have the group")
    training.enter(group, ranks, training.decide({rank: training.report() for rank in ranks}, []))
    training.step(group, lab.rank, size, join_request=False)
    before = group.called_bytes
    with lab.count(calls=False) as traffic:
        training.step(group, lab.rank, size, join_request=False)
    called = group.called_bytes - before
    lab.exchange.barrier("all have counted")
    group.leave()
    predicted, formula = step_bytes(lab, training)
    compare = partial(lab.compare, variant=policy.name)
    compare("called bytes", round(predicted, 3), round(called, 3), formula=formula)
    if traffic.wire_error is None and size > 1:
        total = len(training.vectors.weights)
        messages = step_messages(size, total, training.epoch, sharded=policy.sharded)
        tolerance = wire_tolerance(predicted, messages)
        compare("wire bytes", predicted, traffic.wire_bytes, tolerance=tolerance, formula=formula)
    if isinstance(training, ShardedSurvivor):
        own, stored = own_numbers(training, lab.rank, size), sum(each.nbytes for each in training.versions)
        wanted = stored_bytes(own, len(training.piece.moments))
        compare("moments held", wanted, stored, formula="16 B x own")


def step_bytes(lab: Lab, training: Survivor) -> tuple[float, str]:
    """Return the bytes that this rank should send in a step, and the formula."""
    size, total, samples = lab.world_size, len(training.vectors.weights), training.epoch
    if not isinstance(training, ShardedSurvivor):
        return replica_step_bytes(size, total, samples), STEP["replica"]
    return sharded_step_bytes(size, total, samples, own_numbers(training, lab.rank, size)), STEP["sharded"]


def own_numbers(training: ShardedSurvivor, place: int, size: int) -> int:
    """Return how many numbers a member's part has."""
    begin, end = part(training.total, place, size)
    return end - begin


def claims(mode: Mode, config: Config, options: Options) -> Sequence[Claims]:
    """Return the checks: bytes before the first loss, and the survivors' comparisons with one process."""
    chosen, line, more = mode.names, "test_a_wrong_step_fails_its_check", "test_a_step_that_sends_more_fails_its_check"
    some_stay = options.losses < config.world_size - 1  # otherwise no rank may be present throughout
    return (
        Claims(("called bytes",), chosen, fails_in=more),
        Claims(("wire bytes",), chosen, when=config.world_size > 1, fails_in=more),
        Claims(("moments held",), ("zero1",), fails_in="test_moments_kept_too_long_fail_their_check"),
        Claims(("moved bytes",), (), fails_in="test_a_shard_sent_twice_fails_its_check"),
        Claims(("times of changes",), (), fails_in="test_times_with_a_wrong_start_fail"),
        Claims(("updates kept",), [name for name in chosen if name != "restart"]),
        Claims(("weights", "samples", "replicas"), chosen, one=True),
        Claims(("losses", "record"), chosen, one=True, fails_in=line),
        Claims(("learning rate",), chosen, one=True, when=options.rescale),
        Claims(("optimizer",), chosen, one=True, when=config.optimizer == "adamw"),
        Claims(("redone",), chosen, one=True, when=some_stay, fails_in=line),
        Claims(("audited replicas",), chosen, one=True, when=some_stay and config.audit_every == 1),
    )


# A summary of a run's losses: the members over time, and the cost of each change.

AGREED, NEXT = "agreed after (ms)", "next step after (ms)"
COLUMNS = [
    "", "what", "step", "in before", "in after", "steps redone", "state from", AGREED, NEXT, "next step at (s)",
]  # fmt: skip
ROUNDED_S = 1e-4  # to tenths of a millisecond in a row


def show(lab: Lab, courses: list[Course]) -> None:
    """Show each variant as its first member recorded it; all survivors call it together."""
    for course in courses:
        for event in course.events:
            lab.changed(course.policy.name, event.applied, event.began_at, what_changed(event), event.after)
        check_times(lab, course)
    first_at = min((each.commits[0][0] for each in courses if each.commits), default=None)
    mine = [[each.events, each.record] if is_first(lab, each) else None for each in courses]
    gathered = lab.exchange.gather("elastic", [first_at, mine])
    if gathered is None:
        return
    lab.say(RULE, "rule")
    first_at = min((at for at, _ in filter(None, gathered) if at is not None), default=0.0)
    everyone = [of_rank for _, of_rank in filter(None, gathered)]
    rows: list[list[Any]] = []
    for number, course in enumerate(courses):
        name = course.policy.name
        for events, in_when in [of_rank[number] for of_rank in everyone if of_rank[number]]:
            rows += [[name, *event_row(Event(*event), first_at)] for event in events]
            record = ", ".join(f"from step {first}: {' '.join(map(str, ranks))}" for first, ranks in in_when)
            lab.say(f"{name}: {record}", "members")
            if course.training.rescale:
                lab.say(f"{name}: {rescaled(course, in_when)}", "rate", at="normal")
    if rows:
        title = "Cost of each change of members, recorded by the first member; times count from the run's first step"
        lab.table(title, COLUMNS, rows)
    lab.say(result(rows, len(courses)), "result", at="normal")


def result(rows: Sequence[Sequence[Any]], variants: int) -> str:
    """Return the losses' cost in one line: seconds from a change to the next step, variants with redone steps."""
    changes = [dict(zip(COLUMNS, row, strict=True)) for row in rows if row[1] == "lost"]
    if not changes:
        return "no rank was lost"
    took_s = sorted(change[NEXT] / 1000 for change in changes if change[NEXT] != "")
    recovery = f"recovery {took_s[0]:.2f} to {took_s[-1]:.2f} s" if took_s else "no step after a loss"
    redone = {change[""] for change in changes if change["steps redone"]}
    losses = "1 loss" if len(changes) == 1 else f"{len(changes)} losses"
    return f"{losses}: {recovery}; {len(redone)} of {variants} variants lost a step"


def check_times(lab: Lab, course: Course) -> None:
    """Check that a row's times begin with the change: agreed before the next step, which is the first one after that,
    and both in order."""
    faults = [fault for event in course.events for fault in time_faults(event, [at for at, _ in course.commits])]
    if course.events:
        detail = faults[0] if faults else f"{len(course.events)} changes on this rank"
        lab.check("times of changes", len(faults), 0, course.policy.name, detail)


def time_faults(event: Event, step_times: Sequence[float]) -> Iterator[str]:
    """Yield a sentence for each impossible time of a change, given the times of steps."""
    cells = dict(zip(COLUMNS, ["", *event_row(event, 0.0)], strict=True))
    began_at, agreed_s = event.began_at, cells[AGREED] / 1000
    if not began_at <= event.met_at <= event.agreed_at:
        yield f"it began at {began_at}, all met at {event.met_at} and agreed at {event.agreed_at}"
    if abs(began_at + agreed_s - event.agreed_at) > ROUNDED_S:
        yield f"agreed {agreed_s:g} s after it began, expected: {event.agreed_at - began_at:g}"
    next_at = next((at for at in step_times if at >= event.agreed_at), None)
    if not event.next_step_at:  # another change came first
        return
    next_s = cells[NEXT] / 1000
    if next_at != event.next_step_at or abs(began_at + next_s - next_at) > ROUNDED_S:
        yield f"the next step {next_s:g} s after it began, expected: {(next_at or 0) - began_at:g}"


def what_changed(event: Event) -> str:
    """Name the change: a rank was lost, one asked to join, or all restarted from a checkpoint."""
    return "asked" if event.why == "asked" else "restart" if event.restored else "lost"


def rescaled(course: Course, record: list[list[Any]]) -> str:
    """Return the batches and learning rates, with the step from which each applied."""
    batches, found = course.training.batches, []
    for first, ranks in record:
        samples = sum(batches.kept_sizes(len(ranks)))
        rate = course.training.config.learning_rate * samples / batches.batch
        found.append(f"from step {first}: {samples} samples at {rate:.3g}")
    return f"learning rate {', '.join(found)}"


def event_row(event: Event, first_at: float) -> list[Any]:
    """Return the cells of a change, in a run whose first step ended at `first_at`; empty without a step after it."""
    redone = max(0, event.applied_before - event.applied)
    members = [" ".join(map(str, ranks)) for ranks in (event.before, event.after)]
    source = "checkpoint" if event.restored else "memory"
    cells = [event.why.partition(":")[0], event.applied, *members, redone, source, in_ms(event.agreed_at, event)]
    if not event.next_step_at:
        return [*cells, "", ""]
    return [*cells, in_ms(event.next_step_at, event), round(event.next_step_at - first_at, 3)]


def in_ms(at: float, event: Event) -> float:
    """Milliseconds since the change began."""
    return round(1000 * (at - event.began_at), 1)
