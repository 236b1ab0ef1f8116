"""One drill: something is done to a run, and what has to come of it is looked for in what the run left."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, NamedTuple

SAVES_S = 120.0
SMALL = {"LAB_MODEL": "mlp", "LAB_WIDTH": "32", "LAB_DEPTH": "2", "LAB_BATCH": "12", "LAB_STEPS": "5"}


class Drill(NamedTuple):
    """What was done, what does not hold of it (nothing, if all does), and the seconds that it took."""

    what: str
    wrong: list[str]
    seconds: float


def timed(what: str, drill: Callable[..., list[str]], *args: Any) -> Drill:
    """Make one drill and say what came of it; a run that left nothing to look at, or does not end, is a finding."""
    began = time.monotonic()
    try:
        wrong = drill(*args)
    except (OSError, SubprocessError) as error:
        wrong = [str(error)]
    found = Drill(what, wrong, time.monotonic() - began)
    print(f"{what}: {'; '.join(wrong) or 'held'} ({found.seconds:.0f} s)", flush=True)
    return found


def until(done: Callable[[], object], timeout_s: float) -> bool:
    """Whether it is so in time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def saved(run: Path) -> bool:
    """Whether the run comes to a checkpoint in time."""
    return until(lambda: list(run.glob("checkpoints/step-*")), SAVES_S)


def judged(run: Path) -> dict[str, Any]:
    """Its run.json."""
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found


def unlike(run: Path, whole: Path) -> list[str]:
    """What a run that was disturbed and went on does not have of the one that was not: the same weights, to the bit."""
    found = judged(run)
    wrong = [] if found.get("resumed") else ["it was not resumed"]
    ours, theirs = (each["variants"][0]["weights_sha256"] for each in (found, judged(whole)))
    return wrong + ([] if ours == theirs else [f"weights {ours[:12]} in place of {theirs[:12]}"])
