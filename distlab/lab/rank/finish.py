"""End a run: collect the last records, judge and draw them, or write a failure report when the cluster breaks.

Rank 0 judges a finished run and prepares verdict and report; once all ranks have acknowledged the verdict
(distlab/lab/cluster/rank_server.py) it publishes both, and every rank returns the verdict. After a broken cluster the
lowest survivor writes `run.json`: records reach rank 0 through the store, because nodes need not share a disk, but a
store may be gone.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.cluster.departure import Succession
from distlab.lab.cluster.join import store_at
from distlab.lab.cluster.launch import LauncherPipe
from distlab.lab.cluster.messages import Member, Verdict
from distlab.lab.cluster.watchdog import Watchdog
from distlab.lab.lab import Lab
from distlab.lab.report import fault_checks, records
from distlab.lab.report.log import SECTIONS, end_lines, rows_not_yet_printed, words_of_row
from distlab.lab.report.rank_log import RankLog
from distlab.lab.report.reading import BrokenRecord, from_line, read_records, read_run, to_line, write_atomically
from distlab.lab.report.records import Ranks, Run
from distlab.lab.report.run_folder import FILE as CLAIM
from distlab.lab.report.run_folder import Journal, Outcome, Unwritable
from distlab.lab.report.sentences import lost_lines, missed, troubles
from distlab.lab.report.table import in_lines, log_line
from distlab.lab.report.verdict import EXIT_CODES, exit_code, judge
from distlab.techniques.transport.store import Prefixed

# Each section of rank 0's log is printed as soon as it is complete: each rank sends its records since the last section,
# some kilobytes over the store, outside of all timed steps. At the end they are not printed again.


class Sections:
    """Rank 0's records of all ranks so far, and the rows that it has printed; all ranks finish the same sections."""

    def __init__(self, exchange: Exchange, journal: Journal, printed: Iterable[str] = ()) -> None:
        """`printed` are the rows that rank 0 has printed before the first section."""
        self.exchange, self.journal = exchange, journal
        self.by_rank: Ranks = {}
        self.left: set[int] = set()  # the ranks that have stopped sending
        self.printed = {words_of_row(row) for row in printed}
        self._last = ""  # the last printed section
        self._num_sent = 0

    def send_all_again(self) -> None:
        """Send all records again, because another rank collects from now on."""
        self.by_rank, self._num_sent = {}, 0

    def finished(self, name: str, rows: Sequence[str] = ()) -> None:
        """Print the new rows of the section of this name in `log.SECTIONS`; all ranks call it together.

        `rows` are the first cells of all rows of a section that is printed row by row, so that its columns align.
        """
        if not self.collect(name):
            return
        new = rows_not_yet_printed(SECTIONS[name](judge(self.by_rank), self.by_rank, rows), self.printed)
        for row in new:
            # Omit a heading that was printed above an earlier row of this section.
            if name != self._last or words_of_row(row) not in self.printed:
                self.journal.say(row, "full")
                self.printed.add(words_of_row(row))
        self._last = name if new else self._last

    def collect(self, name: str) -> bool:
        """Send new records to rank 0; return whether this is rank 0, which then has them in `by_rank`."""
        new = self.journal.records[self._num_sent :]
        self._num_sent += len(new)
        everyone = self.exchange.gather(name, [to_line(record) for record in new])
        for rank, lines in enumerate(everyone or []):
            if lines is None:
                self.left.add(rank)
            else:
                self.by_rank.setdefault(rank, []).extend(from_line(line) for line in lines)
        return everyone is not None


REPORT_TIMEOUT_S = 60.0
CONTROL = "tests/lab/rank/test_finish.py::test_an_injected_bug_that_no_check_catches_fails_the_run"
SURVIVORS_S = 1.0  # survivors write their reasons within a heartbeat of each other
REPORT_S = 4.5  # after the loss was named; a report that takes longer is left to the user


def finish_run(lab: Lab, outcome: Outcome, sections: Sections, agree: Callable[[Callable[[], None]], None]) -> int:
    """Collect the remaining records, judge all on rank 0, and return the same exit code on every rank, once all ranks
    `agree` on it.

    An injected bug (LAB_BUG) has to be caught by its own check: a bug that goes unnoticed looks like a passed check,
    and if that check did not run it could not catch anything.
    """
    if not sections.collect("records"):
        code = int(lab.exchange.share("verdict"))
        agree(lambda: None)
        verdict = next((name for name, of in EXIT_CODES.items() if of == code), "fail")
        for line in RankLog.of(lab.journal.records).verdict(verdict, outcome.folder):
            lab.journal.say(line.text) if code or lab.config.log == "full" else lab.journal.keep(line.text)
        return code
    by_rank = everything_written(sections, outcome.folder)
    run, added = judged(by_rank, lab.rank)
    for check in added:
        lab.journal.write(check)
    return publish_verdict(run, by_rank, sections, outcome, agree)


def judged(by_rank: records.Ranks, rank: int) -> tuple[Run, list[records.Check]]:
    run, added = judge(by_rank), list[records.Check]()
    if run["mistake"] and run["verdict"] != "lost" and (how := missed(run)):
        made = run["mistake"]
        detail = f"{made['check']}, which catches {made['name']}, {how}"
        added.append(records.Check("", "LAB_BUG", 1, 0, detail, CONTROL))
    for drill in run["drills"]:
        if drill["held"] is False:
            added.append(records.Check("", "drill", 1, 0, fault_checks.fault_sentence(drill), fault_checks.CONTROL))
    by_rank[rank] += added
    return (judge(by_rank) if added else run), added


