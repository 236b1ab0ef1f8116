"""Where in the source a call is made: the user's own line, the framework's call that it typed, and what lies below.

A frame belongs to the user unless its file is Python's, a package's or the lab's. Below the user's line stands the
innermost frame of a library that says more than torch.distributed's own functions do: `loss.backward()` made the
call, and autograd's engine in it, or fully_shard's all_gather. Of a framework (a package that is not torch) the
function that the user called says more than its innards: Trainer.train, Accelerator.gather_for_metrics; so does one of
torch.distributed's checkpoint, pipelining and tensor. Above the line stand the user's own callers, and a framework that
called it. A thread in which no line is the user's has the line that started it, or gave a pool's thread its task.
"""

import functools
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from distlab.tools.check.watch.patches import Function, Patch, before, put
from distlab.tools.check.watch.telling import Telling

CHECK = Path(__file__).parents[1]
LAB = f"{CHECK.parents[1]}/"  # distlab/
WRAPPERS, RUNNER = f"{CHECK}/", f"{CHECK}/start/script.py"  # what lies between a script's frames, and below them all
PACKAGES = ("site-packages/", "dist-packages/")
TORCH = tuple(f"{each}torch/" for each in PACKAGES)
PASSED_ON = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "torch/_ops.py",
    "-packages/typing_extensions.py",  # around functions that torch calls deprecated
)  # fmt: skip
OBJECTS = ("_object", "_object_list")  # the ends of torch.distributed's functions for Python objects
PARTS = tuple(f"torch/distributed/{each}/" for each in ("checkpoint", "pipelining", "tensor"))
ENGINE = "_engine_run_backward"
IN_A_THREAD = ", in a thread of its own"
MOST_CALLERS = 12  # frames of the user's

At = tuple[CodeType, int]


class Own(NamedTuple):
    """A frame of the user's, and the framework's function that it called on the way to the call."""

    code: CodeType
    line: int
    typed: CodeType | None


class Stack(NamedTuple):
    """What is told of a stack."""

    own: list[Own]
    below: At | None  # the innermost frame of a library
    named: CodeType | None  # torch.distributed's function that the user called, where that says more
    passed_on: str  # its function for Python objects


