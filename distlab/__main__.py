"""The command `distlab`: `python -m workers` by another name, which alone prints its help."""

import sys

from distlab.cli.run import main as workers_main


def main() -> int:
    """Do what was typed; returns the exit code."""
    return workers_main(sys.argv[1:] or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
