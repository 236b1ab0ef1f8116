"""Report the death of a rank that the kernel has killed: `python -m distlab.lab.cluster.oom_notice`.

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
PATH = Path("/tmp/distlab-oom-notice")
BOUND_S = 2.0
HOW = "killed by the OOM killer: its container's limit is LAB_MEMORY"


def prepare(rank: int, server: tuple[str, int], key: bytes, purpose: str, message: bytes, path: Path = PATH) -> None:
    """Write the message and its destination, for this user alone, if a reader exists."""
    if path.exists():
        written = path.with_suffix(".new")
        notice = {"rank": rank, "server": server, "key": key.hex(), "purpose": purpose, "words": message.hex()}
        written.touch(mode=0o600)
        written.write_text(json.dumps(notice))
        os.replace(written, path)


def send(path: Path = PATH) -> str:
    """Send the message to rank 0's server, if this rank knew it; returns the sentence for the rank's own log."""
    try:
        notice: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # the rank had not joined yet
        return "this rank was killed by the OOM killer before it had joined the others"
    who, deadline = Who(notice["rank"]), time.monotonic() + BOUND_S
    with suppress(OSError):
        ip, port = notice["server"]
        connection, _ = dialled(ip, port, bytes.fromhex(notice["key"]), notice["purpose"], who, deadline)
        with connection:
            connection.sendall(bytes.fromhex(notice["words"]))
    return f"rank {notice['rank']} was {HOW}"


if __name__ == "__main__":
    print(send(), flush=True)
    sys.exit()
