"""`distlab check` over all planted and all right scripts: what was to be said, what was said, after how many seconds.

    python -m benchmarks.check                              each once
    python -m benchmarks.check right --times 10 --busy 2    no false alarm beside two busy loops
    python -m benchmarks.check cases --ranks 3 4            all of them on more ranks than they are written for, too
    python -m benchmarks.check dims fsdp                    these

Exit code 1 if a fault was named wrong or a right script was not left alone.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.check.cases import PLANTED, RIGHT, SCRIPTS, Checked, Planted, check, missed

KINDS = ("faults", "right")
SHOWN = 110  # letters of what was said
# Scripts whose shapes or lists are those of one number of ranks, or of which the sentence names all ranks.
OF_ONE_SIZE = frozenset({"dropout_seed", "mixed_up", "scheduler_on_0", "tp_samples", "zero_own_norm"})


class Row(NamedTuple):
    """One script: what was to be said, what was, and what of it is missing or too much."""

    kind: str
    name: str
    ranks: int
    wanted: str
    said: str
    seconds: float
    wrong: list[str]


def main(words: Sequence[str]) -> int:
    """Check what is asked for; returns 1 if anything was told wrong."""
    asked = parser().parse_args(words)
    for _ in range(asked.busy):
        multiprocessing.Process(target=burn, daemon=True).start()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in (row for _ in range(asked.times) for row in rows(asked.names, asked.ranks, Path(folder))):
            wrong += bool(row.wrong)
            mark = "" if not row.wrong else f"  WRONG: {', '.join(row.wrong)}"
            print(
                f"{row.kind:<7}{row.name:<20}{row.ranks}  {row.wanted:<34.34}  {row.seconds:5.1f} s  {row.said}{mark}",
                flush=True,
            )
    print(f"{wrong} told wrong")
    return 1 if wrong else 0


def rows(names: Sequence[str], sizes: Sequence[int], folder: Path) -> Iterator[Row]:
    """A row a run: of each script at its own number of ranks, or at each of `sizes` that it can have."""
    for planted in PLANTED:
        if wanted(names, "faults", planted.name):
            for each in at_sizes(planted, sizes):
                checked = check(SCRIPTS / "faults" / f"{each.name}.py", each.world_size, folder)
                wrong = missed(each, checked) + (
                    [] if checked.code == each.exit_code else [f"exit code {checked.code}"]
                )
                to_say = ", ".join([*each.says, *(f"rank {rank}" for rank in each.ranks)]) or "nothing"
                yield Row("fault", each.name, each.world_size, to_say, said(checked), checked.seconds, wrong)
    for name, own in RIGHT.items():
        if wanted(names, "right", name):
            for world_size in possible(name, own, sizes):
                checked = check(SCRIPTS / "right" / f"{name}.py", world_size, folder)
                wrong = [*checked.sentences, *checked.questions]
                wrong += [f"exit code {checked.code}"] if checked.code else []
                yield Row("right", name, world_size, "nothing", said(checked), checked.seconds, wrong)


def at_sizes(planted: Planted, sizes: Sequence[int]) -> Iterator[Planted]:
    """The fault as it is to be told on so many ranks: which of them are at fault, and at which call, depends on it."""
    for world_size in possible(planted.name, planted.world_size, sizes):
        as_written = world_size == planted.world_size
        yield planted if as_written else replace(planted, world_size=world_size, ranks=(), number=None)


def possible(name: str, own: int, sizes: Sequence[int]) -> list[int]:
    """Of `sizes` those that the script can have; its own where none is asked for."""
    return [each for each in sizes if each == own or (each > own and name not in OF_ONE_SIZE)] if sizes else [own]


def wanted(names: Sequence[str], kind: str, name: str) -> bool:
    """Whether a script is among those asked for; all are where none is named."""
    return not names or "cases" in names or kind in names or name in names


def said(checked: Checked) -> str:
    """What was found or asked, shortened."""
    # What differs before who hangs because of it: which of the two is told first is a matter of moments.
    sentences = sorted(checked.sentences, key=lambda sentence: "the calls do not match" in sentence)
    first = next(iter([*sentences, *checked.questions]), "nothing")
    return first if len(first) <= SHOWN else f"{first[: SHOWN - 3]}..."


def burn() -> None:
    """A busy loop; it ends with this program."""
    while True:
        time.monotonic()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.check", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("names", nargs="*", help="scripts, or 'faults', 'right' or 'cases' (all)")
    made.add_argument("--ranks", type=int, nargs="*", default=[], help="on so many ranks each (its own number)")
    made.add_argument("--times", type=int, default=1, help="how often each (1)")
    made.add_argument("--busy", type=int, default=0, help="busy loops beside them (0)")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
