"""The last words of a rank that the kernel killed because memory ran out: said for it, at once, by what outlives it.

The kernel kills the largest process of a container whose memory is full, and gives it no time to speak; its last
heartbeat may be older than the growth that killed it. So the watch leaves the words, sealed, and the others' addresses
in a file, and the shell that started the rank (workers/entrypoint.sh) reads the kernel's count of such kills when the
rank is gone, and runs this module.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

from distlab.cluster.rendezvous_server import send

# The entry point makes it, empty, where it stays behind; a rank without one leaves nothing.
PLACE = Path("/tmp/distlab-last-words")


def leave(rank: int, words: list[bytes], family: int, addresses: list[tuple[str, int]], place: Path = PLACE) -> None:
    """Write down what to tell and whom, for this user alone, if somebody will be there to read it."""
    if place.exists():
        written = place.with_suffix(".new")
        will = {"rank": rank, "words": [word.hex() for word in words], "family": family, "addresses": addresses}
        written.touch(mode=0o600)
        written.write_text(json.dumps(will))
        os.replace(written, place)


def say(place: Path = PLACE) -> str:
    """Tell the other ranks, if this one had come to know them; returns the sentence for its own log."""
    try:
        will: dict[str, Any] = json.loads(place.read_text())
    except (OSError, ValueError):  # it had not met the others yet
        return "this rank was killed by the OOM killer before it met the others"
    udp = socket.socket(will["family"], socket.SOCK_DGRAM)  # which hears nothing
    for word in will["words"]:
        for ip, port in will["addresses"]:
            send(udp, bytes.fromhex(word), (ip, port))
    udp.close()
    return f"rank {will['rank']} was killed by the OOM killer: its container's limit is LAB_MEMORY"


if __name__ == "__main__":
    print(say(), flush=True)
