"""`python -m distlab check` or `prove` without the report page, which takes a core for a second; other tests check it."""

import sys

from distlab.cli import check, prove
from distlab.lab.rank import finish

if __name__ == "__main__":
    finish.draw = lambda folder, page, timeout_s: True
    sys.exit({"check": check.main, "prove": prove.main}[sys.argv[1]](sys.argv[2:]))
