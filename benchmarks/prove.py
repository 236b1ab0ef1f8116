"""`distlab prove` over all planted and all right files: what was to be said, what was said, after how many seconds.

    python -m benchmarks.prove                          each bug on the ranks that show it, each right file on 1 to 8
    python -m benchmarks.prove bugs                     the bugs alone
    python -m benchmarks.prove right --ranks 3 5        right files on these numbers of ranks

Exit code 1 if a bug was named wrong or a right file was not left alone.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.check.cases import Checked
from tests.prove.planted import PLANTED, RIGHT
from tests.prove.test_bugs import prove

SHOWN = 150  # letters of what was said


def main(words: Sequence[str]) -> int:
    """Prove what is asked for; returns 1 if anything was told wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prove", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", default=["bugs", "right"], choices=["bugs", "right"], help="which files")
    parser.add_argument("--ranks", nargs="*", type=int, default=list(range(1, 9)), help="of the right files")
    asked = parser.parse_args(words)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        if "bugs" in asked.kinds:
            for planted in PLANTED:
                proven = prove(planted.name, planted.world_size, Path(folder))
                said = next((each for each in proven.sentences if planted.names in each), "")
                good = proven.code == 1 and all(word in said for word in planted.says)
                wrong += not good
                show(planted.issue, planted.name, planted.world_size, proven, said, good)
        if "right" in asked.kinds:
            for name in RIGHT:
                for world_size in asked.ranks:
                    proven = prove(f"right_{name}", world_size, Path(folder))
                    good = proven.code == 0 and not proven.sentences
                    wrong += not good
                    show("right", name, world_size, proven, "; ".join(proven.sentences) or "nothing", good)
    print(f"{wrong} told wrong")
    return 1 if wrong else 0


def show(kind: str, name: str, ranks: int, proven: Checked, said: str, good: bool) -> None:
    """A row."""
    short = said if len(said) <= SHOWN else f"{said[:SHOWN]}..."
    mark = "" if good else f"  WRONG: exit code {proven.code}"
    print(f"{kind:<31}{name:<19}{ranks}  {proven.seconds:5.1f} s  {short}{mark}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
