"""Ranks find each other: rank 0 keeps a board at MASTER_ADDR:MASTER_PORT, all others ask it until every rank is there.

What cannot run together is refused by the board with one sentence, which every rank says: a doubled RANK, another
WORLD_SIZE, RUN_MODE, version or setting, a port that is taken, ranks that never came. Who has not the key of the run is
not heard. Only then do they open the store that torch needs (parallel/store.py), on a port that rank 0 draws and tells
those whom it has let in; who has not the key gets nothing from it either. Under torchrun the agent owns MASTER_PORT:
the ranks look into its store, which is open to all, for a board that is sealed, and for nothing else.
Nothing waits longer than LAB_JOIN_TIMEOUT_S.
"""

import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from workers.cluster import ClusterError
from workers.cluster.address import Address, bounded, interface_of, is_local, outward_ip, resolve, source_ip
from workers.cluster.arrival import Arrival, Board
from workers.cluster.board import Claim, Member
from workers.cluster.board_socket import Desk, hearing_ip, listening_socket, own_ip, udp_socket
from workers.cluster.dropped import Dropped
from workers.cluster.host import answering, gather, open_desk, open_host, seal
from workers.cluster.key import DERIVED, key_of
from workers.cluster.opening import Opener
from workers.cluster.sealed import Seal, drawn
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
    store_port: int
    members: dict[int, Member]
    socket: socket.socket  # UDP, bound: heartbeats come here
    run_id: str
    token: bytes  # the same on all ranks of this run, another in every other run: the audience of their messages
    seal: Seal  # this rank's, with the key of the run
    opener: Opener
    dropped: Dropped  # what came to this rank and was not believed
    desk: Desk | None = None  # on rank 0: latecomers are answered by its watch

    def turned_away(self, fault: str, source: tuple[str, int]) -> None:
        """Count a connection of who has not the key."""
        self.dropped.add(fault, source, "a connection")


def join(
    config: Config, version: str, say: Callable[[str], None], contents: Mapping[str, str] | None = None
) -> Cluster:
    """Wait for all ranks and agree with them, on the checksums `contents` too; raises ClusterError with the sentence
    that every rank concerned says."""
    assert config.rank is not None and config.master_addr is not None, "a rank has RANK and MASTER_ADDR"  # noqa: PT018
    address = resolve(config.master_addr, config.join_timeout_s, say)
    import torch.distributed  # noqa: F401 (takes seconds: before the bound begins, and others count on an answer)

    started = time.monotonic()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    key = key_of(config, os.environ.get("TORCHELASTIC_RUN_ID", "") if agent else "")
    if key.derived and config.rank == 0 and config.world_size > 1:
        say(DERIVED)
    udp = udp_socket(address.family, hearing_ip(address))
    claim = Claim.of(config, version, outward_ip(address.family), contents)
    arrival = Arrival(config, claim, udp, say, started + config.join_timeout_s, started, key.secret)
    if agent:
        return _join_agent(arrival, address)
    if config.rank == 0 and is_local(address):
        return _host(arrival, address, open_host(arrival, address))
    board = address, config.master_port
    return _cluster(arrival, *arrival.ask_until_sealed(lambda: board, config.master_port))


