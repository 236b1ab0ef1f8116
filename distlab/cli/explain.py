"""Print a lesson without running it: the idea, its code, and the prediction for the given settings.

make explain RUN_MODE=dp WORLD_SIZE=3            the mode's docstring, its lesson.py, its predictions
make explain RUN_MODE=dp LAB_BUG=no_sampler      and what that injected bug breaks, and which check catches it
"""

import sys
from collections.abc import Sequence

from distlab.cli import prints_refusals
from distlab.contract import Mode
from distlab.lab.config import Config
from distlab.lab.config.settings import lesson_file
from distlab.lab.rank.mode_loader import PREDICTED, prediction_rows
from distlab.lab.report.table import aligned


def explain(config: Config, mode: Mode) -> list[str]:
    """Return the lines of the lesson; at the end its files."""
    settings = {"RUN_MODE": config.run_mode, "WORLD_SIZE": str(config.world_size)} | config.environ()
    text = lesson(config.run_mode)
    lines = [mode.idea, "", *([text, ""] if text else [])]
    lines += [f"With {', '.join(f'{name}={value}' for name, value in settings.items())}:", ""]
    lines += aligned(PREDICTED, prediction_rows(mode.all_predictions(mode.predict(config))))
    if config.bug is not None:
        mistake = mode.mistakes[config.bug]
        lines += ["", f"LAB_BUG={config.bug}: {mistake.what}. The check that catches it: {mistake.check}."]
        return lines + (diff(text, *mode.in_lesson[config.bug]) if config.bug in mode.in_lesson else [])
    if mode.mistakes:
        lines += ["", "Injected bugs (LAB_BUG), and the check that catches each:", *mistake_lines(mode)]
    if mode.reading:
        lines += ["", "Read it in this order:"]
        lines += [f"  {number}. {place}" for number, place in enumerate(mode.reading, 1)]
    return lines


def lesson(run_mode: str) -> str:
    """Return the mode's idea as a page of code, if it has one."""
    file = lesson_file(run_mode).with_name("lesson.py")
    return file.read_text().rstrip() if file.exists() else ""


def diff(text: str, right: str, wrong: str) -> list[str]:
    """Return the line of the lesson that the injected bug changes, before and after."""
    line = next(line for line in text.splitlines() if right in line)
    return ["", "In lesson.py:", "", f"-{line}", f"+{line.replace(right, wrong)}"]


def mistake_lines(mode: Mode) -> list[str]:
    """Return a row per injected bug of the mode."""
    rows = [[name, mistake.what, mistake.check] for name, mistake in mode.mistakes.items()]
    return aligned(["bug", "what breaks", "check"], rows)


@prints_refusals
def main(_: Sequence[str] = ()) -> int:
    """Print the lesson of RUN_MODE; returns the exit code."""
    from distlab.lab.rank.mode_loader import load_for, with_names_of_today
    from distlab.lab.rank.preflight import refuse

    config = Config.read()
    mode = load_for(config)
    config = with_names_of_today(config, mode)
    refuse(config, mode)
    print("\n".join(explain(config, mode)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
