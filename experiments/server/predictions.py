"""Bytes that a step of the server and its like sends, settings that they cannot take, and the claims of a run; and how
large a rate is stable at a staleness, which is tried.
"""

import math
import random
from collections.abc import Iterator

import torch

from distlab.collectives.costs import all_reduce_bytes, gloo_all_reduce_messages
from distlab.config import Config
from distlab.contract import WHOLE_RUN, Claims, Mode, untrainable
from distlab.data_parallel.buckets import layout
from distlab.lab import Lab
from distlab.measure.prediction import Prediction
from distlab.parameter_server.costs import averaging_bytes, largest_stable_rate, server_bytes
from distlab.verify.run_all import measured
from distlab.workload.model import outline

from .options import Options

ASYNCHRONOUS, ROUNDS = ("ssp", "downpour"), ("local_sgd", "diloco")
COUNT_BYTES = 8  # beside its gradients a worker of `sync` says of how many terms they are the sum
SHOWN_RANKS = (2, 4, 8, 16, 32, 64)
MOST_PROVEN = 12  # local steps of a proven round: two rounds of them are run, whatever H is


def refuse(config: Config) -> list[str]:
    refusals = untrainable(config)
    if config.gloo_on_gpus:
        why = "LAB_BACKEND=gloo sends no weights that live on a GPU, and a server is sent them"
        refusals.append(f"{why}: set LAB_BACKEND=nccl, or leave LAB_DEVICE=cpu")
    if config.trace and config.variant and set(config.variant) <= set(ASYNCHRONOUS):
        refusals.append(
            "LAB_TRACE=1 profiles a step that all ranks take, which LAB_VARIANT leaves out, "
            "allowed beside it: dp, sync, local_sgd, diloco"
        )
    return refusals


def cannot(config: Config) -> dict[str, str]:
    adam = "LAB_OPTIMIZER=adamw would divide each worker's push by its own size, as if it were the gradient of all"
    clip = "LAB_CLIP bounds the norm of the gradient of all workers, which nobody ever holds"
    reasons = {adam: config.optimizer == "adamw", clip: config.clip is not None}
    found = [reason for reason, applies in reasons.items() if applies]
    return dict.fromkeys(ASYNCHRONOUS, "; ".join(found)) if found else {}


