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
from distlab.tools.check.judge.deadlock import Blocked, HangWatch, IdleWatch, hung_in_mismatch, mismatch_hang, unsettled
from distlab.tools.check.judge.exceptions import how_it_ended
from distlab.tools.check.judge.failures import aborted, failures, has_failed, last_call, timeout_passed
from distlab.tools.check.judge.matching import Matching, new_calls
from distlab.tools.check.judge.rank_state import HANG, Finding, RankState
from distlab.tools.check.judge.silent_faults import SilentFaults
from distlab.tools.check.watch.reporter import now

GATHER_S = 1.5  # from the first sign of a fault to the report: other ranks' messages may be on their way
SURE_S = 3.0  # the time after which ranks in mismatched calls count as hung
LATE_S = 10.0  # at most from a failure to the report
SILENT_S = 1.0  # after so long without a report, a rank's stack is read
STOPPED_S = 2.5  # a process stopped for so long counts as lost


class Coordinator:
    """The states of all ranks. `log` prints on rank 0; `idle_limit_s` is the limit for an idle rank that others
    wait for. With `reports_end` a rank that leaves without reporting its end has failed."""

    def __init__(
        self, world_size: int, hang_after_s: float, idle_limit_s: float, log: Callable[[str], None],
        mesh: Sequence[tuple[str, int]] = (), gather_s: float = GATHER_S, *, reports_end: bool = False,
    ) -> None:  # fmt: skip
        self.states = [
            RankState(rank, world_size, received_at=now(), reports_end=reports_end) for rank in range(world_size)
        ]
        self.silent_faults = SilentFaults(world_size, mesh)
        self.matching = Matching(world_size, self.silent_faults.parameter_calls)
        self.findings: list[Finding] = []
        self.changed: dict[str, list[int]] = {}
        self.malformed = Counter[int]()  # malformed lines of each rank
        self.over = False  # whether to stop waiting
        self.completed = False  # all scripts have ended, and nothing ended the run before
        self.refused = ""  # why nothing was run, as rank 0 prints it
        self.records: list[Record] = []  # reported by a proof
        self.compared: list[Record] = []  # of a script and its reference
        self.lost: dict[int, str] = {}  # ranks whose process was killed or stopped from outside, and how
        self._hangs, self._idle_ranks = HangWatch(hang_after_s), IdleWatch(idle_limit_s, log)
        self._log = log
        self._gather_s, self._hang_after_s = gather_s, hang_after_s
        self._first_sign: float | None = None
        self._timeout_finding: Finding | None = None  # the last seen rank that was busy when the others' timeout passed
        self._stuck: dict[int, Blocked] = {}  # the last seen ranks in mismatched calls
        self._stopped_since: dict[int, float] = {}

    def receive(self, rank: int, lines: Sequence[bytes], time_s: float) -> None:
        for line in lines:
            with self._skipping_malformed(rank):
                report = json.loads(line)
                if not self.states[rank].receive(report, time_s):
                    self._on_report(self.states[rank], report)

    def _on_report(self, state: RankState, report: list[Any]) -> None:
        if report[0] in ("changed", "unrecorded"):
            self._log_change(report, state.rank)
        self._on_proof_report(report)
        self.findings += self.silent_faults.receive(state, report)

    @contextmanager
    def _skipping_malformed(self, rank: int) -> Iterator[None]:
        """Skip a malformed report of a rank: the script can write to the pipe too."""
        try:
            yield
        except Exception:  # of any type, as the content is arbitrary
            self.malformed[rank] += 1
            if self.malformed[rank] == 1:
                self._log(f"dropped    a malformed report of rank {rank}; more of them are only counted")

    def evaluate(self, now: float) -> None:
        """Compare the reports so far; sets `over` and `findings`."""
        if self.refused:
            self.over = True
            return
        for call in new_calls(self.states):
            if self.matching.add(call):
                self._suspect(now)
        self._find_ended_ranks(now)
        self._timeout_finding = timeout_passed(self.states, self.matching) or self._timeout_finding
        if any(finding.ends for finding in self.findings):
            self._suspect(now)
        if self._first_sign is None and (found := self._hangs.find_hang(self.states, self.matching, now)) is not None:
            self.findings.append(found)
            self._suspect(now - self._gather_s)  # the mismatch has lasted long enough
        if self._first_sign is not None:
            self.over = self._gathered(now - self._first_sign, now)
        elif all(state.over for state in self.states):
            self.over = self.completed = True
            self.findings += [*self.matching.unmatched(), *self.silent_faults.at_end()]
        else:
            idle = self._idle_ranks.find_idle(self.states, self.matching, now)
            if idle is not None:
                self.findings.append(idle)
                self._suspect(now)
        if self.over:
            self.findings += [*self.matching.mismatches(self.states), *self.silent_faults.handles.findings()]
            explained = bool(self.lost) or any(finding.ends for finding in self.findings)
            self.findings += failures(self.states, self.matching, self.lost, self._timeout_finding, explained=explained)

    def _gathered(self, since_s: float, now: float) -> bool:
        """Return whether all consequences of the first sign are known: mismatched calls are observed as long as a hang;
        after a failure the other ranks have as long to become idle."""
        if since_s < self._gather_s:
            return False
        if self.lost or any(finding.check == HANG for finding in self.findings):
            return True
        mismatched = [state for state in self.states if state.waiting(self.matching.is_mismatched)]
        stuck = hung_in_mismatch(self.states, self.matching)
        answered = all(state.frames() for state in mismatched)  # else one has not reported its stack yet
        if stuck or (answered and not self._still_stuck()):
            self._stuck = stuck
        early = since_s < max(SURE_S, self._hang_after_s)
        if (mismatched and early) or (since_s < LATE_S and self._must_wait(now, within=early)):
            return False
        if self._stuck:
            self.findings.append(mismatch_hang(self._stuck, len(self.states)))
        return True

    def _still_stuck(self) -> bool:
        """Return whether all hung ranks are still in the same call; with busy processes, waiting for a core looks like
        computing."""
        return bool(self._stuck) and all(
            any(call is one.wait.call for call in self.states[rank].open.values()) for rank, one in self._stuck.items()
        )

    def _must_wait(self, now: float, *, within: bool) -> bool:
        """Return whether to wait for a rank without a failure: `within` the hang's time, until it is idle or has ended;
        after that, until its place is known."""
        failed = [state for state in self.states if has_failed(state)]
        late = unsettled(self.states, self.matching) if failed else []
        if any(not state.frames() and now - state.received_at > SILENT_S for state in late):
            return True  # its stack was requested, and has not arrived yet
        timeout_finding = timeout_passed(self.states, self.matching)  # the busy rank is the fault, and reported as such
        return within and any(timeout_finding is None or state.rank not in timeout_finding.ranks for state in late)

    def _on_proof_report(self, report: list[Any]) -> None:
        """Record what `distlab prove` has found."""
        kind, *values = report
        if kind == "refused":
            self.refused = self.refused or values[0]
        elif kind == "finding":
            check, sentence, ranks = values
            self.findings.append(Finding(check, sentence, tuple(ranks)))
        elif kind == "record":
            self.records.append(from_line(values[0]))
        elif kind == "said":
            heading, text = values
            self._log(f"{heading:<11}{text}")
            self.records.append(Said(heading, text))

    def _log_change(self, report: list[str], rank: int) -> None:
        sentence = report[1] if report[0] == "changed" else f"{report[1]} is not recorded: {report[2]}"
        if sentence not in self.changed:
            self._log(f"changed    {sentence}")
        self.changed.setdefault(sentence, []).append(rank)

    def _suspect(self, now: float) -> None:
        """Note a sign of a fault; the first one counts."""
        if self._first_sign is None:
            self._first_sign = now

    def _find_ended_ranks(self, now: float) -> None:
        """Find ranks that failed, exited, or were stopped."""
        for state in self.states:
            if has_failed(state):
                self._suspect(now)
            if state.process_state == "T" and not state.over:
                since = self._stopped_since.setdefault(state.rank, now)
                if now - since > STOPPED_S:
                    self.lost[state.rank] = f"its process was stopped (SIGSTOP){last_call(state)}"
            else:
                self._stopped_since.pop(state.rank, None)
            if state.exit_code is None and state.exited is not None and state.exited < 0 and not aborted(state):
                self.lost[state.rank] = f"{how_it_ended(state.exited)}{last_call(state)}"
        if self.lost:
            self._suspect(now)
