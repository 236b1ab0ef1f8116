"""Where the ranks of a script meet: in a store of the lab's, with a key that their doctors have drawn.

Left alone, `init_process_group` opens PyTorch's store on all addresses of the host, where anybody can list, read and
write, and where forged bytes ended rank 0 by SIGSEGV (torch 2.13, once in the fuzz of ports). A store that a script
opens by itself is its own, and so is that of an agent under torchrun.
"""

import importlib
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workers.cluster.address import resolve
from workers.cluster.board_socket import listening_socket
from workers.parallel.store import HostedStore, KeyedStore, Prefixed

AGAIN_S = 0.05


class Meeting:
    """The store of all ranks at MASTER_PORT, for those with `key`; `install` once."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._store: KeyedStore | None = None
        self._times = 0

    def install(self) -> None:
        """Have `init_process_group` meet there."""
        rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function of torch's has its name
        right = rendezvous._create_c10d_store

        def meet(host: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any) -> dist.Store:
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if by_agent or port != int(os.environ["MASTER_PORT"]):
                store: dist.Store = right(host, port, rank, world_size, timeout, *more)
                return store
            return self._met(host, port, rank, timeout.total_seconds())

        rendezvous._create_c10d_store = meet

    def _met(self, host: str, port: int, rank: int, timeout_s: float) -> dist.Store:
        """A store without keys: what a group before this one has left in it is under another prefix."""
        self._times += 1
        if self._store is None:
            self._store = self._opened(host, port, rank, timeout_s)
        return Prefixed(f"meeting {self._times}", self._store)

    def _opened(self, host: str, port: int, rank: int, timeout_s: float) -> KeyedStore:
        """Rank 0 hosts it; the others wait until it listens. Raises DistNetworkError, as torch does."""
        deadline = time.monotonic() + timeout_s
        try:
            address = resolve(host, timeout_s, print)
            if rank == 0:
                return HostedStore(listening_socket(address, port), self._key, timeout_s)
            while True:
                try:
                    return KeyedStore(address.ip, port, self._key, timeout_s)
                except ConnectionRefusedError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(AGAIN_S)
        except (OSError, RuntimeError) as error:
            raise dist.DistNetworkError(f"no store at {host}:{port}: {error}") from None
