"""Read the files of a hung job, recognised by their content: recorder dumps, Python stacks and logs.

A dump may come from anybody, so no code in it is run: the unpickler builds only dicts, lists, tuples, text, numbers and
None, and rejects files that name anything else. An unreadable file becomes one sentence, and the others are judged
without it. A file's rank is the number after "rank" in its name, else the last number in it.
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

NEWEST = (2, 10)  # the version that torch 2.13 writes; torch 2.5 wrote 2.4
MOST_FILES, MOST_RANKS, MOST_BYTES = 100_000, 1 << 15, 1 << 30
MOST_LOG_BYTES = 1 << 24  # the end of a log says how its rank ended
NO_RANK = "its name has no rank: expected a number, such as dump_3 or rank3.json"

Group = tuple[str, tuple[int, ...]]  # its description and its ranks


class Unreadable(Exception):
    """The file's content does not match its type; the text is the reason."""


class Dump(NamedTuple):
    """The content of one rank's flight recorder dump."""

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
    """A text file."""

    by_rank: dict[int, str]
    summary: str  # of a launcher, on how ranks ended


class PlainUnpickler(pickle.Unpickler):
    """Builds plain values only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise Unreadable(f"its pickle names {module}.{name}, but a dump has only dicts, lists, text and numbers")


def files_in(places: Iterable[Path]) -> list[Path]:
    """Return the named files, and those in the named folders."""
    found: list[Path] = []
    for place in places:
        inside = sorted(each for each in place.rglob("*") if each.is_file()) if place.is_dir() else [place]
        found += inside
    return found[:MOST_FILES]


def read(path: Path) -> Dump | Stacks | Log:
    """Return the file's content; raises Unreadable."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise Unreadable(f"it has {size} bytes, and at most {MOST_BYTES} are read")
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
    except Exception as error:  # of any type: the bytes are untrusted
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
    """Return the dump in a value; raises Unreadable."""
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
    """Return the ranks of a group, which a dump has as text of a list; none if it is not one."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
        return tuple(each for each in found if type(each) is int and 0 <= each < MOST_RANKS)
    except (ValueError, TypeError, RecursionError):
        return ()


def version_fault(version: str) -> str:
    """Return the remark on an unknown version of a dump; empty for a known one."""
    parts = re.fullmatch(r"(\d+)\.(\d+)", version)
    if parts and (2, 0) <= (int(parts[1]), int(parts[2])) <= NEWEST:
        return ""
    return f"version {version!r} is not one of 2.0 to {NEWEST[0]}.{NEWEST[1]}: it is read as if it were the newest"


def rank_of(path: Path) -> int:
    """Return the rank in the file's name, else the folder's, as in torchrun's log folders; raises Unreadable."""
    for name in (path.name.removesuffix(path.suffix) if not path.suffix[1:].isdigit() else path.name, path.parent.name):
        found = re.findall(r"rank[_\-. ]?(\d{1,6})(?!\d)", name) or re.findall(r"(?<!\d)(\d{1,6})(?!\d)", name)
        if found and int(found[-1]) < MOST_RANKS:
            return int(found[-1])
    raise Unreadable(NO_RANK)


# Stacks in the formats of faulthandler and py-spy.

FAULTHANDLER = re.compile(r'^  File "([^"]*)", line (\d+) in (.*)$', re.MULTILINE)
PY_SPY = re.compile(r"^    (\S.*) \((.+):(\d+)\)$", re.MULTILINE)
THREAD = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)


def python_stacks(text: str) -> list[list[Frame]]:
    """Return each thread's stack in the text; none if it has none."""
    found = []
    for part in THREAD.split(text)[1:]:
        frames = [Frame(file, int(line), name) for file, line, name in FAULTHANDLER.findall(part)]
        frames = frames or [Frame(in_package(file), int(line), name) for name, file, line in PY_SPY.findall(part)]
        found += [frames] if frames else []
    return found


def in_package(file: str) -> str:
    """Return the file with the libraries' folder, if py-spy names it only from its package on."""
    package = file.partition("/")[0].removesuffix(".py")
    if package in sys.stdlib_module_names:
        return f"/lib/python3/{file}"
    return f"site-packages/{file}" if package == "torch" else file


# Logs: of one rank, or of many, whose uncaught exceptions torch prefixes with "[rank3]: ".

OF_A_RANK = re.compile(r"^(?:\S*\s*)?\[rank(\d{1,6})\]:? ?(.*)$", re.MULTILINE)


def log_of(text: str, path: Path) -> Log:
    """Return the lines by rank; a file without prefixes belongs to the rank in its name, if there is one."""
    found: dict[int, list[str]] = {}
    for rank, line in OF_A_RANK.findall(text):
        found.setdefault(int(rank), []).append(line)
    by_rank = {rank: "\n".join(lines) for rank, lines in found.items()}
    if not found:
        with suppress(Unreadable):
            by_rank[rank_of(path)] = text
    return Log(by_rank, text if "exitcode" in text else "")
