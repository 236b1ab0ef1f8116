"""The process in which someone's script runs, unchanged: as `__main__`, in its folder, with its words in sys.argv.

It is forked from its rank's doctor before that has any thread, so torch is imported once. All of the lab's modules are
forgotten before the script begins: one of its own may be called `workers` too. How it ended is told and not printed:
of ranks that fail because one has failed, the one is to be read. Then the process stays, its connections open, until
the doctor lets it go: who still waits for it goes on waiting, and is asked where.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import process, util
from pathlib import Path
from typing import Any, NamedTuple

from workers.check.handles import Handles
from workers.check.meeting import Meeting
from workers.check.places import Places
from workers.check.recording import Recorder
from workers.check.stacks import STACKS, answer
from workers.check.telling import Telling, now
from workers.check.training import Training
from workers.check.waits import Waits

PR_SET_PDEATHSIG = 1
OURS = ("workers", "experiments", "ranklab", "benchmarks", "tests")
MOST_FRAMES = 40

STORE_KEY = "RANKLAB_STORE_KEY"  # what the doctor tells the process with its other variables


class Job(NamedTuple):
    """What is run."""

    script: Path
    shown: str  # as it was typed
    words: Sequence[str]
    every: int  # LAB_CHECK_EVERY
    command: str = "check"
    # What is done with the script: (job, telling, recorder, waits). None: it is run as `python SCRIPT WORDS` does.
    play: Callable[["Job", Telling, Recorder, Waits], None] | None = None


class Ends(NamedTuple):
    """One end of each of four pipes: what the script's process tells, where its stacks go, where it is asked for them,
    and what it waits at."""

    told: int
    stacks: int
    asked: int
    gate: int

    def close(self) -> None:
        """They are the other process's."""
        for each in self:
            os.close(each)


def run(job: Job, ends: Ends, doctors: Ends, doctor: int) -> None:
    """In the forked process: wait until the ranks have met, run the script, tell how it ended, wait to be let go."""
    doctors.close()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != doctor:
            os._exit(137)
    signal.signal(STACKS, signal.SIG_IGN)  # until there are stacks to show: left alone it kills
    os.setpgid(0, 0)  # so that what it starts ends with it
    variables = os.read(ends.gate, 65536)
    if not variables:  # there is no run
        os._exit(0)
    for line in variables.decode().splitlines():
        name, _, value = line.partition("=")
        os.environ[name] = value
    Meeting(bytes.fromhex(os.environ.pop(STORE_KEY))).install()
    telling = Telling(ends.told)
    recorder, training, waits = watched(telling, job)
    answer(ends.asked, ends.stacks)
    telling.say("main", threading.get_ident())
    code = ended(job, telling, recorder, training, waits)
    waits.tell_sockets()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    telling.say("ended", code, now())
    os.read(ends.gate, 1)
    os._exit(code)


def watched(telling: Telling, job: Job) -> tuple[Recorder, Training, Waits]:
    """Put all that watches in its place."""
    recorder, waits = recorded(telling, job.script.parent, int(os.environ["MASTER_PORT"]))
    training = Training(recorder, job.every)
    training.install()
    return recorder, training, waits


def recorded(telling: Telling, folder: Path, store_port: int) -> tuple[Recorder, Waits]:
    """Put what watches calls, handles and waits in its place."""
    recorder = Recorder(telling, Places(telling, folder))
    recorder.install()
    Handles(recorder).install()
    waits = Waits(recorder, lambda sentence: telling.say("changed", sentence), store_port)
    waits.install()
    return recorder, waits


def ended(job: Job, telling: Telling, recorder: Recorder, training: Training, waits: Waits) -> int:
    """Run the script to its end, its threads and what it left for its exit too; its exit code."""
    try:
        (job.play or run_as_main)(job, telling, recorder, waits)
        code = 0
    except SystemExit as error:
        code = exit_code(error, telling)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        code = 1
        telling.say("raised", *described(error, job.script), now())
    if code == 0:
        with suppress(Exception):  # a module whose memory is gone
            training.tell_weights(-1)
        training.tell_device()
    recorder.forget()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the interpreter's end does
    atexit._run_exitfuncs()
    util._exit_function()  # type: ignore[attr-defined]  # ends what it started by multiprocessing
    return code


def enter(job: Job) -> None:
    """Stand where the script does: its folder, its words, a main process."""
    process._parent_process = None  # type: ignore[attr-defined]  # it is a main process
    atexit._clear()  # what the doctor's process left there is not the script's
    os.chdir(os.environ.pop("RANKLAB_FOLDER", str(job.script.parent)))
    sys.path.insert(0, str(job.script.parent))
    sys.argv = [str(job.script), *job.words]


def run_as_main(job: Job, telling: Telling, recorder: Recorder, waits: Waits) -> None:  # noqa: ARG001
    """What `python SCRIPT WORDS` does, in the script's folder."""
    source = job.script.read_bytes()
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    enter(job)
    top = str(Path(__file__).parents[2])
    sys.path[1:] = [each for each in sys.path[1:] if each not in ("", top)]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(job.script), __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    exec(compile(source, str(job.script), "exec"), main.__dict__)


def exit_code(error: SystemExit, telling: Telling) -> int:
    """Of sys.exit(...): None is 0, a number itself, and a text is printed and 1."""
    if error.code is None or isinstance(error.code, int):
        code = error.code or 0
    else:
        print(error.code, file=sys.stderr)
        code = 1
    if code:
        telling.say("raised", "SystemExit", str(error.code), "", place_of(error), now())
    return code


def described(error: BaseException, script: Path) -> list[Any]:
    """Its type, its words, its traceback from the script on, and the innermost line of the script's folder."""
    lines = traceback.format_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    first = next((index for index, each in enumerate(frames) if each.filename == str(script)), 0)
    shown = "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames[first:])[-MOST_FRAMES:]])
    if error.__cause__ is not None or error.__context__ is not None:
        shown = "".join(lines)
    else:
        shown += "".join(traceback.format_exception_only(error))
    return [type(error).__name__, str(error)[:2000], shown, place_of(error)]


def place_of(error: BaseException) -> str:
    """The innermost line that is no library's."""
    folder = str(Path(sys.argv[0]).parent)
    mine = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(folder)]
    mine = [each for each in mine if "site-packages/" not in each.filename]
    return f"{os.path.relpath(mine[-1].filename, folder)}:{mine[-1].lineno}" if mine else ""
