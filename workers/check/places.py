"""Where in the source a call is made: the script's own line, and below it the hook or the library that made it.

A frame belongs to the user unless its file is Python's, a package's or the lab's. Below the user's line stands the
innermost frame of a library that says more than torch.distributed's own functions do: `loss.backward()` made the call,
and autograd's engine in it, or fully_shard's all_gather.
"""

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

from workers.check.telling import Telling

LAB = str(Path(__file__).parents[2] / "workers") + "/"
PACKAGES = ("site-packages/", "dist-packages/")
PASSED_ON = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "torch/_ops.py")


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
        below: tuple[CodeType, int] | None = None
        while frame is not None:
            kind = self.kind(frame.f_code.co_filename)
            if kind == "user":
                break
            if kind == "library" and below is None:
                below = frame.f_code, frame.f_lineno
            frame = frame.f_back
        user = (frame.f_code, frame.f_lineno) if frame is not None else None
        number = self._telling.number("place", (user, below), lambda: self._told(user, below))
        return number, below is None

    def _told(self, user: tuple[CodeType, int] | None, below: tuple[CodeType, int] | None) -> list[str]:
        return [self._shown(user), self._shown(below), user[0].co_filename if user else ""]

    def kind(self, file: str) -> str:
        """Whose file it is: "user", "library", or "passed on" by those whose frames say nothing."""
        found = self._kinds.get(file)
        if found is None:
            if file.startswith(LAB) or file.endswith(PASSED_ON):
                found = "passed on"
            elif file.startswith(("<", *self._libraries)) or any(each in file for each in PACKAGES):
                found = "library"
            else:
                found = "user"
            self._kinds[file] = found
        return found

    def _shown(self, at: tuple[CodeType, int] | None) -> str:
        if at is None:
            return ""
        path, line = Path(at[0].co_filename), at[1]
        if path.is_relative_to(self._folder):
            return f"{path.relative_to(self._folder)}:{line}"
        for each in PACKAGES:
            if each in str(path):
                return f"{str(path).rpartition(each)[2]}:{line} ({at[0].co_name})"
        return f"{path.name}:{line} ({at[0].co_name})" if str(path).startswith(self._libraries) else f"{path}:{line}"
