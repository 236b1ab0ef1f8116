"""`python -m workers`, `torchrun -m workers`: this rank, or all ranks as local processes; with words, that command."""

import sys

from distlab.cli.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
