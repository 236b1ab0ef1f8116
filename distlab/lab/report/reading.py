"""Records as lines of a file: one JSON object each, the type's name under "record" and the fields next to it.

Files are written completely or not at all; a broken one is rejected with its name and the line.
"""

import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from distlab.lab.config import Refusal
from distlab.lab.report.records import Ranks, Record

# Safe reading of files in a run's folder: only regular files up to a size, and never blocking.
#
# Anybody who can write to a folder of runs can put anything there: a pipe, on which open blocks, a link to an endless
# device, a folder, a file larger than memory. Each is an OSError at once, with a message that says what it is.


@contextmanager
def regular(path: Path, most_bytes: int) -> Iterator[BinaryIO]:
    """Open the file for reading; raises OSError if it is not regular, or larger than that."""
    _refuse(path, path.stat(), most_bytes)  # before the open, which has effects on a device
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _refuse(path, os.fstat(descriptor), most_bytes)
        yield file


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return its content, up to so many bytes if it grows meanwhile; raises OSError."""
    with regular(path, most_bytes) as file:
        return file.read(most_bytes)


def _refuse(path: Path, found: os.stat_result, most_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > most_bytes:
        why = f"it has {found.st_size} bytes, more than the limit of {most_bytes}"
        raise OSError(errno.EFBIG, why, str(path))


# JSON of a run's files: valid for every reader, and readable even if damaged.
#
# JSON has no infinite numbers or NaN, so they are written as {"float": "nan"}, "inf" or "-inf"; Python's own form, a
# bare NaN, is also read, since older files have it.

FLOAT, NOT_FINITE = "float", ("nan", "inf", "-inf")
LARGEST_BITS = 1023  # of an integer that fits in a float


def to_json(value: Any) -> str:
    """`value` as JSON on one line."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(replace_not_finite(value, lambda number: {FLOAT: str(number)}), allow_nan=False)


def from_json(content: str | bytes) -> Any:
    """Parse the output of `to_json`; half a surrogate pair becomes "?". Raises ValueError for anything but JSON."""
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(text, object_hook=_number, parse_int=_integer)
        if "\\ud" in text.lower():  # otherwise printing it would raise an error
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def replace_not_finite(value: Any, instead: Callable[[float], Any]) -> Any:
    """Return the value with each number that is not finite replaced by `instead` of it."""
    if isinstance(value, dict):
        return {key: replace_not_finite(entry, instead) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [replace_not_finite(entry, instead) for entry in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def _integer(digits: str) -> int:
    number = int(digits)
    if number.bit_length() > LARGEST_BITS:
        raise ValueError(f"an integer of {len(digits)} digits is too large for a float")
    return number


def _number(found: dict[str, Any]) -> Any:
    return float(found[FLOAT]) if found.keys() == {FLOAT} and found[FLOAT] in NOT_FINITE else found


MOST_RECORD_BYTES = 256 << 20  # of one rank's records: 1000 steps of 5 variants are some 100 kB
MAKE_ONE = "make one with ./run or `distlab run`"
# Raised when records that are each valid do not fit each other.
MISFITS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class BrokenRecord(Refusal):
    """A record file that cannot be read; the message has the file and the line."""


def to_line(record: Record) -> str:
    """Return the record as one line of JSON, without the newline."""
    return to_json(msgspec.to_builtins(record, enc_hook=plain_text))


def plain_text(value: Any) -> str:
    """Return a text of a subclass of str, such as torch's version, as str; raises TypeError for anything else."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a record has a value of type {type(value).__name__}")


def from_line(line: str | bytes, where: str = "record") -> Record:
    """Return the record that `to_line` wrote; raises BrokenRecord with a message that begins with `where`.

    A field with a default may be missing, so that older runs can be read.
    """
    try:
        record: Record = msgspec.convert(from_json(line), Record)
    except (ValueError, msgspec.ValidationError) as error:
        raise BrokenRecord(f"{where} is not a record of the lab ({error})") from None
    return record


def read_records(path: Path) -> list[Record]:
    """Return all records of one rank's file; raises BrokenRecord with file and line."""
    try:
        lines = read_regular(path, MOST_RECORD_BYTES).splitlines()
    except OSError as error:
        raise BrokenRecord(f"{path} cannot be read: {error.strerror}") from None
    return [from_line(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def read_run(run: Path) -> Ranks:
    """Return the records of every rank of a run, by rank; raises BrokenRecord if there are none."""
    if not run.is_dir():
        none_yet = "" if any(run.parent.glob("*/rank*.jsonl")) else f": there is none yet, {MAKE_ONE}"
        raise BrokenRecord(f"{run} is not the folder of a run{none_yet}")
    files = record_files(run)
    if not files:
        raise BrokenRecord(f"{run} has no rank<r>.jsonl: it is not the folder of a run")
    return {rank: read_records(path) for rank, path in files.items()}


def record_files(run: Path) -> dict[int, Path]:
    """Return the record files of each rank's last attempt, by rank."""
    named = [(re.fullmatch(r"rank(\d+)\.jsonl", path.name), path) for path in run.glob("rank*.jsonl")]
    return dict(sorted((int(found[1]), path) for found, path in named if found))


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Write a file so that readers see all of it or nothing, even if the writer dies."""
    write_bytes_atomically(path, "".join(lines).encode(errors="backslashreplace"))  # a file's name may be no text


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write bytes in the same way. Drafts have random names, since containers use equal process numbers."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError as error:
        error.filename = str(path)  # the error of a write to a full disk has no name
        raise
    finally:
        draft.unlink(missing_ok=True)
