"""Records as lines of a file: a JSON object each, with the record's type name under "record" and its fields beside it.

Files are written whole or not at all, and one that is broken is refused with its name and the line.
"""

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from workers.report.json_text import from_json, to_json
from workers.report.records import Ranks, Record
from workers.report.regular import read_regular

MOST_BYTES = 256 << 20  # of one rank's records: 1000 steps of 5 variants are some 100 kB
# What records raise in those who draw them that are each right, and do not fit each other.
MISFITS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class BrokenRecord(Exception):
    """A record file that cannot be read; the message names the file and the line."""


def to_line(record: Record) -> str:
    """The record as one line of JSON, without the newline."""
    return to_json({"record": type(record).__name__.lower()} | msgspec.structs.asdict(record))


def from_line(line: str | bytes, where: str = "record") -> Record:
    """The record that `to_line` wrote; raises BrokenRecord that begins with `where`.

    A field with a default may be missing: a run from before there was such a field is still read.
    """
    try:
        record: Record = msgspec.convert(from_json(line), Record)
    except (ValueError, msgspec.ValidationError) as error:
        raise BrokenRecord(f"{where} is not a record of the lab ({error})") from None
    return record


def read(path: Path) -> list[Record]:
    """All records of one rank's file; raises BrokenRecord naming file and line."""
    try:
        lines = read_regular(path, MOST_BYTES).splitlines()
    except OSError as error:
        raise BrokenRecord(f"{path} cannot be read: {error.strerror}") from None
    return [from_line(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def read_run(run: Path) -> Ranks:
    """The records of every rank of a run, by rank; raises BrokenRecord if there are none."""
    if not run.is_dir():
        raise BrokenRecord(f"{run} is not the folder of a run")
    files = record_files(run)
    if not files:
        raise BrokenRecord(f"{run} holds no rank<r>.jsonl: it is not the folder of a run")
    return {rank: read(path) for rank, path in files.items()}


def record_files(run: Path) -> dict[int, Path]:
    """The records of each rank's last attempt, in the order of ranks."""
    named = [(re.fullmatch(r"rank(\d+)\.jsonl", path.name), path) for path in run.glob("rank*.jsonl")]
    return dict(sorted((int(found[1]), path) for found, path in named if found))


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Write a file so that a reader sees all of it or nothing, even if the writer dies."""
    write_bytes_atomically(path, "".join(lines).encode(errors="backslashreplace"))  # a file's name may be no text


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """The same for what is no text. A draft has a name of its own: containers number their processes alike."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
