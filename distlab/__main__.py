"""The command `distlab` (`python -m distlab`): without a word it prints its help, where `python -m workers` runs."""

import sys

from distlab.cli import run


def main() -> int:
    """Run the command that was typed; returns the exit code."""
    return run.main(sys.argv[1:] or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
