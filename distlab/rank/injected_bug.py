"""Which bug a run injects: the one that LAB_BUG names, or for mystery:7 one of those that its settings can show."""

import random

from distlab.config import Config
from distlab.contract import Mode
from distlab.report.mystery import mystery_number, seal_mistake


def bug_of(config: Config, mode: Mode) -> str | None:
    """The name of the injected bug, the same on every rank; None without one.

    The 7 of mystery:7 seeds the choice, so that a class finds the same bug, and a rerun repeats it.
    """
    number = mystery_number(config.bug)
    if number is None:
        return config.bug
    return random.Random(number).choice(showable(config, mode))


def showable(config: Config, mode: Mode) -> list[str]:
    """The bugs of a mode that a run with these settings can show, by name."""
    return sorted(name for name, mistake in mode.mistakes.items() if not mistake.hidden(mode, config))


def mistake_of(config: Config, mode: Mode) -> dict[str, str]:
    """What the records say of the injected bug, encoded where LAB_BUG is a mystery; empty without one."""
    name = bug_of(config, mode) or ""
    made = mode.mistakes.get(name)
    if made is None:
        return {}
    told = {"name": name, "what": made.what, "check": made.check}
    return told if config.bug == name else seal_mistake(config.bug or "", config.mode_name, told)
