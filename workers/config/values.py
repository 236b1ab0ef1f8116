"""What the text of a variable may be where a type and a range do not say it: a sentence on all else, after its name and
value."""

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import SecretStr

MOST_NAME_BYTES = 200  # of 255 that a file system allows: drafts put a prefix and an ending to it
MOST_HOST_LETTERS = 253  # RFC 1035, section 2.3.4
MODELS = ("line", "mlp", "gpt")
MIN_KEY = 16  # characters: a word that can be guessed is no key
LESSONS = "experiments"  # the package, a module or a package in which is a mode
EXPERIMENTS = Path(__file__).parents[2] / LESSONS


def modes() -> list[str]:
    """The names of all modes: a file or a folder in experiments/ is a mode."""
    names = {path.stem for path in EXPERIMENTS.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(names - {"__init__", "__main__"})


def is_path(run_mode: str) -> bool:
    """Whether RUN_MODE is the path of a lesson outside of experiments/."""
    return "/" in run_mode or run_mode.endswith(".py")


def lesson_file(run_mode: str) -> Path:
    """The file in which the mode's object is made; it need not exist."""
    place = Path(run_mode) if is_path(run_mode) else EXPERIMENTS / run_mode
    if place.suffix == ".py":
        return place
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def mode_name(run_mode: str) -> str:
    """The mode's name, for headings and names of runs."""
    return Path(run_mode).stem if is_path(run_mode) else run_mode


def fault_of(check: Callable[[str], object], value: str) -> str:
    """What `check` says against `value`; empty if nothing."""
    try:
        check(value)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def known_mode(value: str) -> str:
    if is_path(value):
        if not _is_file(value):
            raise ValueError("is not there: allowed is a Python file, or a folder with __init__.py in it")
        return run_name_of(value)
    if value not in modes():
        known = f"allowed: {', '.join(modes())}, or the path of a mode such as mine/mode.py"
        raise ValueError(f"is not a mode{suggest(value, modes())}, {known}")
    return value


def known_model(value: str) -> str:
    """One of the lab's, or FILE:name; whether the file makes a model is found out by running it."""
    file, colon, name = value.rpartition(":")
    if not colon:
        if value not in MODELS:
            known = f"is not one of {', '.join(MODELS)}{suggest(value, MODELS)}"
            raise ValueError(f"{known}, nor FILE:name such as mine/model.py:model")
    elif not name.isidentifier() or not Path(file).is_file():
        raise ValueError("is not there: allowed is FILE:name, a function of a Python file such as mine/model.py:model")
    return value


def _is_file(run_mode: str) -> bool:
    try:
        return lesson_file(run_mode).is_file()
    except (OSError, ValueError):  # a path too long for any file
        return False


def run_name_of(path: str) -> str:
    """The path itself, if a run can be named by its last part."""
    if not mode_name(path).isidentifier():
        raise ValueError(
            f"is no name of a Python module: {mode_name(path)!r} has to be a word of letters, digits and '_'"
        )
    if len(mode_name(path).encode()) > MOST_NAME_BYTES - len("-20260131-235959"):
        raise ValueError("has a name that is too long for the folder of a run")
    return path


def run_name(value: str) -> str:
    if value in (".", "..", "latest") or not all(letter.isalnum() or letter in "._-" for letter in value):
        raise ValueError("is not a run id: allowed are letters, digits, '.', '_' and '-', and not 'latest'")
    if len(value.encode()) > MOST_NAME_BYTES:
        raise ValueError(f"is too long for the name of a folder: allowed are up to {MOST_NAME_BYTES} bytes")
    return value


def host_name(value: str) -> str:
    """A name or an address; whether anybody answers to it is found out by asking."""
    try:
        value.encode("idna")
    except UnicodeError:  # a part of more than 63 letters, or none
        raise ValueError("is not the name or the address of a host") from None
    if len(value) > MOST_HOST_LETTERS or any(letter.isspace() or letter in "/@?#" for letter in value):
        raise ValueError("is not the name or the address of a host")
    return value


def key(value: SecretStr) -> SecretStr:
    if len(value.get_secret_value()) < MIN_KEY:
        raise ValueError(f"is too short for a key: allowed is {MIN_KEY} characters and more")
    return value


def key_file(value: Path) -> Path:
    try:
        words = value.read_text(errors="surrogateescape").strip() if value.is_file() else None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if words is None:
        raise ValueError("is not a file")
    if len(words) < MIN_KEY:
        raise ValueError(f"holds {len(words)} characters, too few for a key: allowed is {MIN_KEY} and more")
    return value


def rate(value: str) -> str:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?[kmg]bit", value):
        raise ValueError("is not a rate such as 500kbit, 100mbit or 2gbit")
    if not float(value[:-4]):
        raise ValueError("would let nothing through, allowed: more than 0")
    return value


def delay(value: str) -> str:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?(us|ms|s)", value):
        raise ValueError("is not a delay such as 500us, 5ms or 1s")
    return value


def slow_rank(value: str) -> str:
    rank, colon, share = value.partition(":")
    number = r"[0-9]{1,9}(\.[0-9]{1,9})?|\.[0-9]{1,9}"
    if not (colon and re.fullmatch("[0-9]{1,9}", rank) and re.fullmatch(number, share)):
        raise ValueError("is not a rank and its share of speed, such as 2:0.5")
    if not 0 < float(share) <= 1:
        raise ValueError("has a speed out of range: allowed is more than 0, up to 1")
    return value


def suggest(value: str, allowed: Sequence[str]) -> str:
    """The nearest of `allowed` as a question in brackets, or nothing."""
    close = difflib.get_close_matches(value, allowed, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
