"""Tasks 12 and 13: layers in stages. The order of 1F1B, and a step over stages by messages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distlab.tools.puzzle.task import FLOAT64_BYTES, MESSAGES, Bench, Bound, Report, Task, Tensors, numbers, sizes_of

# 1F1B as a list of actions.

FORWARD_TIME, BACKWARD_TIME = 1, 2
Schedule = list[tuple[str, int]]


def counts(num_stages: int) -> tuple[int, int]:
    """Return numbers of microbatches: more than stages, and fewer if possible."""
    return 2 * num_stages + 1, max(1, num_stages - 1)


def play_schedule(answer: Any, bench: Bench) -> Tensors:
    with bench.measured():
        made = [answer.schedule(bench.rank, bench.world_size, count) for count in counts(bench.world_size)]
    bench.note("schedules", [[(str(action), int(number)) for action, number in each] for each in made])
    return {}


def inspect_schedules(world_size: int, reports: Sequence[Report]) -> str:
    for place, count in enumerate(counts(world_size)):
        fault = schedule_fault([report.seen["schedules"][place] for report in reports], count)
        if fault:
            return f"{world_size} stages and {count} microbatches: {fault}"
    return ""


def schedule_fault(schedules: Sequence[Schedule], num_microbatches: int) -> str:
    """Return the error of all stages' schedules: a missing microbatch, a deadlock, memory, bubble."""
    num_stages = len(schedules)
    for stage, actions in enumerate(schedules):
        wanted = sorted((action, number) for action in "BF" for number in range(num_microbatches))
        if sorted(actions) != wanted:
            return f"stage {stage} has to do F and B of each microbatch once, but has {len(actions)} actions"
    ends, stuck = simulated(schedules)
    if stuck:
        return f"no stage can continue: {stuck}"
    for stage, actions in enumerate(schedules):
        allowed = min(num_stages - stage, num_microbatches)
        if (most := in_flight(actions)) > allowed:
            return f"stage {stage} keeps the activations of {most} microbatches at one time, allowed {allowed}"
    least = (num_microbatches + num_stages - 1) * (FORWARD_TIME + BACKWARD_TIME)
    if max(ends.values()) > least:
        busy = num_microbatches * (FORWARD_TIME + BACKWARD_TIME)
        bubble, allowed_bubble = 1 - busy / max(ends.values()), 1 - busy / least
        return f"the bubble is {bubble:.1%} of the time, allowed {allowed_bubble:.1%}"
    return ""


def in_flight(actions: Schedule) -> int:
    """Return the most microbatches after forward and before backward."""
    now = most = 0
    for action, _ in actions:
        now += 1 if action == "F" else -1
        most = max(most, now)
    return most


def simulated(schedules: Sequence[Schedule]) -> tuple[dict[tuple[str, int, int], int], str]:
    """Return when each (action, stage, microbatch) ends, and what stages wait for in a deadlock."""
    ends: dict[tuple[str, int, int], int] = {}
    free, done = [0] * len(schedules), [0] * len(schedules)
    while any(done[stage] < len(actions) for stage, actions in enumerate(schedules)):
        waiting = []
        before = len(ends)
        for stage, actions in enumerate(schedules):
            if done[stage] == len(actions):
                continue
            action, number = actions[done[stage]]
            needs = needed(action, stage, number, len(schedules))
            missing = [each for each in needs if each not in ends]
            if missing:
                waiting.append(f"stage {stage} waits for {missing[0][0]} {number} of stage {missing[0][1]}")
                continue
            begins = max([free[stage], *(ends[each] for each in needs)])
            free[stage] = ends[action, stage, number] = begins + (FORWARD_TIME if action == "F" else BACKWARD_TIME)
            done[stage] += 1
        if len(ends) == before:
            return ends, ", ".join(waiting)
    return ends, ""


def needed(action: str, stage: int, number: int, num_stages: int) -> list[tuple[str, int, int]]:
    if action == "F":
        return [("F", stage - 1, number)] if stage else []
    return [("F", stage, number), *([("B", stage + 1, number)] if stage < num_stages - 1 else [])]


