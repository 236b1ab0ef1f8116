"""The text that gpt reads: bytes of real files, no download.

By default the sources of Python's own standard library, which every image has; LAB_TEXT names a file or a folder
instead. Files are read in sorted order and cut at `MAX_BYTES`, so that every rank sees the same bytes in well under
0.3 s. `faults` answers before the ranks join whether there is anything to read.
"""

import sysconfig
from pathlib import Path

from workers.config import Config

MAX_BYTES = 4 * 2**20  # 20 steps of 16 samples of 64 bytes read 20 KiB: more text only costs time


def read(config: Config) -> bytes:
    """The first MAX_BYTES of the text; raises OSError where a file cannot be read."""
    text = bytearray()
    for path in _files(config.text):
        with path.open("rb") as file:
            text += file.read(MAX_BYTES - len(text))
        if len(text) == MAX_BYTES:
            break
    return bytes(text)


def refusals(config: Config) -> list[str]:
    """A sentence if LAB_TEXT cannot be read or holds less than one sample (LAB_SEQ bytes and the one that follows)."""
    if config.model != "gpt":
        return []
    if config.text is not None and not config.text.exists():
        return [f"LAB_TEXT={str(config.text)!r} does not exist: name a file or a folder that every rank can read"]
    try:
        num_bytes = len(read(config))
    except OSError as error:
        return [f"LAB_TEXT={str(config.text)!r} cannot be read: {error.strerror}: {error.filename}"]
    where = "the standard library" if config.text is None else f"LAB_TEXT={str(config.text)!r}"
    if num_bytes == 0:
        return [f"{where} is empty: name a file or a folder with text"]
    if num_bytes <= config.seq:
        needed = config.seq + 1
        return [f"{where} holds {num_bytes} bytes, and a sample of LAB_SEQ={config.seq} needs {needed} or more"]
    return []


def _files(text: Path | None) -> list[Path]:
    if text is None:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if text.is_dir():
        return sorted(path for path in text.rglob("*") if path.is_file())
    return [text]
