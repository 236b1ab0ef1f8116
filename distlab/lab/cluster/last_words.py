"""The last words of a rank that the kernel has killed: `python -m distlab.lab.cluster.last_words`.

The kernel kills the largest process of a container whose memory is full, and gives it no time to speak; its last
heartbeat may be older than the growth that killed it. So the watch leaves its words, and where to say them, in a file,
and the shell that started the rank (workers/entrypoint.sh) reads the kernel's count of such kills when the rank is
gone, and runs this module: of the standard library alone, since the others wait half a second for it.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from distlab.techniques.transport.handshake import Who, dialled

# The entry point makes it, empty, where it stays behind; a rank without one leaves nothing.
PLACE = Path("/tmp/distlab-last-words")
BOUND_S = 2.0
HOW = "killed by the OOM killer: its container's limit is LAB_MEMORY"


def leave(rank: int, server: tuple[str, int], key: bytes, purpose: str, words: bytes, place: Path = PLACE) -> None:
    """Write down what to tell and whom, for this user alone, if somebody will be there to read it."""
    if place.exists():
        written = place.with_suffix(".new")
        will = {"rank": rank, "server": server, "key": key.hex(), "purpose": purpose, "words": words.hex()}
        written.touch(mode=0o600)
        written.write_text(json.dumps(will))
        os.replace(written, place)


def speak(place: Path = PLACE) -> str:
    """Tell rank 0's server, if this rank had come to know it; returns the sentence for its own log."""
    try:
        will: dict[str, Any] = json.loads(place.read_text())
    except (OSError, ValueError):  # it had not met the others yet
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
