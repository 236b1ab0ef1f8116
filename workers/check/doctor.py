"""The doctor of rank 0: takes what all ranks tell, compares, and says as soon as it is sure what is wrong.

A mismatch ends the run, and so does a hang, a script that failed, and a rank that is gone. What is only found at the
end (drifted replicas) is told then. A rank that computes for long while others wait for it is no hang: it is named
every 10 s, so that nobody takes the silence for one.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from workers.check.bedside import how_it_ended
from workers.check.casebook import Case, Wait, words
from workers.check.finding import END, Finding
from workers.check.matching import Matching, every_call
from workers.check.quiet import Quiet
from workers.check.waiting import Standing, Waiting, diagnosis, hung, standing_at, standings, table
from workers.cluster import name_ranks
from workers.cluster.failing import BLAMELESS

GATHER_S = 0.7  # from the first sign of a fault until it is told: what others have told meanwhile is on its way
STILL_S = 10.0  # between two words about ranks that compute while others wait
STOPPED_S = 2.5  # how long a process may be stopped before its rank counts as lost
LONE_S = 300.0  # how long ranks may wait for one that neither computes nor calls


class Doctor:
    """All cases of a run. `say` prints on rank 0."""

    def __init__(
        self, world_size: int, hang_after_s: float, say: Callable[[str], None], mesh: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.cases = [Case(rank, world_size) for rank in range(world_size)]
        self.matching, self.quiet = Matching(world_size), Quiet(world_size, mesh)
        self.findings: list[Finding] = []
        self.changed: dict[str, list[int]] = {}
        self.over = False  # nothing more is to be waited for
        self.lost: dict[int, str] = {}  # ranks whose process was killed or stopped from outside, and how
        self._waiting = Waiting(hang_after_s)
        self._say = say
        self._first_sign: float | None = None
        self._said_still: float | None = None
        self._stopped: dict[int, float] = {}
        self._lone: tuple[object, float] | None = None

    def take(self, rank: int, lines: Sequence[bytes], now: float) -> None:
        """What a rank has told."""
        for line in lines:
            self.cases[rank].take(json.loads(line), now)

    def look(self, now: float) -> None:
        """Compare what has come; `over` and `findings` say what became of it."""
        for case in self.cases:
            facts, case.facts = case.facts, []
            for fact in facts:
                if fact[0] in ("changed", "unrecorded"):
                    self._tell_change(fact, case.rank)
                self._add(self.quiet.take(case, fact))
        for call in every_call(self.cases):
            if self.matching.take(call) and self._first_sign is None:
                self._first_sign = now
        self._look_for_ends(now)
        if self._first_sign is None and any(finding.ends for finding in self.findings):
            self._first_sign = now
        if self._first_sign is None and (found := self._waiting.look(self.cases, self.matching, now)) is not None:
            self._add([found])
            self._first_sign = now - GATHER_S  # it has stood for long enough
        if self._first_sign is not None:
            self.over = now - self._first_sign >= GATHER_S
        elif all(case.over for case in self.cases):
            self.over = True
            self._add(self.matching.unmatched())
            self._add(self.quiet.at_end())
        else:
            self._say_who_computes(now)
        if self.over:
            self._add(self.matching.mismatches())
            self._add(self.quiet.handles())
            self._name_failures()

    def _tell_change(self, fact: list[str], rank: int) -> None:
        """What is other than without the doctor, said once."""
        sentence = fact[1] if fact[0] == "changed" else f"{fact[1]} is not recorded: {fact[2]}"
        if sentence not in self.changed:
            self._say(f"changed    {sentence}")
        self.changed.setdefault(sentence, []).append(rank)

    def _add(self, found: Iterator[Finding] | Sequence[Finding]) -> None:
        for finding in found:
            self.findings.append(finding)

    def _look_for_ends(self, now: float) -> None:
        """Ranks that failed, that are gone, or that somebody has stopped."""
        for case in self.cases:
            if case.raised is not None or (case.gone is not None and case.exit_code is None):
                self._first_sign = self._first_sign if self._first_sign is not None else now
            if case.state in "Tt" and not case.over:
                since = self._stopped.setdefault(case.rank, now)
                if now - since > STOPPED_S:
                    self.lost[case.rank] = f"its process was stopped (SIGSTOP) at {standing_at(case)}"
            else:
                self._stopped.pop(case.rank, None)
            if case.gone is not None and case.gone < 0 and case.exit_code is None and not self._aborted(case):
                self.lost[case.rank] = f"{how_it_ended(case.gone)}{self._last(case)}"
        if self.lost and self._first_sign is None:
            self._first_sign = now

    def _aborted(self, case: Case) -> bool:
        """Whether a library ended the process itself, as gloo does where tensors do not fit: then others tell why."""
        return case.gone in (-6, -11, -8, -4, -7)

    def _name_failures(self) -> None:
        """The script's own failures, those that come of another's folded into it."""
        raised = {case.rank: case.raised for case in self.cases if case.raised is not None}
        left = {case.rank: case for case in self.cases if case.gone is not None and case.exit_code is None}
        own = {rank: each for rank, each in raised.items() if not blameless(each.kind, each.text)}
        explained = any(finding.ends for finding in self.findings) or bool(self.lost)
        for rank, case in left.items():
            if rank in self.lost or (self._aborted(case) and explained):
                continue
            if case.gone == 0 and not self._awaited(rank) and all(each.over for each in self.cases):
                continue  # a script that ends by os._exit(0) ends well
            sentence = f"rank {rank} {how_it_ended(case.gone or 0)}{self._last(case)}{self._consequences(rank)}"
            self.findings.append(Finding(END, sentence, (rank,), table(self.cases, self._waits())))
        told: dict[tuple[str, str], list[int]] = {}
        for rank in sorted(own, key=lambda rank: own[rank].at_s):
            told.setdefault((own[rank].kind, own[rank].text), []).append(rank)
        for (kind, text), ranks in told.items():
            first = own[ranks[0]]
            what = f"{kind}: {first_line(text)}".rstrip(": ")
            verb = "called sys.exit with" if kind == "SystemExit" else "raised"
            what = text if kind == "SystemExit" else what
            at = f" at {first.place}" if first.place else ""
            sentence = f"{name_ranks(ranks)} {verb} {what}{at}{self._consequences(ranks[0])}"
            self.findings.append(
                Finding(END, sentence, tuple(ranks), table(self.cases, self._waits()), traceback=first.traceback)
            )
        if raised and not own and not explained and not left:
            self._blame()

    def _blame(self) -> None:
        """Of scripts that failed for a lost connection or a bound alone: the calls that they failed in, and who was
        not there."""
        failed = [case for case in self.cases if case.raised is not None]
        first = min(failed, key=lambda case: case.raised.at_s if case.raised is not None else 0.0)
        assert first.raised is not None
        waits = standings(self.cases, self.matching)
        for case in failed:
            call = next(iter(case.open.values()), case.last)
            needs = frozenset(self.matching.absent(call)) if call is not None else frozenset()
            if call is not None and needs:
                waits[case.rank] = Standing(Wait(call, words(call), call.place, call.began_s), needs, any_of=False)
        stuck = {rank: each for rank, each in waits.items() if not each.any_of}
        how = f"rank {first.rank} raised {first.raised.kind} at {first.raised.place}: {first_line(first.raised.text)}"
        if stuck:
            found = diagnosis(self.cases, self.matching, waits, stuck)
            self.findings.append(replace(found, sentence=f"{found.sentence} ({how})"))
        else:
            self.findings.append(Finding(END, how, (first.rank,), traceback=first.raised.traceback))

    def _waits(self) -> dict[int, Standing]:
        return standings(self.cases, self.matching)

    def _awaited(self, rank: int) -> bool:
        return any(rank in each.needs and not each.any_of for each in standings(self.cases, self.matching).values())

    def _consequences(self, rank: int) -> str:
        """Who waits for it, and who failed because of it."""
        waits = standings(self.cases, self.matching)
        waiting = [other for other, each in waits.items() if rank in each.needs and not each.any_of]
        failed = [
            case.rank
            for case in self.cases
            if case.raised is not None and case.rank != rank and blameless(case.raised.kind, case.raised.text)
        ]
        parts = []
        if waiting:
            wait = waits[waiting[0]].wait
            verb = "waits" if len(waiting) == 1 else "wait"
            parts.append(f"{name_ranks(waiting)} {verb} for it in {wait.what} at {wait.place}")
        if failed:
            parts.append(f"{name_ranks(failed)} failed because of it")
        return f"; {'; '.join(parts)}" if parts else ""

    def _last(self, case: Case) -> str:
        return (
            f", its last call was {words(case.last)} at {case.last.place}"
            if case.last is not None
            else " before its first call"
        )

    def _say_who_computes(self, now: float) -> None:
        """Ranks that others wait for and that are no hang."""
        waits = standings(self.cases, self.matching)
        needed = {rank for each in waits.values() for rank in each.needs if not each.any_of}
        busy = [case for case in self.cases if case.rank in needed and case.rank not in waits and not case.over]
        if not busy or len(hung(waits, {case.rank for case in self.cases if case.over})) > 0:
            self._said_still = None
            return
        if self._said_still is None:
            self._said_still = now
        if now - self._said_still < STILL_S:
            return
        self._said_still = now
        waiting = sorted(rank for rank, each in waits.items() if each.needs & {case.rank for case in busy})
        for case in busy:
            wait = waits[waiting[0]].wait
            doing = "computes" if case.cpu_share > 0.5 else "stands"
            verb = "waits" if len(waiting) == 1 else "wait"
            self._say(
                f"no hang    rank {case.rank} {doing} at {standing_at(case)} ({case.cpu_share:.0%} of a core), and"
                f" {name_ranks(waiting)} {verb} for it in {wait.what} at {wait.place} for {now - wait.since_s:.0f} s"
            )


def blameless(kind: str, text: str) -> bool:
    """Whether another rank's end may be behind an exception of this kind."""
    return (
        kind not in ("SystemExit",)
        and any(word in text.lower() for word in BLAMELESS)
        and ("Error" in kind and kind not in ("ValueError", "TypeError", "AssertionError", "KeyError"))
    )


def first_line(text: str) -> str:
    """The first line, not too long."""
    return (text.splitlines() or [""])[0][:400]
