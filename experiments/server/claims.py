"""What a run of parameter servers has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.config import Config
from workers.contract import WHOLE_RUN, Claims, Mode
from workers.passes.claims import measured

ROUNDS, APART = ("local_sgd", "diloco"), ("ssp", "downpour")
LATE = (0, 1, 2, 4, 8, 16)  # updates, of the line's largest stable rates
MOST_PROVEN = 12  # local steps of a proven round


def claims(mode: Mode, config: Config, local_steps: int) -> Iterator[Claims]:
    """Of all that keep step bytes, of rounds what all workers in one process do; out of step what the witness saw."""
    unlike = ROUNDS if config.steps % local_steps else ()
    in_step = [name for name in mode.by_hand if name not in ROUNDS]
    yield from measured(mode, config, apart=ROUNDS, unlike=unlike, copied=in_step)
    yield Claims(("called bytes", "wire bytes"), mode.by_hand)
    yield Claims([f"largest stable rate at staleness {late}" for late in LATE], WHOLE_RUN, one=True)
    yield Claims(("who may start", "budget", "updates", "fetched weights", "weights of the run"), APART, one=True)
    yield Claims(("final weights", "samples of the run"), APART, one=True)
    yield Claims(("staleness",), ("ssp",), one=True)
    yield Claims(("samples of the pace",), ("dp", "sync"), one=True)
    yield Claims(("wire bytes of the run",), APART)
    if config.proof:
        yield from proven(mode, config, local_steps)


def proven(mode: Mode, config: Config, local_steps: int) -> Iterator[Claims]:
    """What the proof adds."""
    lengths = sorted({1, min(local_steps, MOST_PROVEN)})
    yield Claims(("samples",), WHOLE_RUN, one=True)
    yield Claims(("replicas",), [name for name in mode.by_hand if name not in ROUNDS])
    yield Claims(("replicas",), ROUNDS, times=len(lengths))
    yield Claims([f"{kind} at H = {length}" for length in lengths for kind in ("losses", "weights")], ROUNDS, one=True)
    if config.optimizer == "adamw" or config.clip is not None:
        tuned = f"at H = {lengths[-1]} as trained"
        yield Claims((f"losses {tuned}", f"weights {tuned}"), ROUNDS, one=True)
    yield Claims(("timed losses",), ROUNDS, one=True)
    yield Claims(("losses", "gradients", "weights", "samples", "order of events"), APART, one=True)
    yield Claims(("gradients of the run",), APART, one=True)
