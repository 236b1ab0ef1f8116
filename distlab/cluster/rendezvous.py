"""Ranks find each other: rank 0 keeps a board at MASTER_ADDR:MASTER_PORT, all others ask it until every rank is there.

What cannot run together is refused by the board with one sentence, which every rank says: a doubled RANK, another
WORLD_SIZE, RUN_MODE, version or setting, a port that is taken, ranks that never came. Who has not the key of the run is
not heard. Only then do they open the store that torch needs (store.py), on a port that rank 0 draws and tells
those whom it has let in; who has not the key gets nothing from it either. Under torchrun the agent owns MASTER_PORT:
the ranks look into its store, which is open to all, for a board that is sealed, and for nothing else.
Nothing waits longer than LAB_JOIN_TIMEOUT_S.
"""

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distlab.cluster import ClusterError, name_ranks
from distlab.cluster.address import (
    Address,
    bounded,
    hearing_ip,
    interface_of,
    is_local,
    listening_socket,
    open_ports,
    outward_ip,
    own_ip,
    resolve,
    source_ip,
    udp_socket,
)
from distlab.cluster.authenticated_messages import DERIVED, Dropped, MessageVerifier, key_of
from distlab.cluster.message_signer import MessageSigner, derive_name
from distlab.cluster.rendezvous_client import FOREIGN_S, Board, RendezvousClient
from distlab.cluster.rendezvous_server import OTHER_KEY, Claim, Member, RendezvousServer, RendezvousSocket
from distlab.config import Config
from distlab.config.settings import claim_run_id

# Rank 0 as the host: it opens the ports, keeps the board until every rank is there, and tells all what is refused.

FROZEN_S = 1.0  # between two looks at the board, which come a hundred times a second
LINGER_S = 6.0  # how long rank 0 stays for ranks that are still importing torch, to tell them why there is no run


def open_desk(
    arrival: RendezvousClient, address: Address, udp: socket.socket, guard: socket.socket | None = None
) -> RendezvousSocket:
    """The board of a new run, asked at `udp`; `guard` holds the TCP port beside it."""
    config = arrival.config
    ip = address.ip if is_local(address) else source_ip(address.family, address.ip) or address.ip
    board = RendezvousServer(
        arrival.claim, ip, arrival.udp.getsockname()[1], config.run_id or "", config.join_timeout_s
    )
    return RendezvousSocket(board, udp, arrival.key, arrival.dropped, guard)


def open_host(arrival: RendezvousClient, address: Address) -> RendezvousSocket:
    """The desk on MASTER_PORT; raises ClusterError where another program or run keeps the port."""
    port = arrival.config.master_port
    free_since = time.monotonic()
    while True:
        try:
            ports = open_ports(address, port)
        except OSError as error:
            raise ClusterError(f"MASTER_PORT={port} cannot be opened on {address.name}: {error.strerror}") from None
        if ports is not None:
            guard, udp = ports
            return open_desk(arrival, address, udp, guard)
        # The board of another run answers here too: it knows whether this RANK=0 is its double or its successor.
        if arrival.ask_once(address, port) is not None:
            free_since = time.monotonic()
        if time.monotonic() - free_since > FOREIGN_S:
            _refuse_all(arrival, address, arrival.taken(address, port))
        if arrival.expired:
            raise ClusterError(f"MASTER_PORT={port} on {address.name} was still held by an earlier run {arrival.bound}")


def _refuse_all(arrival: RendezvousClient, address: Address, sentence: str) -> None:
    """Tell the others why rank 0 cannot open its port, by what is left of it.

    Where UDP is free they are told. Where TCP alone is free it is held, silent: ranks that find that come to the same
    sentence.
    """
    arrival.say(f"waiting for the others to know: {sentence}")
    port = arrival.config.master_port
    with ExitStack() as kept:
        udp, guard = (_if_free(kept, open_it) for open_it in (
            lambda: udp_socket(address.family, own_ip(address), port), lambda: listening_socket(address, port)
        ))  # fmt: skip
        if udp is not None:
            desk = open_desk(arrival, address, udp)
            desk.board.refusal = sentence
            desk.linger(LINGER_S)
        elif guard is not None and not arrival.meets_another_key:
            time.sleep(LINGER_S)
    raise ClusterError(sentence)


def _if_free(kept: ExitStack, open_it: Callable[[], socket.socket]) -> socket.socket | None:
    try:
        return kept.enter_context(open_it())
    except OSError:
        return None


