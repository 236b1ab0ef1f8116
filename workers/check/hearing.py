"""What a doctor hears of a process: the lines that it tells, and how it is where it tells nothing."""

import json

from workers.check.bedside import Bedside
from workers.check.telling import now

LOOK_S = 0.5  # between two looks at the process
SILENT_S = 0.6  # after so long without a word its stacks are looked at
STACKS_AGAIN_S = 1.0


class Hearing:
    """Of one process; what is seen of it is a line like those that it tells."""

    def __init__(self, bedside: Bedside) -> None:
        self.bedside = bedside
        self._heard_at = now()
        self._looked_at = self._stacked_at = 0.0
        self._gone_told = False

    def lines(self, at_most_s: float) -> list[bytes]:
        """What was told within so many seconds, and seen."""
        lines = self.bedside.hear(at_most_s)
        time_s = now()
        if lines:
            self._heard_at = time_s
        if time_s - self._looked_at > LOOK_S:
            self._looked_at = time_s
            look = self.bedside.look()
            if look is not None:
                lines.append(json.dumps(["look", *look, time_s]).encode())
        silent = time_s - self._heard_at > SILENT_S
        if silent and time_s - self._stacked_at > STACKS_AGAIN_S and self.bedside.process.exitcode is None:
            self._stacked_at = time_s
            stacks = self.bedside.stacks()
            lines.append(json.dumps(["stacks", {str(thread): frames for thread, frames in stacks.items()}]).encode())
        if self.bedside.process.exitcode is not None and not self._gone_told and not lines:
            self._gone_told = True
            lines.append(json.dumps(["gone", self.bedside.process.exitcode]).encode())
        return lines
