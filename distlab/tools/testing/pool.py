"""The ranks that run tests marked with `distlab.ranks`, in pytest's process.

After a failure the pool is killed as a whole: who knows what a rank that raised has left behind; the next test forks
new ones, which takes a tenth of a second each.
"""

import atexit
from collections.abc import Sequence

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.rank_state import END
from distlab.tools.check.start.fork_servers import is_one_for_all
from distlab.tools.testing.processes import Outcome, WarmRanks, Watching
from distlab.tools.testing.rank import Task, serve

START_S = 60.0  # for a rank to be there, on a machine that does much else


class Pool(WarmRanks):
    """The ranks that run tests marked with `distlab.ranks`."""

    def __init__(self, root: str, files: Sequence[str], preload: Sequence[str]) -> None:
        super().__init__(root, preload, apart=not is_one_for_all())
        self._files, self._tasks = files, 0
        atexit.register(self.kill)

    def next_number(self) -> int:
        self._tasks += 1
        return self._tasks

    def run(self, tasks: Sequence[Task]) -> Outcome:
        """One task a rank; ends after the longest bound of them."""
        for new in self.fork(len(tasks), serve, self._files):
            self.hear(new, "start", START_S)
        for rank, task in zip(self._ranks, tasks, strict=False):
            rank.begin(task)
        outcome = Watching(self._ranks[: len(tasks)], tasks[0].timeout_s).until_the_end()
        if outcome.is_bad:
            self.kill()
        return outcome

    def close(self) -> None:
        self.let_end(2)
        self.kill()
        self.close_servers()
        self.close_store()


def failure_text(outcome: Outcome) -> str:
    """A failed test: the doctor's sentences, where each rank was, and the traceback of who failed itself."""
    said = [f"rank {rank} {how}" for rank, how in outcome.lost.items()]  # what others raised came of it
    said += [finding.sentence for finding in outcome.findings]
    if outcome.late:
        said.append(outcome.late)
    if not said:
        odd = [rank for rank, each in outcome.ended.items() if each.outcome == "failed"]
        said.append(f"{name_ranks(odd)} failed")
    for finding in outcome.findings:
        said += ["  ".join(row).rstrip() for row in finding.rows]
    said += ["  ".join(row) for row in outcome.rows]
    blamed = {rank for finding in outcome.findings if finding.check == END for rank in finding.ranks}
    texts: dict[str, list[int]] = {}
    for rank, each in sorted(outcome.ended.items()):
        if each.outcome == "failed" and (rank in blamed or not (outcome.findings or outcome.lost)):
            texts.setdefault(each.text, []).append(rank)
    for text, ranks in texts.items():
        said += ["", f"on {name_ranks(ranks)}:", text]
    return "\n".join(said)
