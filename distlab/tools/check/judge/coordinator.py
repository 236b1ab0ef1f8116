"""The doctor of rank 0: takes what all ranks tell, compares, and says as soon as it is sure what is wrong.

A mismatch ends the run, and so does a hang, a script that failed, and a rank that is gone. What is only found at the
end (drifted replicas) is told then. A rank that computes for long while others wait for it is no hang: it is named
every 10 s, so that nobody takes the silence for one.
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
from distlab.tools.check.watch.telling import now

GATHER_S = 1.5  # from the first sign of a fault until it is told: what others have told meanwhile is on its way
SURE_S = 3.0  # how long at least ranks have to stand in calls that do not match, to be called hung
LATE_S = 10.0  # at most from a failure until it is told
SILENT_S = 1.0  # a rank that told nothing for so long is where its stack says
STOPPED_S = 2.5  # how long a process may be stopped before its rank counts as lost


class Doctor:
    """All cases of a run. `say` prints on rank 0; `bound_s` is for how long one may stand still while others wait.
    With `promises` a rank that leaves before it has told of its end has failed."""

    def __init__(
        self, world_size: int, hang_after_s: float, bound_s: float, say: Callable[[str], None],
        mesh: Sequence[tuple[str, int]] = (), gather_s: float = GATHER_S, *, promises: bool = False,
    ) -> None:  # fmt: skip
        self.cases = [RankState(rank, world_size, moved_at=now(), promises=promises) for rank in range(world_size)]
        self.quiet = Quiet(world_size, mesh)
        self.matching = Matching(world_size, self.quiet.parameter_calls)
        self.findings: list[Finding] = []
        self.changed: dict[str, list[int]] = {}
        self.unread = Counter[int]()  # lines of each rank that were not as they are written
        self.over = False  # nothing more is to be waited for
        self.whole = False  # all scripts have ended, and nothing had ended the run before
        self.refused = ""  # why nothing was run, as rank 0 would have it said
        self.records: list[Record] = []  # that a proof has told
        self.compared: list[Record] = []  # of a script and its reference
        self.lost: dict[int, str] = {}  # ranks whose process was killed or stopped from outside, and how
        self._waiting, self._still = Waiting(hang_after_s), Still(bound_s, say)
        self._say = say
        self._gather_s, self._hang_after_s = gather_s, hang_after_s
        self._first_sign: float | None = None
        self._at_limit: Finding | None = None  # who was at work while the others' limit passed, as it was seen last
        self._stuck: dict[int, Standing] = {}  # in calls that do not match, as it was seen last
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
        """Go on without what a rank has told and what cannot be taken: the script has the pipe, too."""
        try:
            yield
        except Exception:  # of any kind: nobody knows what stands there
            self.unread[rank] += 1
            if self.unread[rank] == 1:
                self._say(f"dropped    a line of rank {rank} that is not as its kind is written; more are only counted")

    def look(self, now: float) -> None:
        """Compare what has come; `over` and `findings` say what became of it."""
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
            self._suspect(now - self._gather_s)  # it has stood for long enough
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
        """Whether all is known that comes of the first sign: ranks that stand in calls which do not match are looked at
        for as long as a hang takes, and after a failure the others have as long to come to where they stand still."""
        if since_s < self._gather_s:
            return False
        if self.lost or any(finding.check == HANG for finding in self.findings):
            return True
        apart = [case for case in self.cases if case.waiting(self.matching.is_apart)]
        stuck = standing_apart(self.cases, self.matching)
        answered = all(case.frames() for case in apart)  # else one was asked where it is, and has not answered yet
        if stuck or (answered and not self._stand_as_before()):
            self._stuck = stuck
        bound_s = max(SURE_S, self._hang_after_s)
        if (apart and since_s < bound_s) or (since_s < LATE_S and self._late(now, within=since_s < bound_s)):
            return False
        if self._stuck:
            self.findings.append(apart_finding(self._stuck, len(self.cases)))
        return True

    def _stand_as_before(self) -> bool:
        """Whether all that were seen to hang are still in the same call; beside busy processes one that waits for a
        core looks like one that computes."""
        return bool(self._stuck) and all(
            any(call is each.wait.call for call in self.cases[rank].open.values()) for rank, each in self._stuck.items()
        )

    def _late(self, now: float, *, within: bool) -> bool:
        """Whether one that has not failed is to be waited for: `within` the time that a hang takes until it stands
        still or has ended, and after that until it is known where it is."""
        failed = [case for case in self.cases if has_failed(case)]
        late = unsettled(self.cases, self.matching) if failed else []
        if any(not case.frames() and now - case.moved_at > SILENT_S for case in late):
            return True  # it was asked, and has not answered yet
        at_limit = limit_passed(self.cases, self.matching)  # who is at work is the fault, and told as that
        return within and any(at_limit is None or case.rank not in at_limit.ranks for case in late)

    def _take_proof(self, fact: list[Any]) -> None:
        """What `distlab prove` has found, in words and records of its own."""
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
        """A sign that something is wrong; the first one counts."""
        if self._first_sign is None:
            self._first_sign = now

    def _look_for_ends(self, now: float) -> None:
        """Ranks that failed, that are gone, or that somebody has stopped."""
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
