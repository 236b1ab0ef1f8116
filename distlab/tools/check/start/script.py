"""The process of a user's script, which runs unchanged: as `__main__`, in its folder, with its arguments in sys.argv.

It is forked from its rank's interpreter (fork_servers.py), or from its supervisor before that has any thread. All of
the lab's modules are removed before the script begins, which may have a module called `workers` too. Its end is
reported, not printed: if one failure makes other ranks fail, only that one is shown. Then the process stays, with its
connections open, until the supervisor releases it: ranks that wait for it still wait, and can be asked where.
"""

import _thread
import atexit
import ctypes
import faulthandler
import importlib.util
import os
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.lab.cluster.address import listening_socket, resolve
from distlab.lab.config.user_code import observe_exits
from distlab.techniques.transport.store import HostedStore, KeyedStore, Prefixed
from distlab.tools.check.start.fork_servers import be_main_process, drop_server_pipe
from distlab.tools.check.watch import cuda_stand_in
from distlab.tools.check.watch.handles import Waits
from distlab.tools.check.watch.patches import Function, Patch, put
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.reporter import Reporter, now
from distlab.tools.check.watch.script_error import describe_error, place_of
from distlab.tools.check.watch.spawned_ranks import SpawnedRanks
from distlab.tools.check.watch.watchers import install_recorder, watch_training

# The process sends its Python stacks on request (script_process.py).

ANSWERING = "answers"  # the answering thread's name, at most 15 letters for the kernel
STACKS = signal.SIGRTMAX - 1 if sys.platform == "linux" else signal.SIGUSR2  # the last way to request them
END = "\n\n"


def answer_stack_requests(requests: int, stacks: int) -> None:
    """Start once, in the watched process: a write to the pipe `requests` is answered by its stacks in pipe `stacks`.

    It uses no thread of threading, which the script would count and wait for.
    """
    faulthandler.register(STACKS, file=stacks, all_threads=True, chain=False)

    def answering() -> None:
        with suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(ANSWERING)
        while os.read(requests, 1):
            os.write(stacks, (stacks_of_all_threads() + END).encode(errors="replace"))
        os.killpg(0, signal.SIGKILL)  # the requester has exited, and may not be the parent

    _thread.start_new_thread(answering, ())


def stacks_of_all_threads() -> str:
    """Return the stack of each thread as faulthandler writes it, the innermost frame first.

    faulthandler.dump_traceback takes no lock on the list of threads. When gloo's thread enters Python at that moment,
    it reads a thread state that has no frame yet, and the process ends by SIGSEGV: fully_shard on 3 ranks, asked 2,000
    times a second, crashed within 120 s in each of 3 runs (Python 3.11.7). sys._current_frames takes that lock.
    """
    return "".join(
        f"Thread 0x{thread:016x} (most recent call first):\n{stack_of(frame)}\n"
        for thread, frame in sys._current_frames().items()
    )


def stack_of(frame: types.FrameType | None) -> str:
    """Return a line for each frame, from this one to its outermost caller."""
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)


# The store of a script's ranks: one of the lab's, with a key that the supervisors have drawn.
#
# `init_process_group` alone opens PyTorch's store on all addresses of the host, where anybody can list, read and write,
# and where forged bytes ended rank 0 by SIGSEGV (torch 2.13, once in the fuzz of ports). A store that a script opens
# itself is its own, and so is the agent's under torchrun.

RETRY_S = 0.05


