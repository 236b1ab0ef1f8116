"""Run `python -m workers` or `torchrun -m workers`: this rank, all ranks as local processes, or a command."""

import sys

from distlab.cli.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
