"""The files that a job left behind, each recognized by its content: recorder dumps, Python stacks and logs.

A dump comes from someone else, so nothing of it is run: the unpickler builds dicts, lists, tuples, text, numbers and
None, and refuses a file that asks for anything with a name. A file that cannot be read is one sentence, and the others
are judged without it. The rank of a file is the number behind "rank" in its name, else the last number in it.
"""

import io
import json
import pickle
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from distlab.tools.check.judge.rank_state import Frame

NEWEST = (2, 10)  # the version of a dump that torch 2.13 writes; torch 2.5 wrote 2.4
MOST_FILES, MOST_RANKS, MOST_BYTES = 100_000, 1 << 15, 1 << 30
MOST_LOG_BYTES = 1 << 24  # the end of a log is what tells how its rank ended
NO_RANK = "its name has no rank: expected a number, such as dump_3 or rank3.json"

Group = tuple[str, tuple[int, ...]]  # its description and its ranks


class Unreadable(Exception):
    """A file that is not what its beginning says; the text is the reason."""


class Dump(NamedTuple):
    """What one rank's flight recorder wrote."""

    rank: int
    version: str
    entries: list[dict[str, Any]]
    groups: dict[str, Group]  # by torch's name
    written_s: float  # when the file was written


class Stacks(NamedTuple):
    """The stack of each thread of one rank, innermost frame first."""

    rank: int
    threads: list[list[Frame]]


class Log(NamedTuple):
    """A file of text."""

    by_rank: dict[int, str]
    summary: str  # of a launcher, which says how ranks ended


class PlainUnpickler(pickle.Unpickler):
    """Builds plain values alone."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise Unreadable(f"it asks for {module}.{name}, where a dump has only dicts, lists, text and numbers")


def files_in(places: Iterable[Path]) -> list[Path]:
    """The files that were named, and those in folders that were."""
    found: list[Path] = []
    for place in places:
        inside = sorted(each for each in place.rglob("*") if each.is_file()) if place.is_dir() else [place]
        found += inside
    return found[:MOST_FILES]


def read(path: Path) -> Dump | Stacks | Log:
    """What is in the file; raises Unreadable."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise Unreadable(f"it has {size} bytes, more than the {MOST_BYTES} that are read")
        data = path.read_bytes()
        written_s = path.stat().st_mtime
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    head = data[:64].lstrip()
    if not head:
        raise Unreadable("it is empty")
    if data[:1] == b"\x80":
        return dump_of(unpickled(data), path, written_s)
    if head[:1] in (b"{", b"["):
        return from_json(data, path, written_s)
    text = data[-MOST_LOG_BYTES:].decode(errors="replace")
    threads = python_stacks(text)
    return Stacks(rank_of(path), threads) if threads else log_of(text, path)


def unpickled(data: bytes) -> Any:
    try:
        return PlainUnpickler(io.BytesIO(data)).load()
    except Unreadable:
        raise
    except Exception as error:  # of any kind: the bytes are a stranger's
        raise Unreadable(f"its pickle cannot be read, so it may be cut off ({type(error).__name__})") from None


def from_json(data: bytes, path: Path, written_s: float) -> Dump | Stacks:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"its JSON cannot be read, so it may be cut off ({type(error).__name__})") from None
    if isinstance(value, list):  # of `py-spy dump --json`
        try:
            threads = [
                [Frame(in_package(each["filename"]), int(each["line"]), str(each["name"])) for each in thread["frames"]]
                for thread in value
            ]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Unreadable("it is a JSON list and no stacks of py-spy") from None
        return Stacks(rank_of(path), threads)
    return dump_of(value, path, written_s)


def dump_of(value: Any, path: Path, written_s: float) -> Dump:
    """The dump in what was read; raises Unreadable."""
    if not isinstance(value, dict) or not isinstance(value.get("entries", []), list) or "version" not in value:
        raise Unreadable("it is no dump of torch's flight recorder, which has a version and entries")
    entries = [each for each in value.get("entries", []) if isinstance(each, dict)]
    groups = {}
    configured = value.get("pg_config")
    for name, config in configured.items() if isinstance(configured, dict) else ():
        ranks = ranks_in(config.get("ranks")) if isinstance(config, dict) else ()
        if ranks:
            groups[str(config.get("name", name))] = str(config.get("desc", "")), ranks
    return Dump(rank_of(path), str(value["version"]), entries, groups, written_s)


def ranks_in(text: Any) -> tuple[int, ...]:
    """The ranks of a group, which a dump has as the text of a list; none where it is no list of ranks."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
        return tuple(each for each in found if type(each) is int and 0 <= each < MOST_RANKS)
    except (ValueError, TypeError, RecursionError):
        return ()


def version_fault(version: str) -> str:
    """What is to be said of a dump's version; empty where it is one that is known."""
    parts = re.fullmatch(r"(\d+)\.(\d+)", version)
    if parts and (2, 0) <= (int(parts[1]), int(parts[2])) <= NEWEST:
        return ""
    return f"version {version!r} is not one of 2.0 to {NEWEST[0]}.{NEWEST[1]}: it is read as if it were the newest"


def rank_of(path: Path) -> int:
    """By the file's name, else by the folder's, as torchrun names one for each rank's logs; raises Unreadable."""
    for name in (path.name.removesuffix(path.suffix) if not path.suffix[1:].isdigit() else path.name, path.parent.name):
        found = re.findall(r"rank[_\-. ]?(\d{1,6})(?!\d)", name) or re.findall(r"(?<!\d)(\d{1,6})(?!\d)", name)
        if found and int(found[-1]) < MOST_RANKS:
            return int(found[-1])
    raise Unreadable(NO_RANK)


# Stacks, as faulthandler and py-spy write them.

FAULTHANDLER = re.compile(r'^  File "([^"]*)", line (\d+) in (.*)$', re.MULTILINE)
PY_SPY = re.compile(r"^    (\S.*) \((.+):(\d+)\)$", re.MULTILINE)
THREAD = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)


def python_stacks(text: str) -> list[list[Frame]]:
    """Of each thread in the text; none where it is no such text."""
    found = []
    for part in THREAD.split(text)[1:]:
        frames = [Frame(file, int(line), name) for file, line, name in FAULTHANDLER.findall(part)]
        frames = frames or [Frame(in_package(file), int(line), name) for name, file, line in PY_SPY.findall(part)]
        found += [frames] if frames else []
    return found


def in_package(file: str) -> str:
    """The file with the folder of libraries, where py-spy names it from its package on."""
    package = file.partition("/")[0].removesuffix(".py")
    if package in sys.stdlib_module_names:
        return f"/lib/python3/{file}"
    return f"site-packages/{file}" if package == "torch" else file


# Logs: a file of a rank's own, or one of many ranks, whose uncaught exceptions torch writes behind "[rank3]: ".

OF_A_RANK = re.compile(r"^(?:\S*\s*)?\[rank(\d{1,6})\]:? ?(.*)$", re.MULTILINE)


def log_of(text: str, path: Path) -> Log:
    """The lines of each rank; a file without such lines is of the rank in its name, if there is one."""
    found: dict[int, list[str]] = {}
    for rank, line in OF_A_RANK.findall(text):
        found.setdefault(int(rank), []).append(line)
    by_rank = {rank: "\n".join(lines) for rank, lines in found.items()}
    if not found:
        with suppress(Unreadable):
            by_rank[rank_of(path)] = text
    return Log(by_rank, text if "exitcode" in text else "")
