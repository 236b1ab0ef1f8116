"""Exercises and demonstrations of the lessons: `distlab lesson` lists them, `distlab lesson exercise-1` does one.

An exercise writes its file, once; filled in, the same command runs it on real ranks and says what is wrong with it.
Exit codes: 0 right, or shown; 1 a wrong or unfinished exercise; 2 no such lesson.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from distlab.lab.config.settings import suggest
from distlab.lab.report.table import aligned

PRELOADED = ["distlab.tools.lessons.preloaded"]  # what each rank would import itself
LESSONS = {
    "exercise-1": "fill in: the mean gradient of two workers",
    "exercise-2": "fill in: accumulation, and the learning rate of a larger batch",
    "mini-challenge": "fill in: a step of synchronous data parallelism on three workers",
    "fork-bomb": "what a program without the __main__ guard starts, contained",
    "zombie": "what a child is that has ended and is not joined",
    "eight-gpus": "eight ranks that are three times as fast as one, and the ways out",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one lesson, or list all; returns the exit code."""
    made = argparse.ArgumentParser(prog="distlab lesson", description="Exercises and demonstrations of the lessons.")
    made.add_argument("name", nargs="?", metavar="NAME", help=", ".join(LESSONS))
    name = made.parse_args(arguments).name
    if name is None:
        print("\n".join(f"  {each:<16}{what}" for each, what in LESSONS.items()))
        return 0
    if name not in LESSONS:
        allowed = ", ".join(LESSONS)
        print(f"refused    {name!r} is not a lesson{suggest(name, list(LESSONS))}, allowed: {allowed}", file=sys.stderr)
        return 2
    if name in ("fork-bomb", "zombie", "eight-gpus"):
        for line in demonstrated(name):
            print(line, flush=True)
        return 0
    return exercise(name)


def demonstrated(name: str) -> Iterator[str]:
    """The lines of a demonstration."""
    from distlab.tools.lessons import eight_ranks, processes

    if name == "fork-bomb":
        yield from processes.fork_bomb()
    elif name == "zombie":
        yield from processes.zombie()
    else:
        from distlab.tools.testing.warm_ranks import Ranks

        ranks = Ranks(str(Path.cwd()), PRELOADED)
        try:
            yield from aligned(eight_ranks.HEAD, eight_ranks.rows(ranks))
        finally:
            ranks.close()


def exercise(name: str) -> int:
    """Write the file of an exercise where there is none; else try what it holds."""
    from distlab.tools.lessons.exercises import EXERCISES, place_of, tried

    file = place_of(name)
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(EXERCISES[name].text)
        print(f"written    {file}: fill in the gaps `...`, then run `distlab lesson {name}` again")
        return 1
    from distlab.tools.testing.warm_ranks import RankFailed, Ranks

    ranks = Ranks(str(Path.cwd()), PRELOADED)
    try:
        found = tried(name, file, ranks)
    except RankFailed as error:
        found = str(error).splitlines()
    finally:
        ranks.close()
    for sentence in found:
        print(f"wrong      {sentence}")
    if not found:
        print(f"right      {name}: every rank has the right result, with the lesson's numbers and with others")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
