"""A lap: wall and CPU seconds of what runs inside a block.

    with Lap() as lap: step()
    lap.wall_s, lap.cpu_s

CPU seconds are those of all threads of this process. They are read inside of the wall's, so that however a rank is
interrupted they are no more than cores x `wall_s`.
"""

import time
from types import TracebackType
from typing import Self


class Lap:
    """From `began_s` to `ended_s` of `time.perf_counter`."""

    __slots__ = ("_busy_s", "began_s", "cpu_s", "ended_s")

    def __enter__(self) -> Self:
        self.began_s = time.perf_counter()
        self._busy_s = time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cpu_s = time.process_time() - self._busy_s
        self.ended_s = time.perf_counter()

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.began_s
