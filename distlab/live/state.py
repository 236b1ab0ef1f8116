"""The folder of a run as one snapshot: what every rank does, who is lost and why, and the verdict once there is one.

A rank is lost if the others say so in their records, or if its own state has not changed for STALE_S. It counts from
when the change was first seen here, by this process's clock: no two clocks are compared, and a rank that goes is red
within 3 s of its last writing, however long the others take to agree on it. A rank that is found to be alive after
all, as one whose interpreter was held up, is not lost any more.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from distlab.report import progress
from distlab.report.progress import LiveState
from distlab.report.reading import MOST_RECORD_BYTES, BrokenRecord, from_json, from_line, read_regular, regular
from distlab.report.records import Changed, End, Failed, Left, Losses, Lost, Record, WorldSize
from distlab.report.sentences import headline

# The records of one rank as they are written: only what is new is read, and only those that a live page needs.

KINDS = (Lost, Left, Failed, Losses, End, Changed)
WANTED = tuple(f'{{"record": "{kind.__name__.lower()}"'.encode() for kind in KINDS)  # as reading.to_line begins


class Tail:
    """`rank<r>.jsonl` up to its last whole line; another attempt of the run begins the file, and this, anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Record] = []
        self.faults: list[str] = []  # a sentence for each line that is none
        self._file, self._read = 0, 0  # inode, and bytes of whole lines read

    def read(self) -> list[Record]:
        """All records of these kinds until now; none of a file that is not there. Raises OSError."""
        if not self.path.exists():
            return []
        with regular(self.path, MOST_RECORD_BYTES) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._read:
                self.found, self.faults, self._file, self._read = [], [], status.st_ino, 0
            file.seek(self._read)
            whole, newline, _ = file.read(MOST_RECORD_BYTES).rpartition(b"\n")
        self._read += len(whole + newline)
        for line in whole.splitlines():
            if line.startswith(WANTED):
                try:
                    self.found.append(from_line(line, f"a line of {self.path.name}"))
                except BrokenRecord as error:
                    self.faults.append(str(error))
        return self.found


# `run.json`: the fields that a headline needs, each as it has to be.

RUN_FILE = "run.json"
MOST_RUN_BYTES = 64 << 20  # a few hundred bytes a check and a rank


class Claim(TypedDict):
    """A check or a comparison."""

    variant: str
    name: str
    passed: bool


class Gone(TypedDict):
    """A rank that was lost, or left."""

    rank: int
    step: int | None
    reason: str


class Error(TypedDict):
    """What ended a rank."""

    error: str


class Needed(TypedDict):
    """The fields that a headline needs."""

    run_mode: str
    world_size: WorldSize
    verdict: Literal["pass", "fail", "lost", "refused"]
    proven: bool
    lost: list[Gone]
    errors: list[Error]
    checks: list[Claim]
    comparisons: list[Claim]


# What the ranks' states say together, which none of them knows alone: losses of the whole batch, and bytes by peer.

Curve = list[list[Any]]  # [step, loss] each; None where it is no number
States = Mapping[int, LiveState]


def curves(states: States) -> dict[str, Curve]:
    """The loss of the global batch by variant, at the steps that every rank has noted which knows losses at all."""
    found = {}
    for name in dict.fromkeys(name for state in states.values() for name in state.losses):
        of_ranks = [dict(state.losses[name]) for state in states.values() if name in state.losses]
        steps = sorted(set.intersection(*map(set, of_ranks)))
        found[name] = [[step, added([shares[step] for shares in of_ranks])] for step in steps]
    return found


def added(shares: list[float | None]) -> float | None:
    """Their sum, None if one of them is no number."""
    known = [share for share in shares if share is not None]
    return round(math.fsum(known), 6) if len(known) == len(shares) else None


