"""Check the text of variables beyond type and range: one sentence per fault, to follow the name and the value."""

import difflib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr

MOST_NAME_BYTES = 200  # of the 255 that a file system allows: drafts add a prefix and a suffix
MOST_HOST_LETTERS = 253  # RFC 1035, section 2.3.4
MODELS = ("line", "mlp", "gpt")
# Old variables and commands, with their replacements; `./run` reads these lines too.
GONE = {
    "LAB_LIVE": "the live page was removed: see a rank's log in the run's folder, and its report.html at the end",
    "LAB_LIVE_PORT": "the live page was removed: see a rank's log in the run's folder, and its report.html at the end",
    "LAB_TRACE": "steps are no longer profiled: report.html draws what each rank did when, and exports it for Perfetto",
    "LAB_CHECKPOINT_KEEP": "the two newest checkpoints are kept: copy the folder of any other that you want to keep",
    "LAB_CHECKPOINT_ASYNC": "a checkpoint is written before training continues; LAB_CHECKPOINT_EVERY sets how often",
    "LAB_THREADS": "set OMP_NUM_THREADS, which PyTorch reads too; if it is unset, a rank computes with one thread",
    "LAB_CPUS": "set cpus in your own Compose file, or slow one rank with LAB_SLOW_RANK",
    "LAB_CHUNKS": "a rank holds 2 stages in the interleaved schedules: set LAB_DEPTH for longer ones",
    "LAB_ROUTER_Z": "the router's z-loss has the fixed weight 0.001; LAB_BALANCE sets how the experts are balanced",
    "live": "the live page was removed: read each rank's log in the run's folder, and its report.html at the end",
    "LAB_OFFLOAD": "shards stay on the model's device: with more ranks (WORLD_SIZE) each stores less",
    "clean": "distlab report --clean DAYS lists the runs older than DAYS days, and asks before it removes them",
    "completion": "there is none any more: distlab --help lists commands and modes, docs/variables.md all variables",
    "config": "docs/variables.md lists all variables, and a run refuses invalid values before it starts",
    "lesson": "its exercises are distlab puzzle 21, 22 and 23, and its demonstrations the scripts of docs/examples/",
    "reveal": "bugs are no longer hidden: the log and the report name them, and distlab report RUN prints them again",
}
MIN_KEY = 16  # characters: a key that can be guessed is useless
MOST_KEY_BYTES = 2**16
LESSONS = "distlab.experiments"  # the package whose modules and packages are modes
EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def modes() -> list[str]:
    """Return the names of all modes: a file or a folder in experiments/ is a mode."""
    names = {path.stem for path in EXPERIMENTS.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(names - {"__init__", "__main__"})


def is_path(run_mode: str) -> bool:
    """Return whether RUN_MODE is the path of a lesson outside of experiments/."""
    return "/" in run_mode or run_mode.endswith(".py")


def lesson_file(run_mode: str) -> Path:
    """Return the file that makes the mode's object; it need not exist."""
    place = Path(run_mode) if is_path(run_mode) else EXPERIMENTS / run_mode
    if place.suffix == ".py":
        return place
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def mode_name(run_mode: str) -> str:
    """Return the mode's name, for headings and names of runs."""
    return Path(run_mode).stem if is_path(run_mode) else run_mode


def fault_of(check: Callable[[str], object], value: str) -> str:
    """Return the fault that `check` finds in `value`; empty if none."""
    try:
        check(value)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def known_mode(value: str) -> str:
    if is_path(value):
        if not _is_file(value):
            raise ValueError("does not exist: expected a Python file, or a folder with __init__.py in it")
        return run_name_of(value)
    if value not in modes():
        known = f"allowed: {', '.join(modes())}, or the path of a mode such as mine/mode.py"
        raise ValueError(f"is not a mode{suggest(value, modes())}, {known}")
    return value


def known_model(value: str) -> str:
    """Return a lab model's name, or FILE:name; only running the file shows whether it makes a model."""
    file, colon, name = value.rpartition(":")
    if not colon:
        if value not in MODELS:
            known = f"is not one of {', '.join(MODELS)}{suggest(value, MODELS)}"
            raise ValueError(f"{known}, nor FILE:name such as mine/model.py:model")
    elif not name.isidentifier() or not Path(file).is_file():
        raise ValueError("does not exist: expected FILE:name, a function in a Python file such as mine/model.py:model")
    return value


def _is_file(run_mode: str) -> bool:
    try:
        return lesson_file(run_mode).is_file()
    except (OSError, ValueError):  # a path too long for any file
        return False


def run_name_of(path: str) -> str:
    """Return the path itself, if its last part can name a run."""
    if not mode_name(path).isidentifier():
        raise ValueError(
            f"is not the name of a Python module: {mode_name(path)!r} may have only letters, digits and '_'"
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


def claim_run_id(runs: Path, mode: str) -> str:
    """Return mode and time, with a number if a run of this second has that folder.

    The folder is created here, which the file system permits one process only: two runs of one second get different
    names. If none can be created, the run reports why when it opens its folder.
    """
    name = f"{mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (f"{name}-{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if _is_made(runs / each) or not os.path.lexists(runs / each))


def _is_made(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
    except OSError:
        return False
    return True


def host_name(value: str) -> str:
    """Return a name or an address; only a connection shows whether it exists."""
    try:
        value.encode("idna")
    except UnicodeError:  # a part of more than 63 letters, or an empty one
        raise ValueError("is not the name or the address of a host") from None
    if len(value) > MOST_HOST_LETTERS or any(letter.isspace() or letter in "/@?#" for letter in value):
        raise ValueError("is not the name or the address of a host")
    return value


def key(value: SecretStr) -> SecretStr:
    if len(value.get_secret_value()) < MIN_KEY:
        raise ValueError(f"is too short for a key: expected at least {MIN_KEY} characters")
    return value


def read_key(path: Path) -> str:
    """Return the text of a key file, up to the file's size: nothing from files that generate their contents."""
    with path.open("rb") as file:
        num_bytes = min(os.fstat(file.fileno()).st_size, MOST_KEY_BYTES)  # 0 in /proc
        return file.read(num_bytes).decode(errors="surrogateescape").strip()


def key_file(value: Path) -> Path:
    try:
        if not value.is_file():
            raise ValueError("is not a file")
        words = read_key(value)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if len(words) < MIN_KEY:
        raise ValueError(f"has {len(words)} characters, too few for a key: expected at least {MIN_KEY}")
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
        raise ValueError("has a speed that is out of range: expected more than 0, up to 1")
    return value


def suggest(value: str, allowed: Sequence[str]) -> str:
    """Return the nearest of `allowed` as a question in brackets, or an empty text."""
    close = difflib.get_close_matches(value, allowed, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# Adjacent letters are adjacent keys on a keyboard.
KEYS = (
    "QWERTYUIOP ASDFGHJKL ZXCVBNM QAZ WSX EDC RFV TGB YHN UJM IK OL"
    " AW SE DR FT GY HU JI KO LP ZS XD CF VG BH NJ MK 0_ P_"
)


def one_typo_from(name: str) -> set[str]:
    """Return `name` with one typing error: two letters swapped, one left out, doubled, or replaced by an adjacent key.

    An added letter makes the name of something else, as in RUN_MODEL.
    """
    made = set()
    for at, letter in enumerate(name):
        before, after = name[:at], name[at + 1 :]
        beside = (key for key in set(KEYS) - {" "} if letter + key in KEYS or key + letter in KEYS)
        made |= {before + after[:1] + letter + after[1:], before + after, before + 2 * letter + after}
        made |= {before + key + after for key in beside}
    return made - {name}


# Describe a fault in the text of a variable in one sentence: its name, its value, and what is allowed.

SECRET = ("LAB_KEY",)
MOST_SHOWN = 120  # characters of a wrong value


def quoted(value: object) -> str:
    """Return a value in quotes, with invisible letters escaped, and shortened if it is long."""
    text = str(value)
    cut = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
    return repr(cut) + (f" ({len(text)} letters)" if cut != text else "")


def shorten_words(sentence: str) -> str:
    """Return the sentence with words longer than any path shortened: a mode may quote its own values."""
    return re.sub(r"\S{4096,}", lambda word: f"{word[0][:MOST_SHOWN]}...", sentence)


def named_value(name: str, value: object) -> str:
    """Return a variable with its value, except that of a key, since others may read the output."""
    return f"{name}=(not shown)" if name in SECRET else f"{name}={quoted(value)}"


def fault_sentence(fault: Any, text: str, field: Any) -> str:
    """Return one of pydantic's faults as a sentence; `given` is the text of the variable for pydantic's `field`."""
    value = named_value(field.alias, text)
    kind = fault["type"]
    if kind == "literal_error":
        allowed = [str(word) for word in field.annotation.__args__]
        return f"{value} is not one of {', '.join(allowed)}{suggest(text, allowed)}"
    if kind in ("int_parsing", "int_from_float"):
        return f"{value} is not a whole number"
    if kind in ("float_parsing", "finite_number"):
        return f"{value} is not a number"
    if kind == "bool_parsing":
        return f"{value} is neither 0 nor 1"
    if kind == "value_error":
        return f"{value} {fault['ctx']['error']}"
    if kind == "string_pattern_mismatch":
        return f"{value} is not a size such as 900m or 2g"
    bounds = _range(field)
    return f"{value} is out of range: expected {bounds}" if bounds else f"{value} is not {kind.split('_')[0]}"


def _range(field: Any) -> str:
    bounds = {key: getattr(rule, key) for rule in field.metadata for key in ("ge", "gt", "le") if hasattr(rule, key)}
    if "le" in bounds and "gt" in bounds:
        return f"more than {bounds['gt']}, up to {bounds['le']}"
    if "le" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    if "ge" in bounds:
        return f"at least {bounds['ge']}"
    return f"more than {bounds['gt']}" if "gt" in bounds else ""


# A mode's own variables and sizes: the class Options in the options.py of its folder.
#
#     class Options(ModeOptions):
#         sizes = {"width": 64}  # defaults of common variables that differ here
#         ratio: float = Field(0.01, alias="LAB_RATIO", gt=0, le=1, description="share of the gradients that are sent")
#
# Settings are checked before torch is imported, and a lesson imports torch. So options.py imports this file only,
# and is loaded without its package. `config.own(Options)` returns the values to the lesson. Common options of pipeline
# lessons are here once, as a base class.

__all__ = ["Field", "ModeOptions", "PipelineOptions", "aliases", "declared"]


class ModeOptions(BaseModel):
    """The variables of a single mode; frozen, each with an alias that begins with LAB_."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    sizes: ClassVar[Mapping[str, Any]] = {}  # by field of Config

    def untimed(self) -> Self:
        """Return the options for passes that measure no time; a mode with pretended compute omits it."""
        return self


class PipelineOptions(ModeOptions):
    """The options of pipelines only."""

    sleep_ms: float = Field(
        0, alias="LAB_SLEEP_MS", ge=0, le=60_000, allow_inf_nan=False,
        description="milliseconds that a rank sleeps per microbatch forward, as pretended compute; twice that backward",
    )  # fmt: skip

    def untimed(self) -> Self:
        """Return the options without pretended compute."""
        return self.model_copy(update={"sleep_ms": 0})


def declared(run_mode: str) -> type[ModeOptions]:
    """Return the class Options of a mode, ModeOptions if it has no options.py; raises any error of that file."""
    lesson = lesson_file(run_mode)
    file = lesson.with_name("options.py")
    if lesson.name != "__init__.py" or not file.is_file():
        return ModeOptions
    package = mode_name(run_mode) if is_path(run_mode) else f"{LESSONS}.{run_mode}"
    options: type[ModeOptions] = loaded(f"{package}.options", file).Options
    return options


def loaded(name: str, file: Path) -> ModuleType:
    """Return the module in this file, also registered for imports by its name; its package is not imported."""
    there = sys.modules.get(name)
    if there is not None and there.__file__ == str(file):
        return there
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def aliases(kind: type[BaseModel]) -> dict[str, str]:
    """Return the field of each variable."""
    return {field.alias: name for name, field in kind.model_fields.items() if field.alias}
