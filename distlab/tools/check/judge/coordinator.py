"""Rank 0's coordinator: collects all ranks' reports, compares them, and reports a fault as soon as it is certain.

A mismatch ends the run, and so does a hang, a failed script and a lost rank. Faults found only at the end (drifted
replicas) are reported then. A rank that computes for a long time while others wait is no hang: it is named every 10 s,
so that the silence is explained.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distlab.lab.report.reading import from_line
from distlab.lab.report.records import Record, Said
from distlab.tools.check.judge.deadlock import Standing, Still, Waiting, apart_finding, standing_apart, unsettled
from distlab.tools.check.judge.exceptions import how_it_ended
from distlab.tools.check.judge.failures import aborted, failures, has_failed, last_call, limit_passed
from distlab.tools.check.judge.matching import Matching, every_call
from distlab.tools.check.judge.rank_state import HANG, Finding, RankState
from distlab.tools.check.judge.silent_faults import Quiet
from distlab.tools.check.watch.reporter import now

GATHER_S = 1.5  # from the first sign of a fault to the report: other ranks' messages may be on their way
SURE_S = 3.0  # the time after which ranks in mismatched calls count as hung
LATE_S = 10.0  # at most from a failure to the report
SILENT_S = 1.0  # after so long without a report, a rank's stack is read
STOPPED_S = 2.5  # a process stopped for so long counts as lost


class Doctor:
    """The states of all ranks. `say` prints on rank 0; `bound_s` is the limit for an idle rank that others wait for.
    With `promises` a rank that leaves without reporting its end has failed."""

    def __init__(
        self, world_size: int, hang_after_s: float, bound_s: float, say: Callable[[str], None],
        mesh: Sequence[tuple[str, int]] = (), gather_s: float = GATHER_S, *, promises: bool = False,
    ) -> None:  # fmt: skip
        self.cases = [RankState(rank, world_size, moved_at=now(), promises=promises) for rank in range(world_size)]
        self.quiet = Quiet(world_size, mesh)
        self.matching = Matching(world_size, self.quiet.parameter_calls)
        self.findings: list[Finding] = []
        self.changed: dict[str, list[int]] = {}
        self.unread = Counter[int]()  # malformed lines of each rank
        self.over = False  # whether to stop waiting
        self.whole = False  # all scripts have ended, and nothing ended the run before
        self.refused = ""  # why nothing was run, as rank 0 prints it
        self.records: list[Record] = []  # reported by a proof
        self.compared: list[Record] = []  # of a script and its reference
        self.lost: dict[int, str] = {}  # ranks whose process was killed or stopped from outside, and how
        self._waiting, self._still = Waiting(hang_after_s), Still(bound_s, say)
        self._say = say
        self._gather_s, self._hang_after_s = gather_s, hang_after_s
        self._first_sign: float | None = None
        self._at_limit: Finding | None = None  # the last seen rank that was busy when the others' timeout passed
        self._stuck: dict[int, Standing] = {}  # the last seen ranks in mismatched calls
        self._stopped: dict[int, float] = {}

    def take(self, rank: int, lines: Sequence[bytes], time_s: float) -> None:
        for line in lines:
            with self._dropping(rank):
                told = json.loads(line)
                if not self.cases[rank].take(told, time_s):
                    self._take_fact(self.cases[rank], told)

    def _take_fact(self, case: RankState, fact: list[Any]) -> None:
        if fact[0] in ("changed", "unrecorded"):
            self._tell_change(fact, case.rank)
        self._take_proof(fact)
        self.findings += self.quiet.take(case, fact)

    @contextmanager
    def _dropping(self, rank: int) -> Iterator[None]:
        """Skip a malformed report of a rank: the script can write to the pipe too."""
        try:
            yield
        except Exception:  # of any type, as the content is arbitrary
            self.unread[rank] += 1
            if self.unread[rank] == 1:
                self._say(f"dropped    a line of rank {rank} that is not as its kind is written; more are only counted")

    def look(self, now: float) -> None:
        """Compare the reports so far; sets `over` and `findings`."""
        if self.refused:
            self.over = True
            return
        for call in every_call(self.cases):
            if self.matching.take(call):
                self._suspect(now)
        self._look_for_ends(now)
        self._at_limit = limit_passed(self.cases, self.matching) or self._at_limit
        if any(finding.ends for finding in self.findings):
            self._suspect(now)
        if self._first_sign is None and (found := self._waiting.look(self.cases, self.matching, now)) is not None:
            self.findings.append(found)
            self._suspect(now - self._gather_s)  # the mismatch has lasted long enough
        if self._first_sign is not None:
            self.over = self._gathered(now - self._first_sign, now)
        elif all(case.over for case in self.cases):
            self.over = self.whole = True
            self.findings += [*self.matching.unmatched(), *self.quiet.at_end()]
        else:
            stands = self._still.look(self.cases, self.matching, now)
            if stands is not None:
                self.findings.append(stands)
                self._suspect(now)
        if self.over:
            self.findings += [*self.matching.mismatches(self.cases), *self.quiet.handles.findings()]
            known = bool(self.lost) or any(finding.ends for finding in self.findings)
            self.findings += failures(self.cases, self.matching, self.lost, self._at_limit, explained=known)

    def _gathered(self, since_s: float, now: float) -> bool:
        """Return whether all consequences of the first sign are known: mismatched calls are observed as long as a hang;
        after a failure the other ranks have as long to become idle."""
        if since_s < self._gather_s:
            return False
        if self.lost or any(finding.check == HANG for finding in self.findings):
            return True
        apart = [case for case in self.cases if case.waiting(self.matching.is_apart)]
        stuck = standing_apart(self.cases, self.matching)
        answered = all(case.frames() for case in apart)  # else one has not reported its stack yet
        if stuck or (answered and not self._stand_as_before()):
            self._stuck = stuck
        bound_s = max(SURE_S, self._hang_after_s)
        if (apart and since_s < bound_s) or (since_s < LATE_S and self._late(now, within=since_s < bound_s)):
            return False
        if self._stuck:
            self.findings.append(apart_finding(self._stuck, len(self.cases)))
        return True

    def _stand_as_before(self) -> bool:
        """Return whether all hung ranks are still in the same call; with busy processes, waiting for a core looks like
        computing."""
        return bool(self._stuck) and all(
            any(call is each.wait.call for call in self.cases[rank].open.values()) for rank, each in self._stuck.items()
        )

    def _late(self, now: float, *, within: bool) -> bool:
        """Return whether to wait for a rank without a failure: `within` the hang's time, until it is idle or has ended;
        after that, until its place is known."""
        failed = [case for case in self.cases if has_failed(case)]
        late = unsettled(self.cases, self.matching) if failed else []
        if any(not case.frames() and now - case.moved_at > SILENT_S for case in late):
            return True  # it was asked, and has not answered yet
        at_limit = limit_passed(self.cases, self.matching)  # the busy rank is the fault, and reported as such
        return within and any(at_limit is None or case.rank not in at_limit.ranks for case in late)

    def _take_proof(self, fact: list[Any]) -> None:
        """Record what `distlab prove` has found."""
        kind, *values = fact
        if kind == "refused":
            self.refused = self.refused or values[0]
        elif kind == "finding":
            check, sentence, ranks = values
            self.findings.append(Finding(check, sentence, tuple(ranks)))
        elif kind == "record":
            self.records.append(from_line(values[0]))
        elif kind == "said":
            heading, text = values
            self._say(f"{heading:<11}{text}")
            self.records.append(Said(heading, text))

    def _tell_change(self, fact: list[str], rank: int) -> None:
        sentence = fact[1] if fact[0] == "changed" else f"{fact[1]} is not recorded: {fact[2]}"
        if sentence not in self.changed:
            self._say(f"changed    {sentence}")
        self.changed.setdefault(sentence, []).append(rank)

    def _suspect(self, now: float) -> None:
        """Note a sign of a fault; the first one counts."""
        if self._first_sign is None:
            self._first_sign = now

    def _look_for_ends(self, now: float) -> None:
        """Find ranks that failed, have gone, or were stopped."""
        for case in self.cases:
            if has_failed(case):
                self._suspect(now)
            if case.state == "T" and not case.over:
                since = self._stopped.setdefault(case.rank, now)
                if now - since > STOPPED_S:
                    self.lost[case.rank] = f"its process was stopped (SIGSTOP){last_call(case)}"
            else:
                self._stopped.pop(case.rank, None)
            if case.exit_code is None and case.gone is not None and case.gone < 0 and not aborted(case):
                self.lost[case.rank] = f"{how_it_ended(case.gone)}{last_call(case)}"
        if self.lost:
            self._suspect(now)
