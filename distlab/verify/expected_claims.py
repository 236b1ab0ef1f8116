"""What a run has to claim, from its settings alone: what the passes check of all variants, and each lesson's own list.

Nothing here asks the code that makes a claim: the report misses what is listed here and was not claimed
(distlab/report/verdict.py). Where it depends on what a run meets, such as a loss that is no number, that code says why
there is nothing to hold (`Lab.waive`), or it is not listed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distlab.collectives.phases import Span
from distlab.config import Config
from distlab.config.settings import is_path
from distlab.contract import WHOLE_RUN, Claims, Mode
from distlab.lab import Lab
from distlab.measure.timeline import Lap, length, profile, union
from distlab.report import records
from distlab.report.records import Expected
from distlab.report.tables import DRAWN, ON_WIRE
from distlab.workload.user_model import is_own

SURE_STEPS = 5  # that every variant takes of the timed steps, if LAB_STEPS has them
PROVEN = ("losses", "gradients", "weights")
TUNED = ("clipped gradients", "optimizer state", "weights after two steps")


def expected(config: Config, mode: Mode) -> Expected:
    """All claims that a run of these settings needs, of the variants that are asked for and that can run."""
    own = mode.claims or (measured if mode.run is None else nothing)
    impossible = mode.cannot(config)
    wanted = [
        [variant, name, each.times, each.one]
        for each in (*every_run(mode, config), *own(mode, config))
        for variant in each.of
        for name in each.names
        if variant not in impossible and (variant not in mode.names or not config.variant or variant in config.variant)
    ]
    return Expected(wanted)


def nothing(mode: Mode, config: Config) -> Iterator[Claims]:  # noqa: ARG001
    """Of a lesson that has a run and no list."""
    yield from ()


def every_run(mode: Mode, config: Config) -> Iterator[Claims]:
    """What holds of any lesson: meters and the judge are tried before anything is counted or judged."""
    yield Claims(("meters",))
    if not mode.takes_back:  # else rank 0 may be lost, with its records
        yield Claims(("verdicts",), one=True)
        if config.proof and mode.audits:
            yield Claims(tuple(stated(config)), one=True)
    if config.world_size > 1:  # as called, and on the wire but for what sends past the sockets
        yield Claims(("ledger",), times=1 if config.backend == "nccl" else 2)
        if config.backend == "tcp":
            yield Claims(("transport", "transport order"))
            yield Claims(("stranger",), one=True)


def stated(config: Config) -> Iterator[str]:
    """What ranks and the one process share, whatever the lesson: rank 0 holds it to statements of its own."""
    yield from ("shares", "shards", "epochs", "optimizer")
    if is_own(config.model) or is_path(config.run_mode):  # whose layers nobody here can state
        return
    yield from ("targets", "first weights", "model", "loss")
    if config.model == "gpt" and config.seq > 1:
        yield "positions"
    if config.recompute:
        yield "recomputation"


def measured(
    mode: Mode, config: Config, apart: Sequence[str] = (), unlike: Sequence[str] = (),
    copied: Sequence[str] | None = None,
) -> Iterator[Claims]:  # fmt: skip
    """What the passes claim of the variants that they train.

    Args:
        apart: those that are not held against one process.
        unlike: those of which ranks need not hold the same weights after the last step.
        copied: those of which ranks hold something alike; by default all by hand, unless ranks share one copy.
    """
    trained = [each.name for each in mode.variants if each.build is not None]
    by_hand = [name for name in trained if name not in mode.by_torch]
    alone, own = [name for name in trained if name not in apart], [name for name in by_hand if name not in apart]
    yield Claims(("timed steps",), trained)
    yield Claims(("timed seconds",))
    yield Claims(("timed replicas",), [name for name in by_hand if name not in unlike], one=True)
    if config.resume is None:  # else there may be no step left
        yield Claims((DRAWN, ON_WIRE), trained)
    if config.proof:
        yield Claims((*PROVEN, "proof steps"), alone, one=True)
        yield Claims(("timed losses",), own, one=True)
        yield from tuned(config, alone, own)
    every = config.audit_every or ("flip" in (config.faults or "") and 1)
    if every and config.resume is None and every <= min(SURE_STEPS, config.steps) and config.world_size > 1:
        held = copied if copied is not None else () if mode.shards else mode.by_hand
        yield Claims(("audited replicas",), held, one=True)
    yield from saved(config, alone)


def tuned(config: Config, alone: Sequence[str], own: Sequence[str]) -> Iterator[Claims]:
    """What the optimizer adds to the proof, and the audited steps."""
    adam = config.optimizer == "adamw"
    if adam or config.clip is not None:
        yield Claims(TUNED, alone, one=True)
    if config.resume is None:
        audited = ("audited loss", "audited weights", *(["audited optimizer"] if adam else []))
        yield Claims(audited, own, one=True)


def saved(config: Config, alone: Sequence[str]) -> Iterator[Claims]:
    """What checkpoints add: the drill of the proof, each save, and where a run goes on from."""
    if config.checkpoint_every is not None:
        if config.proof:
            yield Claims(("resume", "resumed samples"), alone, one=True)
            yield Claims(("resumed generators",), alone)
        saves = config.steps // config.checkpoint_every
        yield Claims(("checkpoint", "kept checkpoints"), WHOLE_RUN, one=True, times=saves)
        yield Claims(("standing still",), WHOLE_RUN, one=True)
    if config.resume is not None:
        yield Claims(("resumed generators", "resumed samples", "newest checkpoint"), WHOLE_RUN, one=True)


# What the seconds of the timed steps are held to: identities that a loaded machine changes nothing of.
#
# number       the first two steps are left out where there are more, and no other one
# a step       is no longer, and takes no more of the processor, than a second watch around the same step saw; and it is
#              no shorter than what is marked in it
# its marks    lie in it one and all, but the fetching of data, which is over before it begins
# by class     the seconds of a step are those of its marks, each moment once
# the profile  a median: half of the steps take as long in a class or longer, and half as long or shorter

CONTROL = "tests/verify/test_seconds.py::test_seconds_that_are_wrong_fail"
LEFT_OUT = 2  # steps, whatever the pass takes for its warm-up
ROUNDING_S = 1e-9  # of sums and differences of seconds since the machine's start


class Timed(NamedTuple):
    """The timed steps of one variant on this rank."""

    laps: Sequence[Lap]  # a step each
    around: Sequence[Lap]  # of a second watch
    marked: Sequence[tuple[int, list[Span]]]  # (number in `laps`, marks) of the last ones
    steps: records.Steps
    profile: Mapping[str, float]


def check_seconds(lab: Lab, timed: Mapping[str, Timed]) -> None:
    """One check of all variants; the detail tells of the first thing that is wrong."""
    faults = [f"{name}: {fault}" for name, each in timed.items() for fault in wrong(each)]
    detail = faults[0] if faults else f"{sum(len(each.steps.step_seconds) for each in timed.values())} steps"
    lab.check("timed seconds", len(faults), 0, detail=detail, control=CONTROL)


def wrong(timed: Timed) -> Iterator[str]:
    """A sentence for each identity that is broken."""
    left_out = LEFT_OUT if len(timed.around) > LEFT_OUT else 0
    around = timed.around[left_out:]
    kept = [len(timed.steps.step_seconds), len(timed.steps.cpu_seconds)]
    if kept != [len(around)] * 2:
        yield f"{kept[0]} and {kept[1]} seconds of {len(timed.around)} steps, of which {left_out} are left out"
        return
    for lap, wall_s, cpu_s in zip(around, timed.steps.step_seconds, timed.steps.cpu_seconds, strict=True):
        if not (0 < wall_s <= lap.wall_s and 0 <= cpu_s <= lap.cpu_s):
            yield f"a step of {wall_s:g} s and {cpu_s:g} CPU s, in {lap.wall_s:g} and {lap.cpu_s:g}"
    for number, spans in timed.marked:
        yield from misplaced(spans, timed.laps[number])
        marked_s = length(union([span for span in spans if span.kind != "data"]))
        if number >= left_out and marked_s > timed.steps.step_seconds[number - left_out] + ROUNDING_S:
            yield f"a step of {timed.steps.step_seconds[number - left_out]:g} s in which {marked_s:g} s are marked"
    yield from unlike(timed.profile, [profile(spans) for _, spans in timed.marked])


def misplaced(spans: Sequence[Span], lap: Lap) -> Iterator[str]:
    """What is wrong with the marks of a step."""
    fetched = max((span.end_s for span in spans if span.kind == "data"), default=None)
    if fetched is None or fetched > lap.began_s:
        yield "data is fetched while the step is timed, or unmarked"
    if any(span.start_s < lap.began_s or span.end_s > lap.ended_s for span in spans if span.kind != "data"):
        yield f"marks that are not in their step of {lap.wall_s:g} s"
    off = abs(sum(profile(spans).values()) - length(union(spans)))
    if off > ROUNDING_S * len(spans):
        yield f"classes that add up to {off:g} s more or less than their marks"


def unlike(said: Mapping[str, float], steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """A sentence for each class whose seconds are no median of the steps'."""
    for kind, seconds in said.items() if steps else ():
        below, above = (sum(sign * each[kind] <= sign * seconds for each in steps) for sign in (1, -1))
        if 2 * min(below, above) < len(steps):
            yield f"{seconds:g} s of {kind} are no median of {len(steps)} steps"
