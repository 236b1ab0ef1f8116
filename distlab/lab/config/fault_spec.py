"""Parse LAB_FAULTS, the faults to inject and their times, into plain data.

    kill:rank2@step5             rank 2 is killed as step 5 begins
    pause:rank1:1s@4s            rank 1 is stopped for a second, 4 s after the ranks begin

An entry is a kind, its arguments between colons in any order, and a time; LAB_SEED draws a missing rank
(`planned` below). This module injects nothing: distlab/lab/rank/fault_injection.py does.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distlab.lab.config import settings
from distlab.lab.config.settings import quoted

WAYS = ("in", "out")
NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
SECONDS = re.compile(rf"({NUMBER})(ms|s|m|h)")
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
PAUSE_S = 5.0  # longer than the default LAB_LOST_AFTER_S
# By kind, the possible arguments besides the rank; those in NEEDS are required.
KINDS = {
    "kill": (), "pause": ("duration",), "cut": ("duration", "way"), "slow_link": ("rate",), "slow_rank": ("share",),
    "full_disk": (),
}  # fmt: skip
NEEDS = {"slow_link": "10mbit", "slow_rank": "0.5"}  # one example each
EXAMPLES = {"duration": "500ms or 3s", "way": "in or out", "rate": "10mbit", "share": "0.5"}
AT_STEPS = ("full_disk",)  # these come at a step only, not at a second
GONE = {
    "flip": "was removed: LAB_AUDIT_EVERY=1 with a LAB_BUG such as no_broadcast shows an audit that fails",
    "corrupt_checkpoint": "was removed: change a byte in a file of a checkpoint yourself, and set LAB_RESUME",
}


@dataclass(frozen=True)
class FaultSpec:
    """One entry, or its event once it has a rank; None and "" for arguments that the text omits."""

    text: str  # the entry as it was written
    kind: str
    rank: int | None = None
    step: int | None = None
    at_s: float | None = None  # after the ranks begin
    duration_s: float | None = None
    way: str = ""  # of a cut: "in" stops receiving, "out" stops sending, "" both
    rate: str = ""
    share: float | None = None
    number: int = 0  # of the event, from 0 in the order of the entries

    @property
    def label(self) -> str:
        """Return the event as text: `kill rank 2 at step 5`."""
        verb = {"slow_rank": "slow", "slow_link": "slow the link of", "full_disk": "fill the disk of"}
        words = [verb.get(self.kind, self.kind), f"rank {self.rank}", self.rate and f"to {self.rate}"]
        words.append({"in": "(incoming messages)", "out": "(outgoing messages)"}.get(self.way, ""))
        words.append(f"to {self.share:g} of its speed" if self.share is not None else "")
        words.append(f"for {self.duration_s:g} s" if self.duration_s is not None else "")
        words.append(f"at step {self.step}" if self.step is not None else f"after {self.at_s:.1f} s")
        return " ".join(filter(None, words))


def parse_faults(text: str) -> tuple[list[FaultSpec], list[str]]:
    """Return the entries of LAB_FAULTS, and a sentence for each that cannot be read."""
    entries, wrong = [], []
    for part in filter(None, (each.strip() for each in text.split(","))):
        try:
            entries.append(_entry(part))
        except ValueError as error:
            wrong.append(f"LAB_FAULTS={quoted(part)} {error}")
    return entries, wrong


def _entry(text: str) -> FaultSpec:
    head, at, moment = text.partition("@")
    kind, *parts = head.split(":")
    if kind in GONE:
        raise ValueError(GONE[kind])
    if kind not in KINDS:
        raise ValueError(f"is not a kind of fault{settings.suggest(kind, list(KINDS))}, allowed: {', '.join(KINDS)}")
    found: dict[str, Any] = {}
    for part in parts:
        key, value = _part(part, kind)
        if key in found:
            raise ValueError(f"has more than one {key.removesuffix('_s')}")
        found[key] = value
    if kind in NEEDS and not found.keys() & {"rate", "share"}:
        raise ValueError(f"needs a value between colons, such as {NEEDS[kind]}")
    if not at:
        raise ValueError("needs a time: @step5 or @12s")
    found |= _moment(moment)
    if kind in AT_STEPS and "step" not in found:
        raise ValueError("can only occur at the start of a step: use @step5")
    if found.get("way") == "out" and "duration_s" in found:
        raise ValueError("cannot end: a cut of outgoing messages has no duration, leave it out")
    if kind == "pause":
        found.setdefault("duration_s", PAUSE_S)
    return FaultSpec(text, kind, **found)


def _part(part: str, kind: str) -> tuple[str, Any]:
    allowed = KINDS[kind]
    if re.fullmatch(r"rank[0-9]{1,9}", part):
        return "rank", int(part.removeprefix("rank"))
    if part.startswith("1/"):
        raise ValueError(f"can no longer repeat ({part}): use one time, @step5 or @12s")
    if SECONDS.fullmatch(part) and "duration" in allowed:
        return "duration_s", _seconds(part)
    if "way" in allowed and part in WAYS:
        return "way", part
    if "rate" in allowed and SECONDS.fullmatch(part):
        raise ValueError("would delay a link, which no rank can do: LAB_NET_DELAY with compose/net.yaml delays all")
    if "rate" in allowed:
        return "rate", settings.rate(part)
    if "share" in allowed and re.fullmatch(NUMBER, part) and 0 < float(part) < 1:
        return "share", float(part)
    raise ValueError(f"has argument {part!r}, allowed: {', '.join(['rank0', *(EXAMPLES[each] for each in allowed)])}")


def _moment(moment: str) -> dict[str, Any]:
    if re.fullmatch(r"step[0-9]{1,9}", moment):
        return {"step": int(moment.removeprefix("step"))}
    return {"at_s": _seconds(moment)}


def _seconds(text: str) -> float:
    found = SECONDS.fullmatch(text)
    if found is None or not float(found[1]):
        raise ValueError(f"has {text!r}, which is no time: expected step5, 500ms, 3s, 2m or 1h")
    return float(found[1]) * UNITS[found[2]]


def misfits(entries: Sequence[FaultSpec], world_size: int, steps: int) -> list[str]:
    """Return sentences on entries that these settings cannot have."""
    wrong = []
    for each in entries:
        if each.rank is not None and each.rank >= world_size:
            wrong.append(f"names a rank outside of WORLD_SIZE={world_size}, allowed: rank0 to rank{world_size - 1}")
        elif each.step is not None and each.step >= steps:
            wrong.append(f"comes after the last step, allowed: step0 to step{steps - 1}")
        elif each.kind in ("cut", "slow_link") and world_size == 1:
            wrong.append("needs at least two ranks")
        else:
            continue
        wrong[-1] = f"LAB_FAULTS={quoted(each.text)} {wrong[-1]}"
    return wrong


def planned(entries: Sequence[FaultSpec], seed: int, world_size: int) -> list[FaultSpec]:
    """Return the events of all entries, each with a rank: the same on every rank, without communication."""
    drawn = [random.Random(f"{seed} {index}").randrange(world_size) for index in range(len(entries))]
    return [
        replace(each, rank=drawn[index] if each.rank is None else each.rank, number=index)
        for index, each in enumerate(entries)
    ]
