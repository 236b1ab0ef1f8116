"""Where in the source a call is made: the user's own line, the framework's call that it typed, and what lies below.

A frame belongs to the user unless its file is Python's, a package's or the lab's. Below the user's line stands the
innermost frame of a library that says more than torch.distributed's own functions do: `loss.backward()` made the
call, and autograd's engine in it, or fully_shard's all_gather. Of a framework (a package that is not torch) the
function that the user called says more than its innards: Trainer.train, Accelerator.gather_for_metrics. Above the line
stand the user's own callers, and a framework that called it.
"""

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from distlab.check.telling import Telling

LAB = str(Path(__file__).parents[1]) + "/"
PACKAGES = ("site-packages/", "dist-packages/")
TORCH = tuple(f"{each}torch/" for each in PACKAGES)
PASSED_ON = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "torch/_ops.py")
OBJECTS = ("_object", "_object_list")  # the ends of torch.distributed's functions for Python objects
MOST_CALLERS = 12  # frames of the user's

At = tuple[CodeType, int]


class Own(NamedTuple):
    """A frame of the user's, and the framework's function that it called on the way to the call."""

    code: CodeType
    line: int
    typed: CodeType | None


class Places:
    """Of one process; `folder` is the script's."""

    def __init__(self, telling: Telling, folder: Path) -> None:
        self._telling, self._folder = telling, folder
        paths = sysconfig.get_paths()
        self._libraries = tuple({f"{Path(paths[name])}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
        self._kinds: dict[str, str] = {}

    def here(self, depth: int = 1) -> tuple[int, bool]:
        """The number of the place that the caller's `depth`-th frame stands in, and whether the script itself called:
        no library but torch.distributed's own functions lies between."""
        frame: FrameType | None = sys._getframe(depth)
        below: At | None = None
        typed: CodeType | None = None
        passed_on = ""
        own: list[Own] = []
        while frame is not None and len(own) < MOST_CALLERS:
            code = frame.f_code
            kind = self.kind(code.co_filename)
            if kind == "user":
                own.append(Own(code, frame.f_lineno, typed))
                typed = None
            elif kind != "passed on":
                if not own and below is None:
                    below = code, frame.f_lineno
                if kind == "framework" and (typed is None or "<locals>" not in name_of(code)):
                    typed = code
            elif own:
                if code.co_filename.startswith(LAB):
                    break  # who runs the script
            elif below is None and code.co_name.endswith(OBJECTS):
                passed_on = code.co_name
            frame = frame.f_back
        at = tuple((each.code.co_filename, each.line, each.typed and name_of(each.typed)) for each in own)
        key = at, (below[0].co_filename, below[1]) if below else passed_on
        return self._telling.number("place", key, lambda: self._told(own, below, passed_on)), below is None

    def _told(self, own: list[Own], below: At | None, passed_on: str) -> list[str]:
        """Line, what lies below, file, the framework's call typed there, the framework that called it, callers."""
        if not own:
            return ["", self._shown(below), "", "", "", ""]
        first, *callers = own
        outer = next((each for each in callers if each.typed is not None), None)
        called_by = f"{name_of(outer.typed)} at {self._shown(outer[:2])}" if outer and outer.typed else ""
        lines = [self._shown(each[:2]) for each in callers if each.code.co_name != "<module>"]
        typed = name_of(first.typed) if first.typed is not None else ""
        shown = self._shown(below) or passed_on
        return [self._shown(first[:2]), shown, first.code.co_filename, typed, called_by, " from ".join(lines)]

    def line_of(self, depth: int = 1) -> str:
        """The script's own line below the caller's `depth`-th frame, in words."""
        frame: FrameType | None = sys._getframe(depth)
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


def name_of(code: CodeType) -> str:
    """Of a function, with its class."""
    named: Any = code
    return str(getattr(named, "co_qualname", code.co_name))
