"""The sections of rank 0's log, each told as soon as it is finished, from what all ranks have written until then.

Records go to rank 0 over the store, since nodes need not share a disk: at the end of a section each rank gives those
since the last one, some kilobytes, outside of all timed steps. What was told then is not told again at the end.
"""

from collections.abc import Iterable, Sequence

from workers.cluster.exchange import Exchange
from workers.report.journal import Journal
from workers.report.judge import judge
from workers.report.lines import from_line, to_line
from workers.report.log import SECTIONS, untold, words
from workers.report.records import Ranks


class Sections:
    """What rank 0 knows of all ranks so far, and the rows that it has told; every rank finishes the same sections."""

    def __init__(self, exchange: Exchange, journal: Journal, told: Iterable[str] = ()) -> None:
        """`told` are the rows that rank 0 has said before there were any sections."""
        self.exchange, self.journal = exchange, journal
        self.by_rank: Ranks = {}
        self.left: set[int] = set()  # the ranks that gave nothing any more
        self.told = {words(row) for row in told}
        self._last = ""  # the section that was told last
        self._given = 0

    def again(self) -> None:
        """Another rank collects from now on: it is given all that was ever written."""
        self.by_rank, self._given = {}, 0

    def finished(self, name: str, rows: Sequence[str] = ()) -> None:
        """Tell what is new in the section of this name in `log.SECTIONS`; all ranks call it together.

        `rows` are the first cells of all that the section will hold, where it is told row by row: columns stay in line.
        """
        if not self.bring(name):
            return
        new = untold(SECTIONS[name](judge(self.by_rank), self.by_rank, rows), self.told)
        for row in new:
            if name != self._last or words(row) not in self.told:  # a heading that stands above the rows before does
                self.journal.say(row)
                self.told.add(words(row))
        self._last = name if new else self._last

    def bring(self, name: str) -> bool:
        """Give rank 0 what was written since the last time; whether this is rank 0, which has it in `by_rank` now."""
        new = self.journal.records[self._given :]
        self._given += len(new)
        everyone = self.exchange.gather(name, [to_line(record) for record in new])
        for rank, lines in enumerate(everyone or []):
            if lines is None:
                self.left.add(rank)
            else:
                self.by_rank.setdefault(rank, []).extend(from_line(line) for line in lines)
        return everyone is not None