class ScriptStore:
    """The store of all ranks at MASTER_PORT, for ranks with `key`; `install` once."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._store: KeyedStore | None = None
        self._times = Counter[int]()  # by number of ranks

    def install(self) -> None:
        """Make `init_process_group` use this store."""
        # A torch.distributed function looks like one of its module.
        put(Patch(importlib.import_module("torch.distributed.rendezvous"), "_create_c10d_store", self._create_store))

    def _create_store(
        self, original: Function, host: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any
    ) -> dist.Store:
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if by_agent or port != int(os.environ["MASTER_PORT"]):
            store: dist.Store = original(host, port, rank, world_size, timeout, *more)
            return store
        return self._group_store(host, port, rank, world_size, timeout.total_seconds())

    def _group_store(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> dist.Store:
        """Return a store without keys: an earlier group's keys have another prefix, and so have those of fewer
        ranks."""
        self._times[world_size] += 1
        if self._store is None:
            self._store = self._open(host, port, rank, timeout_s)
        return Prefixed(f"meeting {self._times[world_size]} of {world_size}", self._store)

    def _open(self, host: str, port: int, rank: int, timeout_s: float) -> KeyedStore:
        """Open it: rank 0 hosts it, the others wait until it listens. Raises DistNetworkError, as torch does."""
        deadline = time.monotonic() + timeout_s
        try:
            address = resolve(host, timeout_s, print)
            if rank == 0:
                return HostedStore(listening_socket(address, port), self._key, timeout_s)
            while True:
                try:
                    return KeyedStore(address.ip, port, self._key, timeout_s)
                except ConnectionRefusedError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(RETRY_S)
        except (OSError, RuntimeError) as error:
            raise dist.DistNetworkError(f"no store at {host}:{port}: {error}") from None


PR_SET_PDEATHSIG = 1
OURS = ("distlab", "workers", "benchmarks", "tests")

STORE_KEY = "DISTLAB_STORE_KEY"  # set for the process by its supervisor
PROVING = "DISTLAB_PROVING"  # the same, if the script is proven


class Job(NamedTuple):
    """The script and how to run it."""

    script: Path
    shown: str  # as typed by the user
    words: Sequence[str]
    hang_after_s: float
    command: str = "check"
    every: int = 100  # LAB_CHECK_EVERY
    mesh: Sequence[tuple[str, int]] = ()  # LAB_MESH
    double: bool = False  # use float64 as torch's default dtype
    # How to run the script: (job, reporter, recorder, waits). None: as `python SCRIPT WORDS` does.
    runner: Callable[["Job", Reporter, Recorder, Waits], None] | None = None
    module: str = ""  # the script's name if given by -m: it runs in the current folder
    watch: Callable[[Recorder, str], Any] | None = None  # another observer of the script, with its argument
    reruns: Callable[..., Any] | None = None  # runs it again, only on rank 0, with (config, job, server)

    @property
    def typed(self) -> list[str]:
        """Return the script and its arguments, as typed."""
        return [*(["-m", self.module] if self.module else [self.shown]), *self.words]

    @property
    def folder(self) -> Path:
        """Return the folder in which the script runs and from which it imports."""
        return Path.cwd() if self.module else self.script.parent


class Ends(NamedTuple):
    """One end of each of four pipes: for the script's reports, for its stacks, for requests of these, and for its start
    and end."""

    reports: int
    stacks: int
    requests: int
    gate: int

    def close(self) -> None:
        for each in self:
            os.close(each)


def run_forked(job: Job, ends: Ends, supervisor_ends: Ends, supervisor: int) -> None:
    """Run in a process that the supervisor has forked from itself."""
    supervisor_ends.close()
    run(job, ends, supervisor)


def run_served(job: Job, files: Sequence[Any]) -> None:
    """Run in a process of the rank's fork server; `files` are its pipe ends and the supervisor's streams."""
    reports, stacks, requests, gate, *streams = (each.detach() for each in files)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    drop_server_pipe()
    run(job, Ends(reports, stacks, requests, gate), os.getppid())


def run(job: Job, ends: Ends, parent: int) -> None:
    """Wait until the ranks have met, run the script, report its end, wait to be released."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(137)
    signal.signal(STACKS, signal.SIG_IGN)  # until stacks can be sent: by default it kills
    os.setpgid(0, 0)  # so that processes it starts end with it
    variables = os.read(ends.gate, 65536)
    if not variables:  # the run was cancelled
        os._exit(0)
    for line in variables.decode().splitlines():
        name, _, value = line.partition("=")
        os.environ[name] = value
    be_main_process()
    ScriptStore(bytes.fromhex(os.environ.pop(STORE_KEY))).install()
    reporter = Reporter(ends.reports)
    recorder, waits = install_recorder(reporter, job.folder, int(os.environ["MASTER_PORT"]))
    watch_training(recorder, job.every)
    SpawnedRanks(recorder).install()
    stand_in = cuda_stand_in.install(recorder, job.script)
    if job.watch is not None:
        job.watch(recorder, os.environ.pop(PROVING))
    runner = job.runner or partial(run_as_main, stand_in=stand_in)
    if job.runner is None:  # a proof does this itself
        observe_exits(partial(report_before_exit, reporter, recorder))
    answer_stack_requests(ends.requests, ends.stacks)
    reporter.send("main", threading.get_ident())
    code = run_to_end(partial(runner, job, reporter, recorder, waits), reporter, recorder)
    waits.report_sockets()
    flush_streams()
    reporter.send("ended", code, now())
    os.read(ends.gate, 1)
    os._exit(code)