class Places:
    """Of one process; `folder` is the script's."""

    def __init__(self, telling: Telling, folder: Path) -> None:
        self._telling, self._folder = telling, folder
        paths = sysconfig.get_paths()
        self._libraries = tuple({f"{Path(paths[name])}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
        self._kinds: dict[str, str] = {}
        self._codes: dict[int, tuple[CodeType, str, bool]] = {}

    def install(self) -> None:
        """Know where threads are started."""

        def started(thread: threading.Thread, *_: Any, **__: Any) -> None:
            thread.__dict__["_distlab"] = self._starter(2)

        def submitted(submit: Function, pool: Any, task: Function, /, *args: Any, **named: Any) -> Any:
            starter = self._starter(2)

            def run(*args: Any, **named: Any) -> Any:
                threading.current_thread().__dict__["_distlab"] = starter
                return task(*args, **named)

            return submit(pool, run, *args, **named)

        put(Patch(threading.Thread, "start", before(started)), Patch(ThreadPoolExecutor, "submit", submitted))

    def _starter(self, depth: int) -> Stack:
        stack = self._stack(sys._getframe(depth))
        before: Stack | None = threading.current_thread().__dict__.get("_distlab")
        return stack if stack.own or before is None else before

    def here(self, depth: int = 1) -> tuple[int, bool]:
        """The number of the place that the caller's `depth`-th frame stands in, and whether the script itself called:
        no library but torch.distributed's own functions lies between."""
        stack = self._stack(frame_at(depth))
        starter: Stack | None = threading.current_thread().__dict__.get("_distlab")
        by_script = stack.below is None
        by_starter = starter is not None and not stack.own
        if starter is not None and by_starter:
            stack = starter._replace(below=starter.below or stack.below, named=starter.named or stack.named)
        at = tuple((each.code.co_filename, each.line, each.typed and name_of(each.typed)) for each in stack.own)
        below = (stack.below[0].co_filename, stack.below[1]) if stack.below else stack.passed_on
        key = at, below, stack.named, starter is not None, by_starter
        told = functools.partial(self._told, stack, starter is not None, by_starter)
        return self._telling.number("place", key, told), by_script

    def _stack(self, frame: FrameType | None) -> Stack:
        below: At | None = None
        typed: CodeType | None = None
        named: CodeType | None = None
        passed_on = ""
        own: list[Own] = []
        while frame is not None and len(own) < MOST_CALLERS:
            code = frame.f_code
            _, kind, named_by_users = self._codes.get(id(code)) or self._code(code)
            if kind == "user":
                own.append(Own(code, frame.f_lineno, typed))
                typed = None
            elif kind != "passed on":
                if not own and below is None:
                    below = code, frame.f_lineno
                if not own and kind == "library":
                    if named is not None and code.co_name == ENGINE:
                        named, below = None, (code, frame.f_lineno)
                    elif named_by_users:
                        named = code
                if kind == "framework" and (typed is None or "<locals>" not in name_of(code)):
                    typed = code
            elif own:
                if code.co_filename == RUNNER or (
                    code.co_filename.startswith(LAB) and not code.co_filename.startswith(WRAPPERS)
                ):
                    break  # who runs the script
            elif below is None and code.co_name.endswith(OBJECTS):
                passed_on = code.co_name
            frame = frame.f_back
        return Stack(own, below, named, passed_on)

    def _code(self, code: CodeType) -> tuple[CodeType, str, bool]:
        """What is known of a frame's code, and the code, so that its id stays its own. Looked up in each frame: by its
        file and name alone that took a step of fully_shard 4 % more time, and a code's own hash is one of all its
        constants."""
        found = self._codes[id(code)] = code, self.kind(code.co_filename), is_named(code)
        return found

    def _told(self, stack: Stack, in_thread: bool, by_starter: bool) -> list[Any]:
        """Line, what lies below, file, the framework's call typed there, the framework that called it, callers,
        whether it is in a thread that Python started, and the framework's package."""
        shown = self._shown(stack.below) or stack.passed_on
        if stack.named is not None:
            part = stack.named.co_filename.rpartition("torch/distributed/")[2].partition("/")[0]
            shown = f"torch.distributed.{part}.{name_of(stack.named)}"
        if by_starter:
            shown += IN_A_THREAD
        if not stack.own:
            return ["", shown, "", "", "", "", in_thread, ""]
        first, *callers = stack.own
        outer = next((each for each in callers if each.typed is not None), None)
        called_by = f"{name_of(outer.typed)} at {self._shown(outer[:2])}" if outer and outer.typed else ""
        lines = [self._shown(each[:2]) for each in callers if each.code.co_name != "<module>"]
        typed = name_of(first.typed) if first.typed is not None else ""
        called = " from ".join(lines)
        package = package_of(outer.typed if outer and outer.typed else first.typed)
        return [self._shown(first[:2]), shown, first.code.co_filename, typed, called_by, called, in_thread, package]

    def line_of(self, depth: int = 1) -> str:
        """The script's own line below the caller's `depth`-th frame, in words."""
        frame = frame_at(depth)
        while frame is not None and self.kind(frame.f_code.co_filename) != "user":
            frame = frame.f_back
        return self._shown((frame.f_code, frame.f_lineno) if frame is not None else None)

    def kind(self, file: str) -> str:
        """Whose file it is: "user", "framework", another "library", or "passed on" by what says nothing."""
        found = self._kinds.get(file)
        if found is None:
            package = any(each in file for each in PACKAGES)
            if file.startswith(LAB) or file.endswith(PASSED_ON):
                found = "passed on"
            elif package and not any(each in file for each in TORCH):
                found = "framework"
            elif package or file.startswith(("<", *self._libraries)):
                found = "library"
            else:
                found = "user"
            self._kinds[file] = found
        return found

    def _shown(self, at: At | None) -> str:
        if at is None:
            return ""
        path, line = Path(at[0].co_filename), at[1]
        if path.is_relative_to(self._folder) and self.kind(str(path)) == "user":
            return f"{path.relative_to(self._folder)}:{line}"
        for each in PACKAGES:
            if each in str(path):
                return f"{str(path).rpartition(each)[2]}:{line} ({at[0].co_name})"
        return f"{path.name}:{line} ({at[0].co_name})" if str(path).startswith(self._libraries) else f"{path}:{line}"


def frame_at(depth: int) -> FrameType | None:
    """The caller's `depth`-th frame. On a thread of C++'s own there may be none: a GPU has its backward passes on one,
    and whoever asked for the pass waits in autograd's engine meanwhile."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return next((frame for frame in sys._current_frames().values() if frame.f_code.co_name == ENGINE), None)


def package_of(code: CodeType | None) -> str:
    """The package that a function stands in; empty where it is none of a framework's."""
    for each in PACKAGES if code is not None else ():
        if code is not None and each in code.co_filename:
            return code.co_filename.rpartition(each)[2].partition("/")[0].removesuffix(".py")
    return ""


def name_of(code: CodeType) -> str:
    """Of a function, with its class."""
    named: Any = code
    return str(getattr(named, "co_qualname", code.co_name))


def is_named(code: CodeType) -> bool:
    """Whether it is a function of torch.distributed's that users know by its name."""
    if not any(each in code.co_filename for each in PARTS):
        return False
    return not any(each.startswith(("_", "<")) for each in name_of(code).split("."))
