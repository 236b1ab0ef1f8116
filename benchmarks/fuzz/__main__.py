"""`python -m benchmarks.fuzz NAME ...`: the fuzz of that name, or without one the names that there are."""

import importlib
import pkgutil
import sys
from collections.abc import Sequence

from benchmarks import fuzz


def main(words: Sequence[str]) -> int:
    """Run the fuzz that the first word names with the other words; returns its exit code, 2 for an unknown one."""
    names = sorted(module.name for module in pkgutil.iter_modules(fuzz.__path__) if not module.name.startswith("_"))
    if not words or words[0] not in names:
        print(f"usage: python -m benchmarks.fuzz NAME, where NAME is one of {', '.join(names)}")
        return 2
    return int(importlib.import_module(f"benchmarks.fuzz.{words[0]}").main(words[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
