"""What a failing rank saves by itself: no collective, no wait for the dead, and a bound on it all.

A rank whose variants are all replicated holds everything, so it can write a whole checkpoint alone; one that holds
shards cannot, and says so. Several ranks may try at once, as when all survivors meet the same broken connection: each
writes a folder of its own, and the first to give its folder the common name has saved for all.
"""

import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from workers.checkpoint import dcp, finding, manifest, writing
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.saver import Saver, manifest_of, state_of

BOUND_S = 10.0


def rescue(saver: Saver) -> None:
    """Save what is safe, and say what came of it; returns after BOUND_S at the latest, and raises nothing."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(_attempt(saver)), name="rescue", daemon=True)
    thread.start()
    thread.join(BOUND_S)
    with suppress(Exception):  # a full disk takes no line either
        saver.lab.journal.say(f"rescue     {said[0] if said else f'nothing was saved in {BOUND_S:g} s'}")


def _attempt(saver: Saver) -> str:
    try:
        return save_alone(saver)
    except Exception as error:
        return f"nothing could be saved ({type(error).__name__}: {error}), {last_good(saver)}"


def save_alone(saver: Saver) -> str:
    """Write a whole checkpoint, if this rank has one; returns the sentence that says so, or why not. Raises OSError."""
    lab, course = saver.lab, saver.course
    step = min(course.done.values(), default=0)
    if course.torn is not None:
        return f"rank {lab.rank} was in the middle of an update of {course.torn} and saves nothing, {last_good(saver)}"
    state = state_of(saver.strategies)
    names = [name for name, _ in lab.mode.model(lab.config, lab.config.seed).named_parameters()]
    parts = [variant for variant in saver.strategies if not is_all_of(variant, names, state)]
    if parts:
        return f"rank {lab.rank} holds a part only of {', '.join(parts)} and saves nothing, {last_good(saver)}"
    final = saver.folder / manifest.folder_name(step)
    if final.exists() or step == course.first:
        return f"rank {lab.rank} has no further step to save, {last_good(saver)}"
    losses = {name: padded([*before, *course.heard[name]], course.done[name]) for name, before in course.losses.items()}
    write_alone(final, lab.rank, replace(manifest_of(lab, course, step), losses=losses), state)
    return f"rank {lab.rank} has saved step {step} by itself ({final})"


def write_alone(final: Path, rank: int, draft: Manifest, state: dcp.State) -> None:
    """As `writing.write`, without the others; does nothing where another rank was first."""
    partial = final.with_name(f".{final.name}.rank{rank}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        own = dcp.save(state, partial, None)
        writing.complete(partial, replace(draft, files=writing.described(own, partial)))
        partial.rename(final)
    except OSError:
        if not final.exists():  # another rank was first, and its files are as good
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_all_of(variant: str, names: Iterable[str], state: dcp.State) -> bool:
    """Whether this rank holds a whole model of `variant`: every weight is there, and nothing in parts."""
    whole = {name for name, held in state.items() if name.startswith(f"{variant}/") and dcp.is_whole(held)}
    parts = {name for name in state if name.startswith(f"{variant}/")} - whole
    return not parts and {f"{variant}/weights.{name}" for name in names} <= whole


def padded(losses: list[float | None], steps: int) -> list[float | None]:
    """The curve as far as this rank knows it, and None for what no rank has told yet: the losses of a step are told at
    the next one's barrier, so of the last step it has its own share alone."""
    return losses[:steps] + [None] * (steps - len(losses))


def last_good(saver: Saver) -> str:
    """Which checkpoint there is to go on from."""
    good = finding.candidates(saver.folder)
    return f"the last good checkpoint is step {finding.step_of(good[0])}" if good else "and there is no checkpoint yet"
