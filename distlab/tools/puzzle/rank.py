"""One warm rank that runs answers: each in a process group of its own, its calls told to the doctor and counted."""

import datetime
import os
import pickle
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.lab.measure.storages import Storages
from distlab.lab.measure.traffic import NoDiagnostics, connections, nbytes_of, sent_by_call
from distlab.techniques.transport.store import KeyedStore
from distlab.tools.check.start.script import flush_streams
from distlab.tools.check.watch.recorder import Call, Group, Recorder
from distlab.tools.check.watch.script_error import described
from distlab.tools.check.watch.telling import Telling, now
from distlab.tools.check.watch.watchers import recorded
from distlab.tools.puzzle.task import Made, Report
from distlab.tools.puzzle.tasks import TASKS
from distlab.tools.testing import processes
from distlab.tools.testing.processes import Start, at_home

STORE_S = 60.0
GROUP_S = 60.0  # longer than any try


class Job(NamedTuple):
    """An answer for one rank."""

    task: int
    file: str
    world_size: int
    folder: str  # for files
    number: int = 0  # of the job in this pool: its process group's keys begin with it
    resumes: bool = False
    meters_memory: bool = False


@dataclass(frozen=True)
class Ended(processes.Ended):
    """How it ended on a rank; the report is pickled, for tensors would travel as shared memory."""

    report: bytes = b""
    line: str = ""  # of the answer, where it raised


class OnRank:
    """What a task has on a rank (task.Bench)."""

    def __init__(self, rank: int, job: Job, recorder: Recorder, store_port: int) -> None:
        assert dist.group.WORLD is not None
        self.rank, self.world_size, self.folder = rank, job.world_size, job.folder
        self.group: dist.ProcessGroup = dist.group.WORLD
        self._recorder, self._store_port, self._meters_memory = recorder, store_port, job.meters_memory
        self._made: list[Made] = []
        self._wire_bytes: int | None = None
        self._storages = Storages()
        self._seen: dict[str, Any] = {}

    @contextmanager
    def measured(self) -> Iterator[None]:
        with self._recorder.unseen():
            dist.barrier(self.group)
        if self._meters_memory:  # a call that is recorded keeps its tensors for a while
            with self._recorder.unseen(), self._storages:
                yield
            return
        before = self._sent()
        self._recorder.on_call.append(self._take)
        try:
            yield
        finally:
            self._recorder.on_call.remove(self._take)
        after = self._sent()
        self._wire_bytes = None if before is None or after is None else after - before
        with self._recorder.unseen():
            dist.barrier(self.group)

    def num_calls(self) -> int:
        return len(self._made)

    def note(self, name: str, value: Any) -> None:
        self._seen[name] = value

    def report(self, tensors: dict[str, Any]) -> Report:
        found = {name: None if each is None else each.detach().clone() for name, each in tensors.items()}
        return Report(found, self._made, self._wire_bytes, self._storages.peak_bytes, self._seen)  # type: ignore[arg-type]

    def _sent(self) -> int | None:
        try:
            return sum(each.sent_bytes for each in connections(self._store_port).values())
        except NoDiagnostics:
            return None

    def _take(self, name: str, args: tuple[Any, ...], call: Call, group: Group) -> None:  # noqa: ARG002
        sent_bytes = 0.0
        if call.op not in ("recv", "barrier", "monitored_barrier"):
            whole = args[1] if call.op in ("reduce_scatter", "scatter", "gather", "all_to_all") else args[0]
            sent_bytes = sent_by_call(call.op, nbytes_of(whole), f"c10d::{name}", args, self.group)
        waits = any(each is False for each in args)  # its argument async_op
        self._made.append(Made(call.op, sent_bytes, self._recorder.places.line_of(2), waits))


def names_in(file: str) -> dict[str, Any]:
    """What a file of functions defines, by name; raises what the file raises."""
    module = types.ModuleType("answer")
    module.__file__ = file
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    return {name: each for name, each in vars(module).items() if not name.startswith("__")}


def serve(start: Start, files: Sequence[Any], control: Connection) -> None:
    """Run what comes until nothing does; `start.files` is the folder of the answers."""
    telling = Telling(at_home(start, files))
    folder = Path(start.files[0])
    sys.argv = [str(folder / "answer")]  # where errors look for the user's lines
    recorder, _ = recorded(telling, folder, start.port)
    store = KeyedStore("127.0.0.1", start.port, start.key, STORE_S)
    control.send(None)
    while (job := control.recv()) is not None:
        recorder.anew()
        telling.say("main", threading.get_ident())
        ended = run(start, job, store, telling, recorder)
        flush_streams()
        telling.say("ended", int(ended.outcome == "failed"), now())
        control.send(ended)
    os._exit(0)


def run(start: Start, job: Job, store: dist.Store, telling: Telling, recorder: Recorder) -> Ended:
    """Join the others, play the task, and leave them."""
    task = TASKS[job.task]
    try:
        with recorder.unseen():
            begin(start, job, store)
        bench = OnRank(start.rank, job, recorder, start.port)
        play = task.resume if job.resumes and task.resume is not None else task.play
        report = bench.report(play(types.SimpleNamespace(**names_in(job.file)), bench))
        recorder.forget()
        with recorder.unseen():
            dist.destroy_process_group()
    except BaseException as error:
        kind, words, text, line = described(error, recorder.places.kind)
        telling.say("raised", kind, words, text, line, now())
        return Ended("failed", f"{kind}: {words}" if words else kind, line=line)
    return Ended("passed", report=pickle.dumps(report))


def begin(start: Start, job: Job, store: dist.Store) -> None:
    os.environ.update(RANK=str(start.rank), LOCAL_RANK=str(start.rank), WORLD_SIZE=str(job.world_size))
    bound = datetime.timedelta(seconds=GROUP_S)
    keys = dist.PrefixStore(f"job{job.number}", store)
    dist.init_process_group("gloo", store=keys, rank=start.rank, world_size=job.world_size, timeout=bound)
    dist.barrier()
