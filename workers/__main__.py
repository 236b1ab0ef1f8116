"""A rank, or all of them as local processes: `python -m workers`, `torchrun -m workers`; with words the command."""

import sys

from distlab.cli.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