def matrix(states: States, world_size: int) -> list[list[int | None]]:
    """Row r: the bytes that rank r has sent to each rank; None of itself, and where one of the two says nothing.

    The rank at the other end is the one that names the same connection from there. Bytes to an end that nobody names
    are left out: the store's, or those of a rank that has not written yet.
    """
    owner = {(*near, *far): rank for rank, state in states.items() for near, far, _ in state.sent}
    measured = {rank for rank, state in states.items() if not state.unmeasured}
    sent: list[list[int | None]] = [
        [0 if rank != peer and {rank, peer} <= measured else None for peer in range(world_size)]
        for rank in range(world_size)
    ]
    for rank, state in states.items():
        for near, far, num_bytes in state.sent:
            peer = owner.get((*far, *near), rank)
            sent[rank][peer] = None if peer == rank else (sent[rank][peer] or 0) + num_bytes
    return sent


STALE_S = 2.0  # eight writings
POINTS = 250  # of a curve


@dataclass(frozen=True)
class Shown:
    """One rank, as a row shows it."""

    rank: int
    how: str  # running, waiting, lost, out (no member any more), ended; unseen: it has written nothing here
    reason: str = ""  # why it is lost, or has ended
    host: str = ""
    pid: int = 0
    variant: str = ""
    work: str = ""
    step: int = 0
    steps: int = 0
    phase: str = ""
    phase_s: float = 0.0
    waits_for: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """All that the page shows; `clock_s` tells how much later one snapshot is than another."""

    clock_s: float
    run_id: str = ""
    run_mode: str = ""
    verdict: str = "waiting"  # for a run to begin; then running, and pass, fail, lost or refused
    sentence: str = ""
    progress: str = ""  # of the lowest rank that lives: how much is done, and how long the rest may take
    share: float | None = None  # of it that is done
    ranks: list[Shown] = field(default_factory=list)
    losses: dict[str, Curve] = field(default_factory=dict)
    sent_bytes: list[list[int | None]] = field(default_factory=list)  # row r: from rank r to each
    faults: list[str] = field(default_factory=list)  # files that could not be read, and what is not measured


