"""The process in which someone's script runs, unchanged: as `__main__`, in its folder, with its words in sys.argv.

It is forked from an interpreter of its rank's (fork_servers.py), or from its doctor before that has any thread. All of
the lab's modules are forgotten before the script begins: one of its own may be called `workers` too. How it ended is
told and not printed: of ranks that fail because one has failed, the one is to be read. Then the process stays, its
connections open, until the doctor lets it go: who still waits for it goes on waiting, and is asked where.
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
from distlab.lab.config.user_code import heed_endings
from distlab.techniques.transport.store import HostedStore, KeyedStore, Prefixed
from distlab.tools.check.start.fork_servers import be_main_process, leave_to_others
from distlab.tools.check.watch import cuda_stand_in
from distlab.tools.check.watch.handles import Waits
from distlab.tools.check.watch.own_ranks import OwnRanks
from distlab.tools.check.watch.patches import Function, Patch, put
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.script_error import described, place_of
from distlab.tools.check.watch.telling import Telling, now
from distlab.tools.check.watch.watchers import recorded, watch_training

# The process tells its Python stacks to who asks (script_process.py).

ANSWERING = "answers"  # the name of the thread that does, at most 15 letters for the kernel
STACKS = signal.SIGRTMAX - 1 if sys.platform == "linux" else signal.SIGUSR2  # the last way to ask for them
END = "\n\n"


def answer(asked: int, stacks: int) -> None:
    """In the process under watch, once: whoever writes into the pipe `asked` gets its stacks from the pipe `stacks`.

    No thread of threading's, which the script would count and wait for.
    """
    faulthandler.register(STACKS, file=stacks, all_threads=True, chain=False)

    def answering() -> None:
        with suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(ANSWERING)
        while os.read(asked, 1):
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            os.write(stacks, END.encode())
        os.killpg(0, signal.SIGKILL)  # who asked is gone, and need not be the parent

    _thread.start_new_thread(answering, ())


# Where the ranks of a script meet: in a store of the lab's, with a key that their doctors have drawn.
#
# Left alone, `init_process_group` opens PyTorch's store on all addresses of the host, where anybody can list, read
# and write, and where forged bytes ended rank 0 by SIGSEGV (torch 2.13, once in the fuzz of ports). A store that a
# script opens by itself is its own, and so is that of an agent under torchrun.

AGAIN_S = 0.05


class Meeting:
    """The store of all ranks at MASTER_PORT, for those with `key`; `install` once."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._store: KeyedStore | None = None
        self._times = Counter[int]()  # by number of ranks

    def install(self) -> None:
        """Have `init_process_group` meet there."""
        # A function of torch.distributed's has the module's name.
        put(Patch(importlib.import_module("torch.distributed.rendezvous"), "_create_c10d_store", self._meet))

    def _meet(
        self, right: Function, host: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any
    ) -> dist.Store:
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if by_agent or port != int(os.environ["MASTER_PORT"]):
            store: dist.Store = right(host, port, rank, world_size, timeout, *more)
            return store
        return self._met(host, port, rank, world_size, timeout.total_seconds())

    def _met(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> dist.Store:
        """A store without keys: what a group before this one has left in it is under another prefix, and what one of
        fewer ranks has, which the others did not meet for."""
        self._times[world_size] += 1
        if self._store is None:
            self._store = self._opened(host, port, rank, timeout_s)
        return Prefixed(f"meeting {self._times[world_size]} of {world_size}", self._store)

    def _opened(self, host: str, port: int, rank: int, timeout_s: float) -> KeyedStore:
        """Rank 0 hosts it; the others wait until it listens. Raises DistNetworkError, as torch does."""
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
                    time.sleep(AGAIN_S)
        except (OSError, RuntimeError) as error:
            raise dist.DistNetworkError(f"no store at {host}:{port}: {error}") from None


PR_SET_PDEATHSIG = 1
OURS = ("distlab", "workers", "benchmarks", "tests")

STORE_KEY = "DISTLAB_STORE_KEY"  # what the doctor tells the process with its other variables
PROVING = "DISTLAB_PROVING"  # the same, of a script that is proven


class Job(NamedTuple):
    """What is run."""

    script: Path
    shown: str  # as it was typed
    words: Sequence[str]
    hang_after_s: float
    command: str = "check"
    every: int = 100  # LAB_CHECK_EVERY
    mesh: Sequence[tuple[str, int]] = ()  # LAB_MESH
    double: bool = False  # compute in float64, as far as torch's default type decides
    # What is done with the script: (job, telling, recorder, waits). None: it is run as `python SCRIPT WORDS` does.
    play: Callable[["Job", Telling, Recorder, Waits], None] | None = None
    module: str = ""  # the script's name where it was named by -m: it runs where the command was typed
    watch: Callable[[Recorder, str], Any] | None = None  # what else watches the script, with what it is told
    reruns: Callable[..., Any] | None = None  # what runs it again: on rank 0 alone, of (config, job, server)

    @property
    def typed(self) -> list[str]:
        """The script and its words, as they were typed."""
        return [*(["-m", self.module] if self.module else [self.shown]), *self.words]

    @property
    def folder(self) -> Path:
        """Where the script runs, and what it imports by name."""
        return Path.cwd() if self.module else self.script.parent


class Ends(NamedTuple):
    """One end of each of four pipes: what the script's process tells, where its stacks go, where it is asked for them,
    and what it waits at."""

    told: int
    stacks: int
    asked: int
    gate: int

    def close(self) -> None:
        for each in self:
            os.close(each)


def run_forked(job: Job, ends: Ends, doctors: Ends, doctor: int) -> None:
    """In a process that the doctor has forked from itself."""
    doctors.close()
    run(job, ends, doctor)


def run_served(job: Job, files: Sequence[Any]) -> None:
    """In a process of the rank's fork server; `files` are its ends of the pipes, and the doctor's streams."""
    told, stacks, asked, gate, *streams = (each.detach() for each in files)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    leave_to_others()
    run(job, Ends(told, stacks, asked, gate), os.getppid())


def run(job: Job, ends: Ends, parent: int) -> None:
    """Wait until the ranks have met, run the script, tell how it ended, wait to be let go."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(137)
    signal.signal(STACKS, signal.SIG_IGN)  # until there are stacks to show: left alone it kills
    os.setpgid(0, 0)  # so that what it starts ends with it
    variables = os.read(ends.gate, 65536)
    if not variables:  # there is no run
        os._exit(0)
    for line in variables.decode().splitlines():
        name, _, value = line.partition("=")
        os.environ[name] = value
    be_main_process()
    Meeting(bytes.fromhex(os.environ.pop(STORE_KEY))).install()
    telling = Telling(ends.told)
    recorder, waits = recorded(telling, job.folder, int(os.environ["MASTER_PORT"]))
    watch_training(recorder, job.every)
    OwnRanks(recorder).install()
    stand_in = cuda_stand_in.install(recorder, job.script)
    if job.watch is not None:
        job.watch(recorder, os.environ.pop(PROVING))
    play = job.play or partial(run_as_main, stand_in=stand_in)
    if job.play is None:  # a proof heeds by itself
        heed_endings(partial(tell_before, telling, recorder))
    answer(ends.asked, ends.stacks)
    telling.say("main", threading.get_ident())
    code = ended(partial(play, job, telling, recorder, waits), telling, recorder)
    waits.tell_sockets()
    flush_streams()
    telling.say("ended", code, now())
    os.read(ends.gate, 1)
    os._exit(code)


def flush_streams() -> None:
    """What was printed is there; a stream that the user's code has closed is opened anew, for whoever comes next."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            getattr(sys, name).flush()
        except Exception:
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def ended(play: Callable[[], None], telling: Telling, recorder: Recorder) -> int:
    """Run the script to its end, its threads and what it left for its exit too; its exit code."""
    try:
        play()
        code = 0
    except SystemExit as error:
        code = exit_code(error, telling)
    except BaseException as error:
        code = 1
        telling.say("raised", *described(error, recorder.places.kind), now())
    if code == 0:
        tell_end(recorder)
    recorder.forget()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the interpreter's end does
    atexit._run_exitfuncs()
    util._exit_function()  # type: ignore[attr-defined]  # ends what it started by multiprocessing
    return code


def tell_end(recorder: Recorder) -> None:
    """What is compared of scripts that end well."""
    for tell in recorder.at_end:
        with suppress(Exception):  # a module whose memory is gone
            tell()


def tell_before(telling: Telling, recorder: Recorder, call: str, place: str) -> None:
    """The script is about to end its process: what is compared at the end is told first; of a program that takes its
    place nothing is seen."""
    if call == "os._exit(0)":
        tell_end(recorder)
    elif call.startswith("os.exec"):
        telling.say("changed", f"the script becomes another program by {call} at {place}, which check does not see")


def enter(job: Job) -> None:
    """Stand where the script does: its folder, its words, a main process."""
    atexit._clear()  # what the doctor's process left there is not the script's
    folder = job.folder
    os.chdir(os.environ.pop("DISTLAB_FOLDER", str(folder)))
    sys.path.insert(0, str(folder))
    sys.argv = [str(job.script), *job.words]


def run_as_main(
    job: Job, telling: Telling, recorder: Recorder, waits: Waits, stand_in: cuda_stand_in.CudaStandIn | None  # noqa: ARG001
) -> None:  # fmt: skip
    """What `python SCRIPT WORDS` does, in the script's folder; twice where it wants a GPU that it is shown then."""
    program = compile(job.script.read_bytes(), str(job.script), "exec")
    kept = {} if job.watch is None else {"distlab": sys.modules["distlab"]}  # whose `batch` the script may call
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.modules.update(kept)
    enter(job)
    top = Path(__file__).parents[4]
    # A checkout holds `tests` and `workers` too, names that the script may have for itself; an installed package stands
    # in site-packages, which the script needs.
    hidden = ("", str(top)) if (top / "pyproject.toml").is_file() else ("",)
    sys.path[1:] = [each for each in sys.path[1:] if each not in hidden]
    left = None
    try:
        execute(program, job)
    except BaseException as error:
        left = error
    try:
        if stand_in is not None and stand_in.turns_away(left):
            execute(program, job)
        elif left is not None:
            raise left
    except Exception as error:
        if stand_in is not None:
            stand_in.refuse(error)
        raise


def execute(program: types.CodeType, job: Job) -> None:
    """The script as a new main module."""
    sys.argv = [str(job.script), *job.words]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(job.script), __builtins__=__builtins__, __cached__=None)
    if job.module:
        spec = importlib.util.find_spec(job.module)
        main.__dict__.update(__spec__=spec, __package__=spec and spec.parent)
    sys.modules["__main__"] = main
    exec(program, main.__dict__)


def exit_code(error: SystemExit, telling: Telling) -> int:
    """Of sys.exit(...): None is 0, a number itself, and a text is printed and 1."""
    if error.code is None or isinstance(error.code, int):
        code = error.code or 0
    else:
        with suppress(Exception):  # the script may have closed it
            print(error.code, file=sys.stderr)
        code = 1
    if code:
        telling.say("raised", "SystemExit", str(error.code), "", place_of(error), now())
    return code
