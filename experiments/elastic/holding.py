"""What a variant came to, held against one process that goes through the membership record step by step.

The process deals each step's batch to those who were in at it, adds up what each of them would have computed, and
takes the update. It shares no line with the ranks but the model, the data and the rule by which samples are dealt.
"""

from typing import Any

import torch
from torch import Tensor

from experiments.elastic.course import Course
from workers.lab import Lab
from workers.strategies.survivor import OWNERS
from workers.workload.baseline import backward
from workers.workload.optimizer import make_optimizer

CONTROL = "tests/experiments/test_elastic.py::test_a_wrong_line_fails_by_name"
TOLERANCE = 1e-12  # float64
RULE = (
    "an epoch is a permutation by (seed, epoch), a step takes its next LAB_BATCH samples, and whoever is in at the step"
    " divides them; a lost rank's samples are dealt anew"
)


def members_at(record: list[list[Any]], step: int) -> list[int]:
    """Who was in at `step`, by the membership record."""
    members: list[int] = [ranks for first, ranks in record if first <= step][-1]
    return members


def replay(lab: Lab, record: list[list[Any]], steps: int) -> tuple[Tensor, Tensor, list[float]]:
    """One process: the weights [P] and AdamW's moments [2, P] after all steps, and the losses."""
    model, batches = lab.model(torch.float64), lab.batches(torch.float64, proof=True)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters, lab.config)
    losses = []
    for step in range(steps):
        size = len(members_at(record, step))
        parts = [part for place in range(size) for part in batches.dealt(step, place, size)]
        losses.append(backward(model, parts, lab.config))
        optimizer.step()
    keys = ("exp_avg", "exp_avg_sq") if lab.config.optimizer == "adamw" else ()
    moments = [torch.cat([optimizer.state[each][key].flatten() for each in parameters]) for key in keys]
    weights = torch.cat([each.detach().flatten() for each in parameters])
    return weights, torch.stack(moments) if moments else weights.new_zeros(0, len(weights)), losses


def owners(lab: Lab, record: list[list[Any]], steps: int) -> Tensor:
    """Who should have seen what: [steps, E], 1 + (rank + 1)/1024 where one rank sees a sample once."""
    batches = lab.batches(torch.float64, proof=True)
    rows = torch.zeros(steps, batches.num_batches * batches.batch, dtype=torch.float64)
    for step in range(steps):
        members = members_at(record, step)
        for place, rank in enumerate(members):
            rows[step, batches.sample_ids(step, place, len(members))] += 1 + (rank + 1) / OWNERS
    return rows


def hold(lab: Lab, course: Course) -> None:
    """What each member claims, and the first of them for all."""
    name, training = course.policy.name, course.training
    hold_kept(lab, course)
    if not course.finished:
        return
    lab.check("replicas", course.apart, 0, name, "this rank's weights, moments and history beside the first member's")
    hold_redone(lab, course)
    if lab.rank != members_at(course.record, training.steps)[0]:
        return
    weights, moments, losses = replay(lab, course.record, training.steps)
    assert course.moments is not None
    lab.check("weights", largest(training.piece.weights - weights), TOLERANCE, name, "after all steps")
    if len(moments):
        lab.check("optimizer", largest(course.moments - moments), TOLERANCE, name, "AdamW's moments after all steps")
    found = training.history[:, -1] - torch.tensor(losses, dtype=torch.float64)
    lab.check("losses", largest(found), TOLERANCE, name, "of all steps that stand", control=CONTROL)
    hold_samples(lab, course)


def hold_kept(lab: Lab, course: Course) -> None:
    """No change of who is in took back what this rank had applied, save where all start again."""
    if not course.policy.restarts:
        detail = "updates that this rank had applied and that do not stand"
        lab.check("updates kept", course.taken_back, 0, course.policy.name, detail)


def hold_redone(lab: Lab, course: Course) -> None:
    """A loss costs at most the step that was under way, or what has been computed since the last checkpoint."""
    events = [event for event in course.events if event.why.startswith("lost")]
    if course.lives > 1 or not course.record or lab.rank not in course.record[0][1] or course.record[0][0] > 0:
        return
    most = len(events) * (course.saved_every if course.policy.restarts else 1)
    again = course.computed - course.training.steps
    detail = f"steps computed again beyond the {most} that {len(events)} losses may cost"
    lab.check("redone", max(0, again - most), 0, course.policy.name, detail, control=CONTROL)


def hold_samples(lab: Lab, course: Course) -> None:
    """Each sample of each epoch exactly once, and by whom the record says."""
    name, steps = course.policy.name, course.training.steps
    batches, seen = lab.batches(torch.float64, proof=True), course.training.history[:, :-1]
    wanted = torch.zeros_like(seen)
    for step in range(steps):
        wanted[step, batches.full_ids(step)] = 1
    per_epoch = -(-steps // batches.num_batches)
    wrong = 0.0
    for epoch in range(per_epoch):
        rows = slice(epoch * batches.num_batches, (epoch + 1) * batches.num_batches)
        wrong += float((seen[rows].floor().sum(0) - wanted[rows].sum(0)).abs().sum())
    lab.check("samples", wrong, 0, name, f"of {per_epoch} epochs, left out or seen again; {RULE}")
    apart = int((seen != owners(lab, course.record, steps)).sum())
    lab.check(
        "record", apart, 0, name, "samples that others computed with than the membership record says", control=CONTROL
    )


def largest(difference: Tensor) -> float:
    """The largest absolute value, 0 of nothing."""
    return float(difference.abs().max()) if difference.numel() else 0.0
