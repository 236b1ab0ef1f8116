"""The magics: `%%ranks 4` runs a cell on ranks, `%ranks 8` starts new ones, `%ranks` lists them."""

import argparse
import re
import shlex
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import HTML, SVG, display

from distlab.lab.config import ConfigError
from distlab.lab.report.units import counted, human_bytes
from distlab.tools.notebook import output
from distlab.tools.notebook.session import MOST, Result, Session

SHOWS = ("wire", "timeline", "memory")


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, which a notebook shows as one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%ranks: {message}; {self.format_usage().strip()}")


def parser() -> Parser:
    options = Parser(prog="%%ranks", add_help=False)
    options.add_argument("count", nargs="?", type=number_of_ranks, help="number of ranks; default: as before, or 2")
    options.add_argument("--only", type=some_ranks, default=[], metavar="R,R", help="run the cell on these ranks only")
    options.add_argument(
        "--show", type=shows, default=[], metavar="WHAT,WHAT", help=f"measure the cell: {', '.join(SHOWS)}"
    )
    options.add_argument("--stop", action="store_true", help="end all ranks")
    return options


def number_of_ranks(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text) or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, allowed: 1 to {MOST}")
    return int(text)


def some_ranks(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, expected such as 0 or 0,2")
    return sorted({int(each) for each in text.split(",")})


def shows(text: str) -> list[str]:
    wrong = [each for each in text.split(",") if each not in SHOWS]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} cannot be shown, allowed: {', '.join(SHOWS)}")
    return text.split(",")


@magics_class
class RanksMagics(Magics):
    """The magics of one notebook, with its ranks."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.session = Session()

    @line_cell_magic("ranks")  # type: ignore[arg-type]
    def ranks(self, line: str, cell: str | None = None) -> None:
        """%%ranks [N] [--only R,R] [--show wire,timeline,memory] above a cell runs it on N ranks.

        Each rank keeps its names from cell to cell; there are rank, world_size, group, dist, torch and distlab. The
        value of the last expression is shown. N is needed once; another N starts new ranks, and so does `%ranks N`.
        `%ranks` lists the ranks, `%ranks --stop` ends them.
        """
        try:
            typed = parser().parse_args(shlex.split(line))
        except ValueError as error:  # an open quote
            raise UsageError(f"%%ranks: {error}") from None
        if cell is None:
            self._manage(typed)
        else:
            self._run(typed, cell)

    def _manage(self, typed: argparse.Namespace) -> None:
        if typed.stop:
            self.session.kill()
            print("no ranks")
        elif typed.count is not None:
            self._start(typed.count)
        else:
            print(self._status())

    def _start(self, count: int) -> None:
        began = time.monotonic()
        try:
            self.session.start(count)
        except ConfigError as error:
            raise UsageError(str(error)) from None
        print(f"{counted(count, 'ranks')} in {time.monotonic() - began:.1f} s")

    def _status(self) -> str:
        rows = [
            f"rank {rank}   process {pid}   {human_bytes(nbytes)}   {output.names(self.session.names.get(rank, []))}"
            if nbytes
            else f"rank {rank}   process {pid}   has exited: the next cell restarts it"
            for rank, (pid, nbytes) in enumerate(self.session.memory_bytes())
        ]
        return "\n".join(rows) or "no ranks: %ranks 4 starts four"

    def _run(self, typed: argparse.Namespace, cell: str) -> None:
        count = typed.count or self.session.world_size or 2
        if wrong := [rank for rank in typed.only if rank >= count]:
            raise UsageError(f"%%ranks: --only has rank {wrong[0]}, but the ranks are 0 to {count - 1}")
        if count != self.session.world_size:
            self._start(count)
        assert self.shell is not None
        number = len(self.shell.user_ns["In"]) - 1  # as shown next to the cell, however this IPython counts
        result = self.session.run_cell(number, cell, typed.only, measured=bool(typed.show))
        self._show(result, typed.show, cell)

    def _show(self, result: Result, requested: Sequence[str], cell: str) -> None:
        for line in output.outputs(result):
            print(line)
        for html, ranks in output.grouped({rank: each.html for rank, each in result.ended.items()}):
            display(HTML(f"<p>{output.name(ranks, len(result.outcome.printed))}</p>{html}"))  # type: ignore[no-untyped-call]
        if result.outcome.is_bad or result.interrupted:
            raise output.failure(result, cell)
        if result.restarted:
            print(output.restart_sentence(result.restarted))
        if "wire" in requested:
            print(output.wire_table(result))
        if "memory" in requested:
            print(output.memory_table(result))
        if "timeline" in requested:
            drawing = output.timeline(result)
            display(SVG(drawing)) if drawing else print("no rank communicated: there is no timeline")  # type: ignore[no-untyped-call]


def load(shell: Any) -> None:
    """Implement `%load_ext distlab`; a second time new ranks replace the old."""
    existing = shell.magics_manager.registry.get("RanksMagics")
    if existing is not None:
        existing.session.close()
    shell.register_magics(RanksMagics)