def weight_bytes(config: Config) -> int:
    """S: the bytes of all weights, as of all gradients."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    return outline(config).num_parameters() * itemsize


def predict(config: Config) -> list[Prediction]:
    """Bytes that each rank sends in a step, and in how many calls; if asynchronous, where all take as many steps."""
    ranks, nbytes, h = config.world_size, weight_bytes(config), config.own(Options).local_steps
    itemsize: int = getattr(torch, config.dtype).itemsize
    sizes = [parameter.numel() * itemsize for parameter in outline(config).parameters()]
    buckets = [sum(sizes[index] for index in bucket) for bucket in layout(sizes, config.bucket_mib * 2**20)]
    dense = (all_reduce_bytes("gloo", ranks, nbytes),) * ranks
    served, seldom = (tuple(server_bytes(ranks, nbytes, rank, steps) for rank in range(ranks)) for steps in (1, h))
    counted = tuple(sent + (COUNT_BYTES if rank else 0) for rank, sent in enumerate(served))
    averaged = (averaging_bytes(ranks, nbytes, h),) * ranks
    reduced = (sum(gloo_all_reduce_messages(ranks, size) for size in buckets),) * ranks
    in_rounds = (gloo_all_reduce_messages(ranks, nbytes) / h,) * ranks
    through_server = tuple(2.0 * (ranks - 1) if rank == 0 else 2.0 for rank in range(ranks))
    rows: list[tuple[str, str, tuple[float, ...], int, tuple[float, ...]]] = [
        ("dp", "2(N-1)/N x S", dense, len(buckets), reduced),
        ("sync", "S + 8 B, rank 0 (N-1) x S", counted, 2, through_server),
        ("local_sgd", "2(N-1)/N x S / H", averaged, 1, in_rounds),
        ("diloco", "2(N-1)/N x S / H", averaged, 1, in_rounds),
        ("ssp", "S, rank 0 (N-1) x S", served, 2, ()),
        ("downpour", "S / H, rank 0 (N-1) x S / H", seldom, 2, ()),
    ]
    impossible = cannot(config)
    return [
        Prediction(name, "wire bytes", "B", formula, value, calls, messages=messages)
        for name, formula, value, calls, messages in rows
        if name not in impossible
    ]


def show_bytes(lab: Lab) -> None:
    """The busiest rank's bytes as N grows: the server's wall, and the ring that stays under 2S."""
    nbytes, h = weight_bytes(lab.config), lab.config.own(Options).local_steps
    size, ranks = nbytes / 1e6, lab.world_size
    ring = 2 * (ranks - 1) / ranks * size
    lab.say(
        f"S = {size:.3g} MB: a worker sends S a step and rank 0 (N-1) x S = {(ranks - 1) * size:.3g} MB, as much comes "
        f"in there; a ring sends 2(N-1)/N x S = {ring:.3g} MB a rank; every {h} steps, 1/{h} of it",
        "predict",
    )
    rows: list[list[float]] = []
    for ranks in SHOWN_RANKS:
        server = 2 * server_bytes(ranks, nbytes, 0) / 1e6
        ring, seldom = (2 * averaging_bytes(ranks, nbytes, steps) / 1e6 for steps in (1, h))
        rows.append([ranks, server, ring, seldom, server / ring])
    columns = ["ranks", "server (MB)", "ring (MB)", f"ring every {h} steps (MB)", "server / ring"]
    lab.table("In and out of the busiest rank, a step, by formula", columns, rows)
    x = [float(row[0]) for row in rows]
    names = ("server, in and out", "ring", f"ring every {h} steps")
    series = {name: [x, [row[index] for row in rows]] for index, name in enumerate(names, 1)}
    lab.chart("In and out of the busiest rank, a step", "ranks", "MB", series, log_x=True, log_y=True)


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """Of all that keep step bytes, of rounds what all workers in one process do, out of step what any order allows."""
    local_steps = config.own(Options).local_steps
    unlike = ROUNDS if config.steps % local_steps else ()
    in_step = [name for name in mode.by_hand if name not in ROUNDS]
    yield from measured(mode, config, apart=ROUNDS, unlike=unlike, copied=in_step)
    yield Claims(("called bytes", "wire bytes"), mode.by_hand)
    yield Claims([f"largest stable rate at staleness {late}" for late in LATE], WHOLE_RUN, one=True)
    yield Claims(("who may start", "budget", "updates", "final weights"), ASYNCHRONOUS, one=True)
    yield Claims(("staleness",), ("ssp",), one=True)
    yield Claims(("samples of the pace",), ("dp", "sync"), one=True)
    yield Claims(("wire bytes of the run",), ASYNCHRONOUS)
    if not config.proof:
        return
    lengths = sorted({1, min(local_steps, MOST_PROVEN)})
    yield Claims(("samples",), WHOLE_RUN, one=True)
    yield Claims(("replicas",), in_step)
    yield Claims(("replicas",), ROUNDS, times=len(lengths))
    yield Claims([f"{kind} at H = {length}" for length in lengths for kind in ("losses", "weights")], ROUNDS, one=True)
    if config.optimizer == "adamw" or config.clip is not None:
        tuned = f"at H = {lengths[-1]} as trained"
        yield Claims((f"losses {tuned}", f"weights {tuned}"), ROUNDS, one=True)
    yield Claims(("timed losses",), ROUNDS, one=True)
    yield Claims(("losses", "gradients", "weights", "samples", "order of events"), ASYNCHRONOUS, one=True)


# Loss against staleness: the first lesson's line, trained by gradients of weights that are some updates old.
#
#     w <- w - lr·g(w of tau updates ago)
#
# In one process, with no noise and a delay that does not vary, so that nothing else is seen: the same 200 updates, and
# so the same samples, for each staleness tau. A late gradient is a push in a direction that was right a while ago; with
# a small step that costs little, with a large one the weights overshoot before the first gradient tells of it. How
# large is known exactly, since the line's loss is a quadratic: up to lr = 2·sin(pi / (2(2·tau + 1))) / curvature. What
# is found by trying is held against that.

LATE_CONTROL = (
    "tests/experiments/test_server.py::test_late_gradients_are_as_stable_as_the_formula_says_and_the_check_can_fail"
)
POINTS, UPDATES = 32, 200
LATE = (0, 1, 2, 4, 8, 16)  # updates
RATES = (0.02, 0.05, 0.1, 0.2, 0.5)
SEARCH_UPDATES, SWING, HALVINGS = 2400, 800, 12  # a swing takes 4·tau + 2 updates
HIGHEST_LOSS = 1e3  # where a curve that runs away is cut

Quadratic = tuple[float, float, float]  # means of x·x, x and 1: half of the loss' second derivatives by w and b


def show_staleness(lab: Lab) -> None:
    """A chart of the loss after the same updates; the largest rate that is stable at each, as a table and compared."""
    if lab.rank > 0:
        return
    line = drawn_line(lab.config.seed)
    ends = {
        lr: [min(max(late_losses(line, lr, late, UPDATES)[-1], 1e-12), HIGHEST_LOSS) for late in LATE] for lr in RATES
    }
    series = {f"lr {lr:g}": [list(map(float, LATE)), values] for lr, values in ends.items()}
    lab.chart(f"Loss of the line after {UPDATES} updates", "staleness in updates", "loss", series, log_y=True)
    rows: list[list[object]] = []
    for index, late in enumerate(LATE):
        predicted, found = largest_stable_rate(late, curvature(line)), largest_rate(line, late)
        rows.append([late, *(f"{of[index]:.2g}" for of in ends.values()), f"{predicted:.4f}", f"{found:.4f}"])
        lab.compare(
            f"largest stable rate at staleness {late}", predicted, found, "", 0.02 * predicted,
            formula="2 sin(pi/(2(2tau+1))) / curvature", control=LATE_CONTROL,
        )  # fmt: skip
    columns = ["staleness", *series, "largest stable lr", "found by trying"]
    lab.table(f"The line after {UPDATES} updates, each from weights that are some updates old: loss", columns, rows)


def drawn_line(seed: int) -> Quadratic:
    """The line's 32 points, as far as its loss depends on them: x uniform in (-1, 1)."""
    draw = random.Random(seed)
    x = [draw.uniform(-1.0, 1.0) for _ in range(POINTS)]
    return math.fsum(value * value for value in x) / POINTS, math.fsum(x) / POINTS, 1.0