def gather(arrival: RendezvousClient, desk: RendezvousSocket) -> None:
    """Answer until every rank is here; raises the board's refusal once the others have heard it."""
    board, lost_after_s, listened_at = desk.board, arrival.config.lost_after_s, time.monotonic()
    while board.refusal is None and (missing := board.missing(time.monotonic())):
        desk.serve()
        now = time.monotonic()
        if now - listened_at > FROZEN_S:
            board.frozen_until = now
        listened_at = now
        if silent := board.silent(now, lost_after_s):
            board.give_up(silent, lost_after_s)
        elif arrival.expired:
            board.refusal = (
                f"{name_ranks(missing)} of {board.own.world_size} did not come {arrival.bound}{_strangers(arrival)}"
            )
            desk.linger(1.0)  # the others wait already: nobody is still on the way
        arrival.progress(f"waiting for {name_ranks(missing)}")
        time.sleep(0.01)
    if board.refusal is not None:
        desk.linger(LINGER_S)
        raise ClusterError(board.refusal)


@contextmanager
def answering(desk: RendezvousSocket) -> Iterator[None]:
    """Answer on a thread, while this one opens the store: those who ask would take rank 0 for lost."""
    done = threading.Event()

    def answer() -> None:
        while not done.wait(0.05):
            desk.serve()

    thread = threading.Thread(target=answer, name="desk", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _strangers(arrival: RendezvousClient) -> str:
    """Who is not let in for want of the key, if anybody asked: the missing may be among them."""
    count = arrival.dropped.by_fault[OTHER_KEY]
    if not count:
        return ""
    source = arrival.dropped.last_source[OTHER_KEY]
    return (
        f"; {count} questions came that were {OTHER_KEY}, the last one from {source}: set the same LAB_KEY on all ranks"
    )


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
    seal: MessageSigner  # this rank's, with the key of the run
    opener: MessageVerifier
    dropped: Dropped  # what came to this rank and was not believed
    desk: RendezvousSocket | None = None  # on rank 0: latecomers are answered by its watch


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
    arrival = RendezvousClient(config, claim, udp, say, started + config.join_timeout_s, started, key.secret)
    if agent:
        return _join_agent(arrival, address)
    if config.rank == 0 and is_local(address):
        return _host(arrival, address, open_host(arrival, address))
    board = address, config.master_port
    return _cluster(arrival, *arrival.ask_until_sealed(lambda: board, config.master_port))


def _join_agent(arrival: RendezvousClient, address: Address) -> Cluster:
    """Under torchrun: the agent's store is there before the ranks are; rank 0 writes into it where its board is.

    The store outlives its ranks, and agents count restarts apart (a change of members counts for none of them): nothing
    that a rank is given names an attempt that all ranks share. So where the board is is read again until one lets this
    rank in: that of an attempt before answers no more.
    """
    import torch.distributed as dist

    store = _open_store(address.ip, arrival.config.master_port)
    store = dist.PrefixStore(f"distlab/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
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


def _host(arrival: RendezvousClient, address: Address, desk: RendezvousSocket) -> Cluster:
    """As rank 0: let all in, open the store, and tell them where."""
    gather(arrival, desk)
    from distlab.transport.store import HostedStore  # torch comes with it

    token = secrets.token_hex(8)
    with answering(desk):
        store = HostedStore(
            listening_socket(address),
            store_key(arrival.key, token),
            STORE_TIMEOUT_S,
            turned_away=arrival.dropped.turned_away,
        )
    gather(arrival, desk)  # this rank may have been paused meanwhile, and given up
    # Not earlier: a start that fails leaves no folder.
    desk.board.run_id = desk.board.run_id or claim_run_id(arrival.config.runs_dir, arrival.config.mode_name)
    desk.board.seal(token, store.port, time.monotonic())  # only who has the key hears where the store is
    desk.serve()
    assert desk.board.sealed is not None
    return _cluster(arrival, address, desk.board.sealed, desk, store)


def _cluster(
    arrival: RendezvousClient,
    board: Address,
    sealed: dict[str, Any],
    desk: RendezvousSocket | None = None,
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
    return bytes.fromhex(derive_name(key, f"store of {token}"))


def in_an_agents_store(key: bytes, board: str) -> str:
    """Where a board is, port and address, behind what only ranks with the key can write: the store is open to all."""
    return f"{derive_name(key, f'board at {board}')} {board}"


def _keyed_store(ip: str, port: int, key: bytes) -> "dist.Store":
    from distlab.transport.store import KeyedStore

    try:
        return KeyedStore(ip, port, key, STORE_TIMEOUT_S)
    except OSError as error:
        raise ClusterError(f"the store of rank 0 at {ip}:{port} did not answer as it: {error}") from None


def _open_store(ip: str, port: int) -> "dist.Store":
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

    from distlab.transport.store import Prefixed

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
