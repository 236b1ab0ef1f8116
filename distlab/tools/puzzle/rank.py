"""Run answers on a warm rank, each in its own process group, and count their calls."""

import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.lab.measure.storages import Storages
from distlab.lab.measure.traffic import NoDiagnostics, connections, nbytes_of, sent_by_call
from distlab.tools.check.watch.recorder import Call
from distlab.tools.check.watch.recorder import Group as GroupOfCalls
from distlab.tools.puzzle.task import CallRecord, Report
from distlab.tools.puzzle.tasks import TASKS
from distlab.tools.ranks import rank as ranks


class Job(NamedTuple):
    """An answer for one rank."""

    task: int
    file: str
    group: ranks.Group
    folder: str  # for files
    resumes: bool = False
    meters_memory: bool = False


@dataclass(frozen=True)
class Ended(ranks.RankResult):
    """How it ended on a rank; the report is pickled, since tensors would be sent as shared memory."""

    report: bytes = b""


class OnRank:
    """A task's tools on a rank (task.Bench)."""

    def __init__(self, rank: ranks.Rank, job: Job) -> None:
        assert dist.group.WORLD is not None
        self.rank, self.world_size, self.folder = rank.start.rank, job.group.world_size, job.folder
        self.group: dist.ProcessGroup = dist.group.WORLD
        self._recorder, self._store_port, self._meters_memory = rank.recorder, rank.start.port, job.meters_memory
        self._calls: list[CallRecord] = []
        self._wire_bytes: int | None = None
        self._storages = Storages()
        self._seen: dict[str, Any] = {}

    @contextmanager
    def measured(self) -> Iterator[None]:
        with self._recorder.unseen():
            dist.barrier(self.group)
        if self._meters_memory:  # the record of a call keeps its tensors for a while
            with self._recorder.unseen(), self._storages:
                yield
            return
        before = self._sent()
        self._recorder.on_call.append(self._on_call)
        try:
            yield
        finally:
            self._recorder.on_call.remove(self._on_call)
        after = self._sent()
        self._wire_bytes = None if before is None or after is None else after - before
        with self._recorder.unseen():
            dist.barrier(self.group)

    def num_calls(self) -> int:
        return len(self._calls)

    def note(self, name: str, value: Any) -> None:
        self._seen[name] = value

    def report(self, tensors: dict[str, Any]) -> Report:
        found = {name: None if each is None else each.detach().clone() for name, each in tensors.items()}
        return Report(found, self._calls, self._wire_bytes, self._storages.peak_bytes, self._seen)  # type: ignore[arg-type]

    def _sent(self) -> int | None:
        try:
            return sum(each.sent_bytes for each in connections(self._store_port).values())
        except NoDiagnostics:
            return None

    def _on_call(self, name: str, args: tuple[Any, ...], call: Call, group: GroupOfCalls) -> None:  # noqa: ARG002
        sent_bytes = 0.0
        if call.op not in ("recv", "barrier", "monitored_barrier"):
            whole = args[1] if call.op in ("reduce_scatter", "scatter", "gather", "all_to_all") else args[0]
            sent_bytes = sent_by_call(call.op, nbytes_of(whole), f"c10d::{name}", args, self.group)
        waits = any(each is False for each in args)  # its argument async_op
        self._calls.append(CallRecord(call.op, sent_bytes, self._recorder.places.line_of(2), waits))


def names_in(file: str) -> dict[str, Any]:
    """Return the names that a file defines; raises what the file raises."""
    module = types.ModuleType("answer")
    module.__file__ = file
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    return {name: each for name, each in vars(module).items() if not name.startswith("__")}


class Answers(ranks.Executor):
    """Runs tasks with answers, which are files of `start.folder`."""

    def __init__(self, rank: ranks.Rank) -> None:
        super().__init__(rank)
        sys.argv = [str(Path(rank.start.folder) / "answer")]  # where errors look for the user's lines

    def run(self, work: Job) -> Ended:
        self.rank.join(work.group)
        task = TASKS[work.task]
        bench = OnRank(self.rank, work)
        play = task.resume if work.resumes and task.resume is not None else task.play
        report = bench.report(play(types.SimpleNamespace(**names_in(work.file)), bench))
        return Ended("passed", report=pickle.dumps(report))

    def failed(self, error: BaseException) -> Ended:  # noqa: ARG002
        """Return no text: the coordinator reports exception and line."""
        return Ended("failed")