def _join_agent(arrival: Arrival, address: Address) -> Cluster:
    """Under torchrun: the agent's store is there before the ranks are; rank 0 writes into it where its board is.

    The store outlives its ranks, and agents count restarts apart (a change of members counts for none of them): nothing
    that a rank is given names an attempt that all ranks share. So where the board is is read again until one lets this
    rank in: that of an attempt before answers no more.
    """
    import torch.distributed as dist

    store = _open_store(address.ip, arrival.config.master_port)
    store = dist.PrefixStore(f"ranklab/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
    if arrival.claim.rank == 0:
        # Ranks of other nodes know this host as MASTER_ADDR or, if the agent's store is elsewhere, by the way there.
        ip = "" if is_local(address) else source_ip(address.family, address.ip) or ""
        udp = udp_socket(address.family, ip or own_ip(address))
        board = f"{udp.getsockname()[1]} {ip}"
        store.set("board", in_an_agents_store(arrival.key, board))
        return _host(arrival, address._replace(ip=ip or address.ip), open_desk(arrival, address, udp))

    def board_now() -> Board | None:
        if not store.check(["board"]):
            return None
        said = store.get("board")
        board = said.decode(errors="replace").partition(" ")[2]
        if not hmac.compare_digest(said, in_an_agents_store(arrival.key, board).encode()):
            return None  # somebody else's word, or a board with another key
        port, _, ip = board.partition(" ")
        return address._replace(ip=ip or address.ip), int(port)

    return _cluster(arrival, *arrival.ask_until_sealed(board_now, store_port=None))


def _host(arrival: Arrival, address: Address, desk: Desk) -> Cluster:
    """As rank 0: let all in, open the store, and tell them where."""
    gather(arrival, desk)
    from workers.parallel.store import HostedStore  # torch comes with it

    token = secrets.token_hex(8)
    with answering(desk):
        store = HostedStore(
            listening_socket(address), store_key(arrival.key, token), STORE_TIMEOUT_S, turned_away=arrival.turned_away
        )
    gather(arrival, desk)  # this rank may have been paused meanwhile, and given up
    seal(desk, token, store.port)
    assert desk.board.sealed is not None
    return _cluster(arrival, address, desk.board.sealed, desk, store)


def _cluster(
    arrival: Arrival,
    board: Address,
    sealed: dict[str, Any],
    desk: Desk | None = None,
    store: "dist.Store | None" = None,
) -> Cluster:
    members = {entry["rank"]: Member(**entry) for entry in sealed["members"]}
    token = bytes.fromhex(sealed["token"])
    arrival.opener.know_run(token)
    store = store or _keyed_store(board.ip, sealed["store_port"], store_key(arrival.key, sealed["token"]))
    return Cluster(
        arrival.claim.rank, len(members), store, sealed["store_port"], members, arrival.udp, sealed["run_id"], token,
        arrival.seal, arrival.opener, arrival.dropped, desk,
    )  # fmt: skip


def store_key(key: bytes, token: str) -> bytes:
    """What the ends of the store of one run prove to each other."""
    return bytes.fromhex(drawn(key, f"store of {token}"))


def in_an_agents_store(key: bytes, board: str) -> str:
    """Where a board is, port and address, behind what only ranks with the key can write: the store is open to all."""
    return f"{drawn(key, f'board at {board}')} {board}"


def _keyed_store(ip: str, port: int, key: bytes) -> "dist.Store":
    """The store that rank 0 hosts."""
    from workers.parallel.store import KeyedStore

    try:
        return KeyedStore(ip, port, key, STORE_TIMEOUT_S)
    except OSError as error:
        raise ClusterError(f"the store of rank 0 at {ip}:{port} did not answer as it: {error}") from None


def _open_store(ip: str, port: int) -> "dist.Store":
    """An agent's store."""
    import torch.distributed as dist

    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    # The constructor's own timeout does not hold against a port that accepts and stays silent; where it does, it comes
    # first, or the process would end under a thread that is in C++ and abort.
    refusal = f"the agent's store at {ip}:{port} did not answer in {STORE_TIMEOUT_S:g} s"
    try:
        return bounded(
            lambda: dist.TCPStore(ip, port, None, False, timeout, wait_for_workers=False),
            STORE_TIMEOUT_S + 2.0, refusal,
        )  # fmt: skip
    except RuntimeError:
        raise ClusterError(refusal) from None


def init_process_group(cluster: Cluster, config: Config) -> None:
    """The default process group over the cluster's store, with LAB_COLLECTIVE_TIMEOUT_S a collective.

    gloo is bound to the interface that holds this rank's own address. Left alone it takes the address of the host's
    name, which many machines give as 127.0.1.1. It reads the choice from the environment, where subgroups find it too.
    """
    import torch.distributed as dist

    from workers.parallel.store import Prefixed

    interface = interface_of(cluster.members[cluster.rank].ip)
    if config.backend != "nccl" and interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        config.backend,
        store=Prefixed("group", cluster.store),
        rank=cluster.rank,
        world_size=cluster.world_size,
        timeout=timedelta(seconds=config.collective_timeout_s),
    )
