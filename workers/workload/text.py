"""The text that gpt reads: bytes of real files, no download.

By default the sources of Python's own standard library, which every image has; LAB_TEXT names a file or a folder
instead. Files are read in sorted order and cut at `MAX_BYTES`, so that every rank sees the same bytes in well under
0.3 s. Regular files alone are read: a pipe or a device waits, never ends, or gives each rank another text. `refusals`
answers before the ranks join whether there is anything to read, and `digest` is what ranks compare.
"""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from workers.config import Config
from workers.config.sentences import shown
from workers.workload.own import reads_text

MAX_BYTES = 4 * 2**20  # 20 steps of 16 samples of 64 bytes read 20 KiB: more text only costs time
MAX_ENTRIES = 20_000  # of a folder, until MAX_BYTES are read: a tree without end is said, and not walked


class NoText(Exception):
    """What LAB_TEXT names cannot be read; the sentence goes on after its value."""


def read(config: Config) -> bytes:
    """The first MAX_BYTES of the text; raises OSError where a file cannot be read, NoText where nothing should be."""
    text = bytearray()
    for path in _files(config.text):
        text += _regular_bytes(path, MAX_BYTES - len(text))
        if len(text) == MAX_BYTES:
            break
    return bytes(text)


def digest(config: Config) -> str:
    """The sha256 of the text, which all ranks need alike; empty where none can be read."""
    try:
        return hashlib.sha256(read(config)).hexdigest()
    except (OSError, NoText):
        return ""


def refusals(config: Config) -> list[str]:
    """A sentence if LAB_TEXT cannot be read or holds less than one sample (LAB_SEQ bytes and the one that follows)."""
    if not reads_text(config.model):
        return []
    named = f"LAB_TEXT={shown(config.text)}"
    try:
        num_bytes = len(read(config))
    except FileNotFoundError:
        return [f"{named} does not exist: name a file or a folder that every rank can read"]
    except NoText as error:
        return [f"{named} {error}"]
    except OSError as error:
        return [f"{named} cannot be read: {error.strerror}: {shown(error.filename)}"]
    where = "the standard library" if config.text is None else named
    if num_bytes == 0:
        return [f"{where} is empty: name a file or a folder with text"]
    if num_bytes <= config.seq:
        needed = config.seq + 1
        return [f"{where} holds {num_bytes} bytes, and a sample of LAB_SEQ={config.seq} needs {needed} or more"]
    return []


def _files(text: Path | None) -> Iterator[Path]:
    if text is None:
        yield from sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif stat.S_ISDIR(text.stat().st_mode):
        yield from _inside(text)
    elif stat.S_ISREG(text.stat().st_mode):
        yield text
    else:
        raise NoText("is neither a file nor a folder: a pipe or a device gives each rank another text")


def _inside(folder: Path) -> Iterator[Path]:
    """The regular files of a folder and of all within it, sorted; links to folders are not followed."""
    waiting, seen = [folder], 0
    while waiting:
        path = waiting.pop()
        if path.is_dir() and (path == folder or not path.is_symlink()):
            entries = sorted(path.iterdir(), reverse=True)
            seen += len(entries)
            if seen > MAX_ENTRIES:
                raise NoText(f"holds more than {MAX_ENTRIES} files and folders: name a smaller folder, or a file")
            waiting += entries
        elif path.is_file():
            yield path


def _regular_bytes(path: Path, most: int) -> bytes:
    """At most so many bytes of a file, and no more than it says that it has: what a kernel writes as it is read has
    none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise NoText(f"has become a pipe or a device: {shown(path)}")
        return file.read(min(most, state.st_size))