def publish_verdict(
    run: Run, by_rank: records.Ranks, sections: Sections, outcome: Outcome, agree: Callable[[Callable[[], None]], None]
) -> int:
    """Write and draw the judged run on rank 0, publish it once all ranks `agree`, and return the exit code of all.

    Raises Unpublished if it cannot be published.
    """
    rank = sections.exchange.rank
    outcome.prepare(run, rank)
    written = outcome.folder / "report.html" if draw(outcome.folder, outcome.page(rank), REPORT_TIMEOUT_S) else None
    # A report that could not be written means a full disk or a defect of the lab: the run must not pass as if it had
    # one.
    code = exit_code(run) if written else exit_code(run) or 1
    sections.exchange.share("verdict", code)
    agree(lambda: outcome.publish(rank))
    with suppress(Unwritable):  # all ranks have agreed, so a full disk no longer changes the verdict
        journal = sections.journal
        for line in end_lines(run, by_rank, written, journal.level, sections.printed):
            journal.say(line)
    return code


def everything_written(sections: Sections, folder: Path) -> records.Ranks:
    """Return the records of all ranks on rank 0, each in its file: nodes need not share a disk."""
    by_rank = dict(sections.by_rank)
    for rank in range(sections.exchange.world_size):
        path = folder / f"rank{rank}.jsonl"
        if rank in sections.left:  # its earlier records must be enough
            by_rank |= {rank: read_records(path)} if path.exists() else {}
        elif not path.exists():
            write_atomically(path, (to_line(record) + "\n" for record in by_rank[rank]))
    return by_rank


def let_leave(
    watch: Watchdog, exchange: Exchange, journal: Journal, parent: LauncherPipe, then: Callable[[int], None]
) -> None:
    """Let the run continue from now on after the loss of a rank: no rank waits for it, a record is written, and `then`
    is called."""

    def left(lost: records.Lost) -> None:
        journal.write(records.Left(lost.rank, lost.step, f"{lost.reason}; the remaining ranks continued"))
        exchange.lost.add(lost.rank)
        then(lost.rank)

    def back(member: Member) -> None:
        lives = [each for each in journal.records if isinstance(each, records.Left) and each.rank == member.rank]
        if lives and not lives[-1].back:
            journal.write(msgspec.structs.replace(lives[-1], back=True))
        exchange.lost.discard(member.rank)

    watch.on_back = back
    watch.let_leave(left)
    parent.may_leave()


def move(watch: Watchdog, exchange: Exchange, sections: Sections) -> None:
    """Let the serving rank print and write for all remaining ranks from now on, who call this together."""
    cluster = watch.cluster
    cluster.store = store_at(*cluster.server_at, cluster.key)
    exchange.move(Prefixed("the rest", cluster.store), cluster.host)
    sections.send_all_again()


def draw(folder: Path, page: Path, timeout_s: float) -> bool:
    """Draw the report in a child, which ends with this process, so that no rank imports the charts' library."""
    module = ["distlab.cli.report", "--page-only", "--page", str(page), str(folder)]
    command = [sys.executable, "-m", *module, "--parent", str(os.getpid())]
    try:
        subprocess.run(command, check=True, timeout=timeout_s, stdout=subprocess.DEVNULL)
    except (subprocess.SubprocessError, OSError):
        return False
    return True


def complete(code: int, folder: Path) -> None:
    """Complete the folder in the launcher, after its ranks ended with `code`: write run.json if all ranks were stopped
    and none wrote it, and the report that its writer had no time to draw."""
    try:
        outcome = Outcome(folder, (folder / CLAIM).read_text())
        written = not outcome.claimed() and outcome.write(judge(read_run(folder)))
    except (OSError, BrokenRecord):  # no rank came this far, or the disk is full
        return
    page = folder / "report.html"
    is_missing = written or (code == EXIT_CODES["lost"] and not page.exists())
    if is_missing and draw(folder.resolve(), page.resolve(), REPORT_TIMEOUT_S):
        print(log_line("report", str(page)), flush=True)


def write_failure_report(verdict: Verdict, succession: Succession, journal: Journal, outcome: Outcome) -> None:
    """Write on the watch's thread, before this rank ends, who was lost; the lowest survivor also writes run.json, then
    the report if there is time.

    A rank that was declared dead writes nothing: its knowledge is as old as its last heartbeat, and the folder belongs
    to the others.
    """
    if succession.declared_dead:
        return
    for lost in verdict.lost:
        journal.write(lost)
    journal.write(records.Failed(verdict.exit_code, verdict.sentence, time.time()))
    if journal.folder is None or not succession.is_my_turn(outcome.claimed):
        return
    by_rank = records_of_survivors(outcome.folder, succession.survivors) | {succession.rank: journal.records}
    run = judge(by_rank)
    if not outcome.write(run):
        return
    outcome.discard()
    for word, text in troubles(run):
        if word in ("fault", "unseen"):
            journal.say(log_line(word, text))
    left_s = succession.named_at + REPORT_S - time.monotonic()
    page = outcome.page(succession.rank)
    report = None
    if left_s > 0 and draw(outcome.folder, page, left_s):
        report = outcome.folder / "report.html"
        os.replace(page, report)
    else:
        journal.say(
            log_line("report", f"not drawn within {REPORT_S:g} s of the loss: ./run report {outcome.folder} draws it")
        )
    for line in in_lines(lost_lines(run, by_rank, report, outcome.folder)):
        journal.say(line, "normal")


def records_of_survivors(folder: Path, survivors: list[int]) -> records.Ranks:
    """Return the records of all ranks that share this disk, once every survivor has written why it ends."""
    deadline = time.monotonic() + SURVIVORS_S
    while True:
        try:
            found = read_run(folder)
        except BrokenRecord:  # a disk that is full: this rank's own records must be enough
            return {}
        ended = {rank for rank, _ in records.select(found, records.Failed)}
        if set(survivors) <= ended or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
