"""A stranger at the lab's own transport: who dials without the key of the run takes no rank's place.

Rank 0 opens connections once more, as for another group, and is dialled first by a thread of its own that says it is
rank 1 and has another key. Rank 1 dials after that, and has to be the one that is heard.
"""

import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.lab import Lab
from distlab.transport.backend import TcpBackend, purpose
from distlab.transport.handshake import MAGIC, NONCE_BYTES, PROOF_BYTES, Who, proof
from distlab.transport.tcp import LinkError

BOUND_S = 10.0
TOLD, CALLED, HEARD = "the transport's stranger", 1, 42
CONTROL = "tests/rank/test_stranger.py::test_a_stranger_that_is_let_in_is_seen"


def check_stranger(lab: Lab) -> None:
    """Ranks 0 and 1 connect while a stranger tries to; the others go on."""
    if lab.rank > 1:
        return
    lab.at(0, "a stranger")
    store = dist.PrefixStore("stranger", lab.exchange.store)
    bound_s = min(BOUND_S, lab.config.collective_timeout_s)
    if lab.rank == 0:
        threading.Thread(target=dial, args=(store, lab.hooks.own_ip, listening(), bound_s), daemon=True).start()
    else:
        with suppress(dist.DistStoreError):  # a stranger that found nobody has been kept out
            store.wait([TOLD], timedelta(seconds=bound_s))
    fault = heard_wrongly(lab, store, bound_s)
    if lab.rank == 0:
        detail = fault or "it said that it was rank 1 before rank 1 did, and was not heard"
        lab.check("stranger", bool(fault), 0, detail=detail, control=CONTROL)


def heard_wrongly(lab: Lab, store: dist.Store, bound_s: float) -> str:
    """What came of a message from rank 1 to rank 0, where it is not that."""
    message = torch.full((8,), HEARD * lab.rank, dtype=torch.int64)
    try:
        channel = TcpBackend(lab.hooks.own_ip, lab.hooks.secret).channel(
            store, [0, CALLED], lab.rank, "stranger", bound_s
        )
        channel.transport.groups += 1
        if lab.rank == CALLED:
            channel.send([message], 0, tag=1).wait()
        else:
            channel.recv([message], CALLED, tag=1).wait()
        channel.transport.leave()
    except LinkError as error:
        return f"rank {CALLED} was not heard: {error}"
    return "" if bool((message == HEARD).all()) else "another was heard in the place of rank 1"


def dial(store: dist.Store, host: str, before: set[int], bound_s: float) -> None:
    """Dial what this process listens at and did not `before`, as rank 1 and with a key that is another."""
    deadline = time.monotonic() + bound_s / 2
    while time.monotonic() < deadline:
        for port in listening() - before:
            with suppress(OSError), socket.create_connection((host, port), 1.0) as connection:
                nonce = secrets.token_bytes(NONCE_BYTES)
                connection.settimeout(bound_s / 2)
                connection.sendall(MAGIC + nonce)
                nonces = nonce + connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)[:NONCE_BYTES]
                connection.sendall(proof(secrets.token_bytes(32), b"dialler", purpose(0), nonces, Who(CALLED)))
                store.set(TOLD, "dialled")
                connection.recv(1)  # until it is closed
                return
        time.sleep(0.005)
    store.set(TOLD, "nobody listened")


def listening() -> set[int]:
    """The TCP ports at which this process listens."""
    ports = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as copy:
                    internet = copy.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        ports.add(copy.getsockname()[1])
    return ports