SCHEDULE = Task(
    number=12,
    name="schedule_1f1b",
    title="1F1B as a list of actions",
    idea="""\
A pipeline's stage does the forward pass (F) of microbatches that come from the stage before it, and their backward pass
(B), whose gradients come from the stage after it. Between F and B of a microbatch it has to keep the activations. If
each stage does all F first (GPipe), it keeps those of all microbatches. 1F1B (Narayanan et al. 2019, section 3.2) takes
just as long and keeps few: after some F to fill the pipeline, each stage does one F and one B in turn, and at the end
the remaining B. The last stage needs no F in advance, the one before it needs one, and so on. Here F takes 1
and B 2 units of time.""",
    stub='''\
def schedule(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    """Return the actions of a stage in their order, such as [("F", 0), ("F", 1), ("B", 0), ("B", 1)]: F and B of each
    microbatch 0 to num_microbatches - 1. Stage 0 has the inputs. There may be fewer microbatches than stages."""
    ...
''',
    hints=(
        "How many F come before the first B? On the last stage one, on the stage before it two.",
        "warm_up = min(num_stages - stage - 1, num_microbatches) F, then pairs of F and B, then B alone.",
    ),
    allowed=frozenset(),
    limits=(
        "the bubble of GPipe, (S - 1) / (M + S - 1) of the time; stage s keeps the activations of at most S - s"
        " microbatches"
    ),
    play=play_schedule,
    expected=lambda world_size: [{} for _ in range(world_size)],
    inspect=inspect_schedules,
)


# A step.

WIDTH, BATCH, MICROBATCHES = 9, 31, 3
SIZES = sizes_of(BATCH, MICROBATCHES)
INPUTS, TARGETS = numbers(1300, BATCH, WIDTH).split(SIZES), numbers(1301, BATCH, WIDTH).split(SIZES)


def stage_of(rank: int) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(numbers(1310 + rank, WIDTH, WIDTH) / 2)
        layer.bias.copy_(numbers(1320 + rank, WIDTH))
    return nn.Sequential(layer, nn.Tanh())


def loss(outputs: Tensor, microbatch: int) -> Tensor:
    """Return the microbatch's part of the mean over the batch."""
    part: Tensor = ((outputs - TARGETS[microbatch]) ** 2).sum() / BATCH
    return part


def play_step(answer: Any, bench: Bench) -> Tensors:
    stage = stage_of(bench.rank)
    inputs = list(INPUTS) if bench.rank == 0 else []
    with bench.measured():
        answer.pipeline_step(stage, inputs, loss, [(size, WIDTH) for size in SIZES], bench.group)
    return {name: each.grad for name, each in named(stage)}  # type: ignore[misc]


def named(stage: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"{name.removeprefix('0.')}.grad", each) for name, each in stage.named_parameters()]


def gradients(world_size: int, microbatches: Sequence[int]) -> list[Tensors]:
    stages = [stage_of(rank) for rank in range(world_size)]
    for microbatch in microbatches:
        loss(nn.Sequential(*stages)(INPUTS[microbatch]), microbatch).backward()
    return [{name: each.grad for name, each in named(stage)} for stage in stages]  # type: ignore[misc]


STEP = Task(
    number=13,
    name="pipeline_step",
    title="A pipeline of stages by send and receive",
    idea="""\
Each rank has a stage: some layers of the model. Activations travel forward from stage to stage, their gradients back.
Autograd ends at the border of a rank: what is received is a tensor without a history. So let it require a gradient,
keep input and output of each microbatch, and in the backward pass give autograd the gradient of the output that the
next stage has sent: output.backward(gradient). The gradient of the input then belongs to the stage before. In gloo a
send returns once the other side receives: two neighbours that send to each other at the same time wait forever.""",
    stub='''\
def pipeline_step(
    stage: torch.nn.Module,
    inputs: list[Tensor],
    loss: Callable[[Tensor, int], Tensor],
    shapes: list[tuple[int, int]],
    group: dist.ProcessGroup,
) -> None:
    """Leave in the grad of the stage's parameters the gradient of the sum of all microbatches' losses. Rank r has stage
    r. Rank 0 has the inputs, one [B_m, 9] per microbatch, and other ranks an empty list; shapes are those of the
    microbatches on all ranks, float64. On the last rank loss(outputs, m) is the loss of microbatch m."""
    ...
''',
    hints=(
        "First the forward pass of all microbatches, then the backward pass of all, in the same order: that is GPipe.",
        "x = torch.empty(shape, dtype=torch.float64), receive into it, then x.requires_grad_().",
        "Send output.detach(); on the last stage call backward() of the loss, on others output.backward(gradient).",
    ),
    allowed=MESSAGES,
    limits="each stage sends each microbatch's activations once forward and their gradients once back",
    play=play_step,
    expected=lambda world_size: gradients(world_size, range(MICROBATCHES)),
    suspects=lambda world_size: {
        "the gradient of the last microbatch alone": gradients(world_size, [MICROBATCHES - 1])
    },
    bound=lambda world_size: Bound(  # noqa: ARG005
        rank_bytes=2 * BATCH * WIDTH * FLOAT64_BYTES, messages=2 * MICROBATCHES
    ),
)  # fmt: skip

TASKS = (SCHEDULE, STEP)
