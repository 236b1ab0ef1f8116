"""Report the death of a rank that the kernel has killed: `python -m distlab.lab.cluster.last_words`.

When a container's memory is full, the kernel kills its largest process without warning, whose last heartbeat may be
older than the growth that killed it. So the watch writes a message and its destination to a file. When the rank has
ended, the shell that started it (workers/entrypoint.sh) reads the kernel's count of such kills and runs this module,
with the standard library alone, because the others wait only half a second for it.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from distlab.techniques.transport.handshake import Who, dialled

# An entry point that stays running creates it, empty; a rank without one writes nothing.
PLACE = Path("/tmp/distlab-last-words")
BOUND_S = 2.0
HOW = "killed by the OOM killer: its container's limit is LAB_MEMORY"


def leave(rank: int, server: tuple[str, int], key: bytes, purpose: str, words: bytes, place: Path = PLACE) -> None:
    """Write the message and its destination, for this user alone, if a reader exists."""
    if place.exists():
        written = place.with_suffix(".new")
        will = {"rank": rank, "server": server, "key": key.hex(), "purpose": purpose, "words": words.hex()}
        written.touch(mode=0o600)
        written.write_text(json.dumps(will))
        os.replace(written, place)


def speak(place: Path = PLACE) -> str:
    """Send the message to rank 0's server, if this rank knew it; returns the sentence for the rank's own log."""
    try:
        will: dict[str, Any] = json.loads(place.read_text())
    except (OSError, ValueError):  # the rank had not joined yet
        return "this rank was killed by the OOM killer before it met the others"
    who, deadline = Who(will["rank"]), time.monotonic() + BOUND_S
    with suppress(OSError):
        ip, port = will["server"]
        connection, _ = dialled(ip, port, bytes.fromhex(will["key"]), will["purpose"], who, deadline)
        with connection:
            connection.sendall(bytes.fromhex(will["words"]))
    return f"rank {will['rank']} was {HOW}"


if __name__ == "__main__":
    print(speak(), flush=True)
    sys.exit()
