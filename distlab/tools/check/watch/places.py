"""The place of a call in the source: the user's line, the framework's function called there, and the code below.

A frame is the user's unless its file is Python's, a package's or the lab's. Below the user's line, the innermost
informative library frame is reported: `loss.backward()` made the call, in autograd's engine, or fully_shard's
all_gather. For a framework (a package other than torch) the function that the user called is more informative than its
internals: Trainer.train, Accelerator.gather_for_metrics; the same holds for torch.distributed's checkpoint, pipelining
and tensor. Above the line are the user's own callers, and a framework that called it. A thread without a user's line
gets the line that started it, or that submitted its task to a pool.
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
from distlab.tools.check.watch.reporter import Reporter

CHECK = Path(__file__).parents[1]
LAB = f"{CHECK.parents[1]}/"  # distlab/
WRAPPERS, RUNNER = f"{CHECK}/", f"{CHECK}/start/script.py"  # between a script's frames, and below them all
PACKAGES = ("site-packages/", "dist-packages/")
TORCH = tuple(f"{each}torch/" for each in PACKAGES)
PASSED_ON = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "torch/_ops.py",
    "-packages/typing_extensions.py",  # around functions that torch has deprecated
)  # fmt: skip
OBJECTS = ("_object", "_object_list")  # suffixes of torch.distributed's functions for Python objects
PARTS = tuple(f"torch/distributed/{each}/" for each in ("checkpoint", "pipelining", "tensor"))
ENGINE = "_engine_run_backward"
IN_A_THREAD = ", in a thread of its own"
MOST_CALLERS = 12  # frames of the user

CodeLine = tuple[CodeType, int]


class UserFrame(NamedTuple):
    """A user's frame, and the framework's function that it called on the way to the call."""

    code: CodeType
    line: int
    called: CodeType | None


class Stack(NamedTuple):
    """The reported parts of a stack."""

    frames: list[UserFrame]
    below: CodeLine | None  # the innermost frame of a library
    api_code: CodeType | None  # the torch.distributed function that the user called, if more informative
    passed_on: str  # torch's function for Python objects


class Places:
    """The places of one process; `folder` is the script's."""

    def __init__(self, reporter: Reporter, folder: Path) -> None:
        self._reporter, self._folder = reporter, folder
        paths = sysconfig.get_paths()
        self._libraries = tuple({f"{Path(paths[name])}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
        self._kinds: dict[str, str] = {}
        self._codes: dict[int, tuple[CodeType, str, bool]] = {}

    def install(self) -> None:
        """Record where threads are started."""

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
        return stack if stack.frames or before is None else before

    def here(self, depth: int = 1) -> tuple[int, bool]:
        """Return the number of the place of the caller's `depth`-th frame, and whether the script itself called: no
        library except torch.distributed's own functions is in between."""
        stack = self._stack(frame_at(depth))
        starter: Stack | None = threading.current_thread().__dict__.get("_distlab")
        by_script = stack.below is None
        by_starter = starter is not None and not stack.frames
        if starter is not None and by_starter:
            stack = starter._replace(below=starter.below or stack.below, api_code=starter.api_code or stack.api_code)
        at = tuple((each.code.co_filename, each.line, each.called and name_of(each.called)) for each in stack.frames)
        below = (stack.below[0].co_filename, stack.below[1]) if stack.below else stack.passed_on
        key = at, below, stack.api_code, starter is not None, by_starter
        values = functools.partial(self._values, stack, starter is not None, by_starter)
        return self._reporter.number("place", key, values), by_script

    def _stack(self, frame: FrameType | None) -> Stack:
        below: CodeLine | None = None
        framework: CodeType | None = None
        api_code: CodeType | None = None
        passed_on = ""
        frames: list[UserFrame] = []
        while frame is not None and len(frames) < MOST_CALLERS:
            code = frame.f_code
            _, kind, named_by_users = self._codes.get(id(code)) or self._code(code)
            if kind == "user":
                frames.append(UserFrame(code, frame.f_lineno, framework))
                framework = None
            elif kind != "passed on":
                if not frames and below is None:
                    below = code, frame.f_lineno
                if not frames and kind == "library":
                    if api_code is not None and code.co_name == ENGINE:
                        api_code, below = None, (code, frame.f_lineno)
                    elif named_by_users:
                        api_code = code
                if kind == "framework" and (framework is None or "<locals>" not in name_of(code)):
                    framework = code
            elif frames:
                if code.co_filename == RUNNER or (
                    code.co_filename.startswith(LAB) and not code.co_filename.startswith(WRAPPERS)
                ):
                    break  # the code that runs the script
            elif below is None and code.co_name.endswith(OBJECTS):
                passed_on = code.co_name
            frame = frame.f_back
        return Stack(frames, below, api_code, passed_on)

    def _code(self, code: CodeType) -> tuple[CodeType, str, bool]:
        """Return cached data of a frame's code, with the code, so that its id stays unique. Looked up for each frame:
        by file and name a step of fully_shard took 4 % longer, and a code's hash covers all its constants."""
        found = self._codes[id(code)] = code, self.kind(code.co_filename), is_named(code)
        return found

    def _values(self, stack: Stack, in_thread: bool, by_starter: bool) -> list[Any]:
        """Return line, code below, file, framework call there, calling framework, callers, whether Python started the
        thread, and the framework's package."""
        below = self._format(stack.below) or stack.passed_on
        if stack.api_code is not None:
            part = stack.api_code.co_filename.rpartition("torch/distributed/")[2].partition("/")[0]
            below = f"torch.distributed.{part}.{name_of(stack.api_code)}"
        if by_starter:
            below += IN_A_THREAD
        if not stack.frames:
            return ["", below, "", "", "", "", in_thread, ""]
        first, *others = stack.frames
        outer = next((each for each in others if each.called is not None), None)
        called_by = f"{name_of(outer.called)} at {self._format(outer[:2])}" if outer and outer.called else ""
        lines = [self._format(each[:2]) for each in others if each.code.co_name != "<module>"]
        called = name_of(first.called) if first.called is not None else ""
        callers = " from ".join(lines)
        package = package_of(outer.called if outer and outer.called else first.called)
        return [self._format(first[:2]), below, first.code.co_filename, called, called_by, callers, in_thread, package]

    def line_of(self, depth: int = 1) -> str:
        """Return the script's own line below the caller's `depth`-th frame, in words."""
        frame = frame_at(depth)
        while frame is not None and self.kind(frame.f_code.co_filename) != "user":
            frame = frame.f_back
        return self._format((frame.f_code, frame.f_lineno) if frame is not None else None)

    def kind(self, file: str) -> str:
        """Return the owner of a file: "user", "framework", another "library", or "passed on" if uninformative."""
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

    def _format(self, at: CodeLine | None) -> str:
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
    """Return the caller's `depth`-th frame. A C++ thread may have none: a GPU's backward passes run on one, while the
    caller waits in autograd's engine."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return next((frame for frame in sys._current_frames().values() if frame.f_code.co_name == ENGINE), None)


def package_of(code: CodeType | None) -> str:
    """Return the package of a function; empty if it is not a framework's."""
    for each in PACKAGES if code is not None else ():
        if code is not None and each in code.co_filename:
            return code.co_filename.rpartition(each)[2].partition("/")[0].removesuffix(".py")
    return ""


def name_of(code: CodeType) -> str:
    """Return the name of a function, with its class."""
    qualified: Any = code
    return str(getattr(qualified, "co_qualname", code.co_name))


def is_named(code: CodeType) -> bool:
    """Return whether it is a torch.distributed function that users know by name."""
    if not any(each in code.co_filename for each in PARTS):
        return False
    return not any(each.startswith(("_", "<")) for each in name_of(code).split("."))
