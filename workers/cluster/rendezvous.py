"""Ranks find each other: rank 0 keeps a board at MASTER_ADDR:MASTER_PORT, all others ask it until every rank is there.

What cannot run together is refused by the board with one sentence, which every rank says: a doubled RANK, another
WORLD_SIZE, RUN_MODE, version or setting, a port that is taken, ranks that never came. Only then do they open the
TCPStore that torch needs, rank 0 as its host. Under torchrun the agent owns MASTER_PORT: the ranks join its store as
clients and find the board through it. Nothing waits longer than LAB_JOIN_TIMEOUT_S.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from workers.cluster import ClusterError
from workers.cluster.address import Address, bounded, interface_of, is_local, outward_ip, resolve, source_ip
from workers.cluster.arrival import Arrival
from workers.cluster.board import Claim, Member
from workers.cluster.board_socket import Desk, udp_socket
from workers.cluster.host import gather, open_desk, open_host, seal
from workers.config import Config

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Cluster", "ClusterError", "Member", "init_process_group", "join"]

STORE_TIMEOUT_S = 20.0


@dataclass
class Cluster:
    """All ranks, agreed: what each needs to speak with the others."""

    rank: int
    world_size: int
    store: "dist.Store"
    members: dict[int, Member]
    socket: socket.socket  # UDP, bound: heartbeats come here
    run_id: str
    token: str  # the same on all ranks of this run, another in every other run
    desk: Desk | None = None  # on rank 0: latecomers are answered by its watch


def join(
    config: Config, version: str, say: Callable[[str], None], contents: Mapping[str, str] | None = None
) -> Cluster:
    """Wait for all ranks and agree with them, on the checksums `contents` too; raises ClusterError with the sentence
    that every rank concerned says."""
    assert config.rank is not None and config.master_addr is not None, "a rank has RANK and MASTER_ADDR"  # noqa: PT018
    address = resolve(config.master_addr, config.join_timeout_s)
    import torch.distributed  # noqa: F401 (takes seconds: before the bound begins, and others count on an answer)

    started = time.monotonic()
    udp = udp_socket(address.family)
    claim = Claim.of(config, version, outward_ip(address.family), contents)
    arrival = Arrival(config, claim, udp, say, started + config.join_timeout_s, said_at=started)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _join_agent(arrival, address)
    if config.rank == 0 and is_local(address):
        listening, desk = open_host(arrival, address)
        gather(arrival, desk)
        store = _open_store(address.ip, config.master_port, listening)
        seal(desk)
        return _cluster(arrival, store, desk.board.sealed, desk)
    sealed = arrival.ask_until_sealed(address, config.master_port, config.master_port)
    return _cluster(arrival, _open_store(address.ip, config.master_port), sealed)


def _join_agent(arrival: Arrival, address: Address) -> Cluster:
    """Under torchrun: the agent's store is there before the ranks are; rank 0 writes into it where its board is."""
    import torch.distributed as dist

    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(f"ranklab/{run}", _open_store(address.ip, arrival.config.master_port))
    if arrival.claim.rank == 0:
        udp = udp_socket(address.family)
        # Ranks of other nodes know this host as MASTER_ADDR or, if the agent's store is elsewhere, by the way there.
        ip = "" if is_local(address) else source_ip(address.family, address.ip) or ""
        store.set("board", f"{udp.getsockname()[1]} {ip}")
        desk = open_desk(arrival, address, udp)
        gather(arrival, desk)
        seal(desk)
        return _cluster(arrival, store, desk.board.sealed, desk)
    while not store.check(["board"]):
        arrival.progress("waiting for rank 0")
        if arrival.expired:
            raise ClusterError(f"rank 0 of {arrival.claim.world_size} did not come {arrival.bound}")
        time.sleep(0.05)
    port, _, ip = store.get("board").decode().partition(" ")
    sealed = arrival.ask_until_sealed(address._replace(ip=ip or address.ip), int(port), store_port=None)
    return _cluster(arrival, store, sealed)


def _cluster(arrival: Arrival, store: "dist.Store", sealed: dict[str, Any] | None, desk: Desk | None = None) -> Cluster:
    assert sealed is not None
    members = {entry["rank"]: Member(**entry) for entry in sealed["members"]}
    return Cluster(
        arrival.claim.rank, len(members), store, members, arrival.udp, sealed["run_id"], sealed["token"], desk
    )


def _open_store(ip: str, port: int, listening: socket.socket | None = None) -> "dist.Store":
    """The store's client, and its server on the socket that rank 0 has bound already."""
    import torch.distributed as dist

    timeout = timedelta(seconds=STORE_TIMEOUT_S)

    def build() -> "dist.Store":
        if listening is None:
            return dist.TCPStore(ip, port, None, False, timeout, wait_for_workers=False)
        return dist.TCPStore(ip, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())

    # The constructor's own timeout does not hold against a port that accepts and stays silent.
    refusal = f"the store of rank 0 at {ip}:{port} did not answer in {STORE_TIMEOUT_S:g} s"
    try:
        return bounded(build, STORE_TIMEOUT_S, refusal)
    except RuntimeError:
        raise ClusterError(refusal) from None


def init_process_group(cluster: Cluster, config: Config) -> None:
    """The default process group over the cluster's store, with LAB_COLLECTIVE_TIMEOUT_S a collective.

    gloo is bound to the interface that holds this rank's own address. Left alone it takes the address of the host's
    name, which many machines give as 127.0.1.1. It reads the choice from the environment, where subgroups find it too.
    """
    import torch.distributed as dist

    interface = interface_of(cluster.members[cluster.rank].ip)
    if config.backend == "gloo" and interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        config.backend,
        store=dist.PrefixStore("group", cluster.store),
        rank=cluster.rank,
        world_size=cluster.world_size,
        timeout=timedelta(seconds=config.collective_timeout_s),
    )