def flush_streams() -> None:
    """Flush all output; a stream that the user's code has closed is reopened for later output."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            getattr(sys, name).flush()
        except Exception:
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def run_to_end(runner: Callable[[], None], reporter: Reporter, recorder: Recorder) -> int:
    """Run the script to its end, with its threads and exit handlers; return its exit code."""
    try:
        runner()
        code = 0
    except SystemExit as error:
        code = exit_code(error, reporter)
    except BaseException as error:
        code = 1
        reporter.send("raised", *describe_error(error, recorder.places.kind), now())
    if code == 0:
        report_at_end(recorder)
    recorder.forget()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the interpreter's end does
    atexit._run_exitfuncs()
    util._exit_function()  # type: ignore[attr-defined]  # ends what it started by multiprocessing
    return code


def report_at_end(recorder: Recorder) -> None:
    """Report what is compared for scripts that end well."""
    for report in recorder.at_end:
        with suppress(Exception):  # a module whose memory was freed
            report()


def report_before_exit(reporter: Reporter, recorder: Recorder, call: str, place: str) -> None:
    """Report what is compared at the end, before the script ends its process itself; a program that replaces it is not
    observed."""
    if call == "os._exit(0)":
        report_at_end(recorder)
    elif call.startswith("os.exec"):
        reporter.send("changed", f"the script runs another program by {call} at {place}, which check does not observe")


def enter_script(job: Job) -> None:
    """Take the script's place: its folder, its arguments, a main process."""
    atexit._clear()  # exit handlers of the supervisor's process
    folder = job.folder
    os.chdir(os.environ.pop("DISTLAB_FOLDER", str(folder)))
    sys.path.insert(0, str(folder))
    sys.argv = [str(job.script), *job.words]


def run_as_main(
    job: Job, reporter: Reporter, recorder: Recorder, waits: Waits, stand_in: cuda_stand_in.CudaStandIn | None  # noqa: ARG001
) -> None:  # fmt: skip
    """Run like `python SCRIPT WORDS`, in the script's folder; twice if it needs a GPU that it is shown then."""
    program = compile(job.script.read_bytes(), str(job.script), "exec")
    kept = {} if job.watch is None else {"distlab": sys.modules["distlab"]}  # the script may call its `batch`
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.modules.update(kept)
    enter_script(job)
    top = Path(__file__).parents[4]
    # A checkout has `tests` and `workers` too, names that the script may use; an installed package is in site-packages,
    # which the script needs.
    hidden = ("", str(top)) if (top / "pyproject.toml").is_file() else ("",)
    sys.path[1:] = [each for each in sys.path[1:] if each not in hidden]
    failure = None
    try:
        execute(program, job)
    except BaseException as error:
        failure = error
    try:
        if stand_in is not None and stand_in.prepare_rerun(failure):
            execute(program, job)
        elif failure is not None:
            raise failure
    except Exception as error:
        if stand_in is not None:
            stand_in.refuse(error)
        raise


def execute(program: types.CodeType, job: Job) -> None:
    """Run the script as a new main module."""
    sys.argv = [str(job.script), *job.words]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(job.script), __builtins__=__builtins__, __cached__=None)
    if job.module:
        spec = importlib.util.find_spec(job.module)
        main.__dict__.update(__spec__=spec, __package__=spec and spec.parent)
    sys.modules["__main__"] = main
    exec(program, main.__dict__)


def exit_code(error: SystemExit, reporter: Reporter) -> int:
    """Return the exit code of sys.exit(...): 0 for None, a number itself, and 1 for a text, which is printed."""
    if error.code is None or isinstance(error.code, int):
        code = error.code or 0
    else:
        with suppress(Exception):  # the script may have closed it
            print(error.code, file=sys.stderr)
        code = 1
    if code:
        reporter.send("raised", "SystemExit", str(error.code), "", place_of(error), now())
    return code