def curvature(line: Quadratic) -> float:
    """The largest eigenvalue of the loss' second derivatives, 2·[[xx, x], [x, 1]]."""
    xx, x, one = line
    return xx + one + math.hypot(xx - one, 2 * x)


def late_losses(line: Quadratic, lr: float, late: int, updates: int) -> list[float]:
    """The loss of y = 2x + 1 after each of some `updates` from w = b = 0, each gradient taken `late` updates ago;
    infinite once it ran away."""
    xx, x, one = line
    # How far w and b are from 2 and 1, now last; before the first update all weights are the same.
    past = [(-2.0, -1.0)] * (late + 1)
    found: list[float] = []
    for update in range(updates):
        w, b = past[update % (late + 1)]  # the oldest, and the next to be written over
        now_w, now_b = past[(update + late) % (late + 1)]
        now_w, now_b = now_w - lr * 2 * (xx * w + x * b), now_b - lr * 2 * (x * w + one * b)
        if abs(now_w) + abs(now_b) > HIGHEST_LOSS:
            return found + [math.inf] * (updates - update)
        past[update % (late + 1)] = now_w, now_b
        found.append(xx * now_w * now_w + 2 * x * now_w * now_b + one * now_b * now_b)
    return found


def largest_rate(line: Quadratic, late: int) -> float:
    """Between a learning rate that converges and one that does not, by halving: whether the swings grow tells."""
    low, high = 0.0, 4.0 / curvature(line)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = late_losses(line, middle, late, SEARCH_UPDATES)
        shrinks = max(found[-SWING:]) < max(found[-2 * SWING : -SWING]) or found[-1] == 0.0
        low, high = (middle, high) if shrinks else (low, middle)
    return low
