"""What is to go wrong, and when: the text of LAB_FAULTS as plain data.

    kill:rank2@step5             rank 2 is killed as step 5 begins
    pause:rank1:1s@4s            rank 1 stands still for a second, 4 s after the ranks begin
    kill:1/30s,pause:1/60s       one in 30 s in the mean, and one in 60 s: which rank and when, LAB_SEED draws
    flip:gradient@step3          one bit of one gradient, of a rank and a tensor that LAB_SEED draws

An entry is a kind, what it needs between colons in any order, and a moment; what it leaves out is drawn (`Events`
below). Nothing here does anything: distlab/lab/faults/ does it.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distlab.lab.config import settings
from distlab.lab.config.settings import quoted

FLIPPED = ("gradient", "weight", "message")
BITS = ("sign", "exponent", "mantissa")
WAYS = ("in", "out")
NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
SECONDS = re.compile(rf"({NUMBER})(ms|s|m|h)")
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
PAUSE_S = 5.0  # longer than LAB_LOST_AFTER_S is by default


@dataclass(frozen=True)
class Kind:
    """What an entry of one kind may say beside its rank; `needs` is what it has to."""

    may: tuple[str, ...] = ()  # of: duration, flipped, bits, way, rate, share
    needs: tuple[str, ...] = ()
    at_seconds: bool = True  # whether it can come at any second, and not only as a step begins


KINDS = {
    "kill": Kind(),
    "pause": Kind(("duration",)),
    "cut": Kind(("duration", "way")),
    "slow_link": Kind(("rate",), ("rate",)),
    "slow_rank": Kind(("share",), ("share",)),
    "full_disk": Kind(at_seconds=False),
    "corrupt_checkpoint": Kind(at_seconds=False),
    "flip": Kind(("flipped", "bits"), ("flipped",), at_seconds=False),
}
EXAMPLES = {
    "duration": "500ms or 3s", "flipped": "gradient, weight or message", "bits": "sign, exponent or mantissa",
    "way": "in or out", "rate": "10mbit", "share": "0.5",
}  # fmt: skip


@dataclass(frozen=True)
class FaultSpec:
    """One entry, or one event of it; None and "" where the text says nothing.

    An entry has a moment (`step`, or `at_s` seconds after the ranks begin) or comes again and again, once in `every_s`
    seconds in the mean. An event has a rank and a moment.
    """

    text: str  # the entry as it was written
    kind: str
    rank: int | None = None
    step: int | None = None
    at_s: float | None = None
    every_s: float | None = None
    duration_s: float | None = None
    flipped: str = ""
    bits: str = ""
    way: str = ""  # of a cut: "in" hears nobody, "out" is heard by nobody, "" both
    rate: str = ""
    share: float | None = None
    number: int = 0  # of the event, from 0 in the order of the entries; an entry that comes again counts on by 1000

    @property
    def label(self) -> str:
        """The event in words: `kill rank 2 at step 5`."""
        drawn = [self.flipped and f"a bit of a {self.flipped} of", f"rank {self.rank}", self.rate and f"to {self.rate}"]
        for_s = f"for {self.duration_s:g} s" if self.duration_s is not None else ""
        share = f"to {self.share:g} of its speed" if self.share is not None else ""
        way = {"in": "from what it hears", "out": "from those who hear it"}.get(self.way, "")
        when = f"at step {self.step}" if self.step is not None else f"after {self.at_s:.1f} s"
        verb = {"slow_rank": "slow", "slow_link": "slow the link of", "full_disk": "fill the disk of"}
        verb["corrupt_checkpoint"] = "damage a checkpoint as"
        words = [verb.get(self.kind, self.kind), *drawn, way, share, for_s, when]
        return " ".join(filter(None, words))


def parse_faults(text: str) -> tuple[list[FaultSpec], list[str]]:
    """The entries of LAB_FAULTS, and a sentence for each that cannot be read."""
    entries, wrong = [], []
    for part in filter(None, (each.strip() for each in text.split(","))):
        try:
            entries.append(_entry(part))
        except ValueError as error:
            wrong.append(f"LAB_FAULTS={quoted(part)} {error}")
    return entries, wrong


def _entry(text: str) -> FaultSpec:
    said, at, moment = text.partition("@")
    name, *parts = said.split(":")
    if name not in KINDS:
        raise ValueError(f"is no kind of fault{settings.suggest(name, list(KINDS))}, allowed: {', '.join(KINDS)}")
    kind = KINDS[name]
    found: dict[str, Any] = {}
    for part in parts:
        key, value = _part(part, kind)
        if key in found:
            raise ValueError(f"says its {'bits' if key == 'bits' else key.removesuffix('_s')} twice")
        found[key] = value
    if missing := [need for need in kind.needs if need not in found]:
        raise ValueError(f"does not say which: expected {EXAMPLES[missing[0]]}, between colons")
    found |= _moment(moment) if at else {}
    if ("every_s" in found) == bool(at):
        raise ValueError("needs one moment: @step5, @12s, or one in so many seconds such as :1/30s")
    if not kind.at_seconds and "step" not in found:
        raise ValueError("comes as a step begins, allowed: @step5")
    if name == "cut" and found.get("way") == "out" and "duration_s" in found:
        raise ValueError("cannot end: a cut of one way out lasts, leave its duration out")
    if name == "pause":
        found.setdefault("duration_s", PAUSE_S)
    return FaultSpec(text, name, **found)


def _part(part: str, kind: Kind) -> tuple[str, Any]:
    if re.fullmatch(r"rank[0-9]{1,9}", part):
        return "rank", int(part.removeprefix("rank"))
    if part.startswith("1/"):
        if not kind.at_seconds:
            raise ValueError(f"cannot come by the second ({part}), allowed: @step5")
        return "every_s", _seconds(part.removeprefix("1/"))
    if SECONDS.fullmatch(part) and "duration" in kind.may:
        return "duration_s", _seconds(part)
    for name, words in (("flipped", FLIPPED), ("bits", BITS), ("way", WAYS)):
        if name in kind.may and part in words:
            return name, part
    if "rate" in kind.may and SECONDS.fullmatch(part):
        raise ValueError("would delay a link, which no rank can do: LAB_NET_DELAY with compose/net.yaml delays all")
    if "rate" in kind.may:
        return "rate", settings.rate(part)
    if "share" in kind.may and re.fullmatch(NUMBER, part) and 0 < float(part) < 1:
        return "share", float(part)
    allowed = ["rank0", *(EXAMPLES[may] for may in kind.may), *(["1/30s"] if kind.at_seconds else [])]
    raise ValueError(f"says {part!r}, allowed: {', '.join(allowed)}")


def _moment(moment: str) -> dict[str, Any]:
    if re.fullmatch(r"step[0-9]{1,9}", moment):
        return {"step": int(moment.removeprefix("step"))}
    return {"at_s": _seconds(moment)}


def _seconds(text: str) -> float:
    found = SECONDS.fullmatch(text)
    if found is None or not float(found[1]):
        raise ValueError(f"says {text!r}, which is no moment and no time: expected step5, 500ms, 3s, 2m or 1h")
    return float(found[1]) * UNITS[found[2]]


def misfits(entries: Sequence[FaultSpec], world_size: int, steps: int, checkpoint_every: int | None) -> list[str]:
    """Sentences on entries that these settings cannot have."""
    wrong = []
    for each in entries:
        if each.rank is not None and each.rank >= world_size:
            wrong.append(f"names a rank outside of WORLD_SIZE={world_size}, allowed: rank0 to rank{world_size - 1}")
        elif each.step is not None and each.step >= steps:
            wrong.append(f"comes after the last step, allowed: step0 to step{steps - 1}")
        elif each.flipped == "message" and each.step == 0:
            wrong.append("comes before a step has shown how many messages there are, allowed: step1 and more")
        elif each.kind == "corrupt_checkpoint" and checkpoint_every is None:
            wrong.append("needs a checkpoint to damage: set LAB_CHECKPOINT_EVERY")
        elif each.kind == "corrupt_checkpoint" and (each.step or 0) < (checkpoint_every or 0):
            wrong.append(f"comes before the first checkpoint, allowed: step{checkpoint_every} and more")
        elif each.kind in ("cut", "slow_link") and world_size == 1:
            wrong.append("needs two ranks that talk to each other")
        else:
            continue
        wrong[-1] = f"LAB_FAULTS={quoted(each.text)} {wrong[-1]}"
    return wrong


# The events of LAB_FAULTS: what its entries leave out, a rank, and where there is a rate the moments, LAB_SEED draws.
#
# The same on every rank, so that nobody has to tell another. Whoever needs another clock reads the same events.

MOST = 1000  # events of one rate


def planned(entries: Sequence[FaultSpec], seed: int, world_size: int) -> list[FaultSpec]:
    """The events of all entries that have a moment, each with a rank: the same on every rank."""
    events = []
    for index, entry in enumerate(entries):
        if entry.every_s is None:
            rank = _generator(seed, index).randrange(world_size) if entry.rank is None else entry.rank
            events.append(replace(entry, rank=rank, number=index))
    return events


def arrivals(entry: FaultSpec, index: int, seed: int, world_size: int) -> Iterator[FaultSpec]:
    """The events of an entry that comes again and again, without end: times between them are exponential, as of what
    happens independently."""
    assert entry.every_s is not None
    draw, at_s = _generator(seed, index), 0.0
    for count in range(MOST):
        at_s += draw.expovariate(1 / entry.every_s)
        rank = draw.randrange(world_size) if entry.rank is None else entry.rank
        yield replace(entry, rank=rank, at_s=at_s, every_s=None, number=index + MOST * (count + 1))


def _generator(seed: int, index: int) -> random.Random:
    return random.Random(f"{seed} {index}")