class Reader:
    """The files of one run: `snapshot` reads what has changed since it was called last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._states: dict[int, LiveState] = {}
        self._changed_at: dict[int, float] = {}
        self._tails: dict[int, Tail] = {}

    def snapshot(self, now: float) -> Snapshot:
        """The run at `now`, in seconds of a clock that only this process reads."""
        faults = self._read_states(now)
        states = self._of_this_attempt()
        if not states:
            return Snapshot(now, faults=faults)
        newest = states[max(states, key=lambda rank: states[rank].began_at)]
        verdict, sentence = self._verdict(newest.began_at, faults)
        ranks = self._rows(states, newest.world_size, now, faults, over=bool(verdict))
        if not verdict:
            verdict, sentence = so_far(ranks)
        faults += dict.fromkeys(state.unmeasured for state in states.values() if state.unmeasured)
        lives = next((states[each.rank] for each in ranks if each.how in ("running", "waiting")), None)
        progress, share = (lives.progress, lives.share) if lives and verdict == "running" else ("", None)
        return Snapshot(
            now, self.folder.name, newest.run_mode, verdict, sentence, progress, share, ranks, self._curves(states),
            matrix(states, newest.world_size), faults,
        )  # fmt: skip

    def _read_states(self, now: float) -> list[str]:
        """Take in what the ranks have written; a file that cannot be read leaves what was known, and is named."""
        faults = []
        for rank, path in sorted(progress.places(self.folder).items()):
            try:
                state = progress.read_status(path)
            except BrokenRecord as error:
                faults.append(str(error))
                continue
            before = self._states.get(rank)
            if before is None or (before.beat, before.began_at) != (state.beat, state.began_at):
                self._states[rank], self._changed_at[rank] = state, now
        return faults

    def _of_this_attempt(self) -> dict[int, LiveState]:
        """Without what ranks of a larger attempt before have left."""
        newest = max(self._states.values(), key=lambda state: state.began_at, default=None)
        return {rank: state for rank, state in self._states.items() if newest and rank < newest.world_size}

    def _verdict(self, began_at: float, faults: list[str]) -> tuple[str, str]:
        """What `run.json` says, if it is of this attempt; empty where there is none."""
        path = self.folder / RUN_FILE
        try:
            if path.stat().st_mtime < began_at:
                return "", ""
            run = from_json(read_regular(path, MOST_RUN_BYTES))
            msgspec.convert(run, Needed)
            return str(run["verdict"]), headline(run)
        except FileNotFoundError:
            return "", ""
        except OSError as error:
            why = str(error.strerror)
        except (ValueError, msgspec.ValidationError) as error:
            why = f"it is no verdict of the lab ({error})"
        faults.append(f"{RUN_FILE} is not the verdict of a run ({why})")
        return "", ""

    def _rows(
        self, states: dict[int, LiveState], world_size: int, now: float, faults: list[str], *, over: bool
    ) -> list[Shown]:
        """A row a rank, from its own state and from all that the ranks have written of each other."""
        records = {rank: self._records(rank, faults) for rank in range(world_size)}
        everything = [record for of_rank in records.values() for record in of_rank]
        gone = {record.rank: record.reason for record in everything if isinstance(record, Lost | Left)}
        absent = out([record for record in everything if isinstance(record, Changed)], states)
        rows = []
        for rank in range(world_size):
            state, silent_s = states.get(rank), now - self._changed_at.get(rank, now)
            ends = [record for record in records[rank] if isinstance(record, Failed | End)]
            how, reason = judged(state, silent_s, gone.get(rank), ends, over=over)
            if how in ("running", "waiting") and rank in absent and not over:
                how, reason = "out", absent[rank]
            rows.append(Shown(rank, how, reason) if state is None else rank_row(state, how, reason, silent_s))
        return rows

    def _records(self, rank: int, faults: list[str]) -> list[Any]:
        tail = self._tails.setdefault(rank, Tail(self.folder / f"rank{rank}.jsonl"))
        try:
            found = tail.read()
        except OSError as error:
            faults.append(f"{tail.path.name} cannot be read: {error.strerror}")
            return tail.found
        faults.extend(tail.faults)
        return found

    def _curves(self, states: dict[int, LiveState]) -> dict[str, Curve]:
        """Those of the states, and in their place those that rank 0 has written once the timed pass was over."""
        written = [record for record in self._tails[0].found if isinstance(record, Losses)]
        whole = {record.variant: thinned(record.numbers) for record in written}
        return curves(states) | whole


def out(changes: list[Changed], states: States) -> dict[int, str]:
    """The ranks that are no members of what is trained now, with the reason: their processes may live, as where a loss
    is only made."""
    last = max(changes, key=lambda change: change.at, default=None)
    if last is None or not any(states[rank].variant == last.variant for rank in last.members if rank in states):
        return {}
    reason = f"no member of {last.variant} since step {last.step}"
    return {rank: reason for rank in states if rank not in last.members}


def judged(
    state: LiveState | None, silent_s: float, gone: str | None, ends: list[Failed | End], *, over: bool
) -> tuple[str, str]:
    """How a rank is, and why: what the others wrote of it, what it wrote itself, and how long ago."""
    if gone is not None:
        return "lost", gone
    errors = [end.error for end in ends if isinstance(end, Failed)]
    if errors or (ends and (over or silent_s > STALE_S)):
        return "ended", "; ".join(errors)
    if state is None:
        return "unseen", "nothing of it is written here"
    if silent_s > STALE_S:
        return "lost", f"nothing written for {silent_s:.1f} s"
    return ("waiting" if state.waits_for else "running"), ""


def rank_row(state: LiveState, how: str, reason: str, silent_s: float) -> Shown:
    """The row of a rank that has written where it is."""
    return Shown(
        state.rank, how, reason, state.host, state.pid, state.variant, state.work, state.step, state.steps, state.phase,
        round(state.phase_s + silent_s, 2), state.waits_for,
    )  # fmt: skip


def so_far(ranks: list[Shown]) -> tuple[str, str]:
    """The verdict while no rank has written one."""
    lost = [each.rank for each in ranks if each.how == "lost"]
    if not lost:
        return "running", "no verdict yet"
    who = f"rank {lost[0]} is" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} are"
    return "lost", f"{who} lost"


def thinned(values: list[float]) -> Curve:
    """A whole curve by as many points as a live one has."""
    every = -(-len(values) // POINTS) or 1
    shown = ((step, values[step]) for step in range(0, len(values), every))
    return [[step, round(value, 6) if math.isfinite(value) else None] for step, value in shown]
