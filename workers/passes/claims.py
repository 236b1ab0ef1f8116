"""What a run has to claim, from its settings alone: what the passes check of all variants, and each lesson's own list.

Nothing here asks the code that makes a claim: the report misses what is listed here and was not claimed
(report/expected.py). Where it depends on what a run meets, such as a loss that is no number, that code says why there
is nothing to hold (`Lab.waive`), or it is not listed.
"""

from collections.abc import Iterator, Sequence

from workers.config import Config
from workers.config.values import is_path
from workers.contract import WHOLE_RUN, Claims, Mode
from workers.report.blocks import DRAWN, ON_WIRE
from workers.report.records import Expected
from workers.workload.own import is_own

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
