"""Let ranks find each other: rank 0 serves at MASTER_ADDR:MASTER_PORT, and all others connect until all are there.

The server refuses what cannot run together, with one sentence that every rank prints: a duplicate RANK, another
WORLD_SIZE, RUN_MODE, version or setting, missing ranks. A process without the run's key gets nothing from it. Under
torchrun the agent owns MASTER_PORT: rank 0 writes its server's address into the agent's store, which is open to all. No
wait is longer than LAB_JOIN_TIMEOUT_S.
"""

import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from distlab.lab.cluster import ClusterError
from distlab.lab.cluster.address import (
    Address,
    bounded,
    interface_of,
    is_local,
    listening_socket,
    outward_ip,
    own_ip,
    resolve,
    source_ip,
)
from distlab.lab.cluster.admission import Admission, claim_of, too_long
from distlab.lab.cluster.messages import (
    MAX_TEXT,
    PURPOSE,
    Claim,
    FromServer,
    Heartbeat,
    Join,
    Member,
    Place,
    Refused,
    Sealed,
    Waiting,
)
from distlab.lab.cluster.rank_server import FROZEN_S, PERIOD_S, RankServer, Strangers
from distlab.lab.config import Config, ConfigError
from distlab.lab.config.settings import MIN_KEY, claim_run_id, read_key
from distlab.techniques.transport.handshake import Closed, Foreign, Unproven, Who, prove
from distlab.techniques.transport.store_server import READ_BYTES, Message, framed, pop_frames

if TYPE_CHECKING:
    import torch.distributed as dist

    from distlab.techniques.transport.store import KeyedStore

RETRY_S = 0.1  # at a port without a listener
DIAL_S = 1.0
REPORT_AFTER_S = 3.0  # what this rank waits for: most ranks join sooner
REPORT_EVERY_S = 9.5
# A port that accepts connections without a rank 0 for this long belongs to another program. An earlier run that is
# ending frees it sooner.
FOREIGN_S = 4.0
LINGER_S = 6.0  # how long rank 0 stays to send ranks that still import torch the reason why there is no run
STORE_TIMEOUT_S = 20.0
FindServer = Callable[[], tuple[Address, int] | None]  # where rank 0 serves, if known
ANSWERS = msgspec.msgpack.Decoder(FromServer)


class Uplink:
    """This rank's connection to the server. One thread uses it, except for `send`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(STORE_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.ended = False
        self.drops_received = self.drops_sent = False  # by fault injection
        self.unread: list[FromServer] = []  # messages that were not for an earlier reader
        self._received = bytearray()
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message, unless the connection has ended."""
        try:
            with self._lock:
                if not self.drops_sent:
                    self.connection.sendall(framed(message))
        except OSError:
            self.ended = True

    def messages(self, timeout_s: float = 0.0) -> list[FromServer]:
        """Return all messages that have arrived; waits for the first one."""
        unread, self.unread = self.unread, []
        if unread or self.ended or not select.select([self.connection], [], [], max(0.0, timeout_s))[0]:
            return unread
        try:
            new = self.connection.recv(READ_BYTES)
            self._received += new
            self.ended = not new
            if self.drops_received:
                self._received.clear()
            return [ANSWERS.decode(frame) for frame in pop_frames(self._received)]
        except (OSError, ValueError, msgspec.MsgspecError):
            self.ended = True
            return []

    def close(self) -> None:
        self.ended = True
        self.connection.close()


def has_ended(member: Member) -> bool:
    """Return whether `member` has closed its standby port, which its process keeps open to its end."""
    try:
        socket.create_connection((member.ip, member.next_port), DIAL_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def dial(ip: str, port: int, key: bytes, who: Who, timeout_s: float = DIAL_S) -> Uplink:
    """Return a connection to that server, after both ends have proven the key; raises OSError."""
    connection = socket.create_connection((ip, port), timeout_s)
    try:
        prove(connection, key, PURPOSE, who, timeout_s)
    except OSError:
        connection.close()
        raise
    return Uplink(connection)


@dataclass
class Cluster:
    """All ranks after they have agreed: what each needs to communicate with the others."""

    rank: int
    world_size: int
    store: "dist.Store"
    members: dict[int, Member]
    run_id: str
    token: str  # the same on all ranks of this run, different in every other run
    key: bytes
    strangers: Strangers  # unauthenticated connections to this rank
    # The server and this rank's connection to it: another rank's if rank 0 is lost and the run continues.
    uplink: Uplink
    server_at: tuple[str, int]
    claim: Claim
    life: int
    server: RankServer | None = None  # in the process of rank `host`
    next_listening: socket.socket | None = None  # where this rank serves if the run continues without rank 0
    host: int = 0
    lost: frozenset[int] = frozenset()  # of a run that this rank has rejoined

    def record_death(self, rank: int, how: str) -> None:
        """Record how the process of rank `rank` ended, as its parent reports it."""
        if self.server is not None:
            self.server.record_death(rank, how)


def join(
    config: Config, version: str, say: Callable[[str], None], contents: Mapping[str, str] | None = None,
    *, elastic: bool = False,
) -> Cluster:  # fmt: skip
    """Wait for all ranks and agree with them, on the checksums `contents` too; raises ClusterError with the sentence
    that every rank concerned prints. An `elastic` run survives the loss of any rank, including rank 0."""
    assert config.rank is not None and config.master_addr is not None, "a rank has RANK and MASTER_ADDR"  # noqa: PT018
    address = resolve(config.master_addr, config.join_timeout_s, say)
    import torch.distributed  # noqa: F401 (takes seconds, so before the time limit starts and others wait for an answer)

    started = time.monotonic()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    key = key_of(config, os.environ.get("TORCHELASTIC_RUN_ID", "") if agent else "")
    if key.derived and config.rank == 0 and config.world_size > 1:
        say(DERIVED)
    own = address._replace(ip=source_ip(address.family, address.ip) or address.ip)
    listening = listening_socket(own) if elastic else None
    claim = claim_of(config, version, outward_ip(address.family), contents, listening)
    if too_long(claim):
        raise ClusterError(f"a setting of this rank is too long, allowed: at most {MAX_TEXT} characters")
    joining = Joining(config, claim, key.secret, say, started, listening)
    if agent:
        return joining.join_by_agent_store(address)
    if config.rank == 0 and is_local(address):
        return joining.serve(address, joining.own_port(address))
    return joining.join_server(lambda: (address, config.master_port))


@dataclass
class Joining:
    """The state of one rank while it joins."""

    config: Config
    claim: Claim
    key: bytes
    say: Callable[[str], None]
    started: float
    next_listening: socket.socket | None
    strangers: Strangers = field(init=False)
    life: int = field(default_factory=time.time_ns)
    _pause_s: float = REPORT_AFTER_S
    _reported_at: float = field(init=False)
    _foreign_since: float | None = None
    _other_key: bool = False
    _ended_at: float | None = None  # when the connection ended to a rank 0 that had accepted this rank

    def __post_init__(self) -> None:
        self.strangers, self._reported_at = Strangers(self.say), self.started

    @property
    def deadline(self) -> float:
        return self.started + self.config.join_timeout_s

    @property
    def time_limit(self) -> str:
        return f"in {self.config.join_timeout_s:g} s (LAB_JOIN_TIMEOUT_S)"

    def progress(self, sentence: str) -> None:
        """Print what this rank waits for, after `REPORT_AFTER_S` and then every `REPORT_EVERY_S`."""
        if sentence and time.monotonic() - self._reported_at >= self._pause_s:
            self._reported_at, self._pause_s = time.monotonic(), REPORT_EVERY_S
            self.say(sentence)

    # As rank 0.

    def own_port(self, address: Address) -> socket.socket:
        """Return a socket at MASTER_PORT; raises ClusterError if another program or run keeps it."""
        port = self.config.master_port
        while True:
            try:
                return listening_socket(address, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    sentence = f"MASTER_PORT={port} cannot be opened on {address.name}: {error.strerror}"
                    raise ClusterError(sentence) from None
            # Another run's rank 0 answers here too: it knows whether this one is its duplicate or its successor.
            waiting = self.try_to_join(address, port)
            if time.monotonic() > self.deadline:
                sentence = f"MASTER_PORT={port} on {address.name} was not freed by an earlier run {self.time_limit}"
                raise ClusterError(sentence)
            self.progress(waiting)
            time.sleep(RETRY_S)

    def serve(self, address: Address, listening: socket.socket) -> Cluster:
        """Open the server, and join through it like any other rank."""
        config = self.config
        ip = address.ip if is_local(address) else source_ip(address.family, address.ip) or address.ip
        admission = Admission(self.claim, config.run_id or "", config.join_timeout_s, config.lost_after_s)
        name = partial(claim_run_id, config.runs_dir, config.mode_name)
        server = RankServer(
            listening, self.key, 0, ip, admission, secrets.token_hex(8),
            self.deadline, self.time_limit, self.strangers, name
        )  # fmt: skip
        here = address._replace(ip=own_ip(address) or "127.0.0.1")
        try:
            return self.join_server(lambda: (here, server.port), server)
        except ClusterError:
            deadline = time.monotonic() + (LINGER_S if time.monotonic() < self.deadline else 1.0)
            while not server.all_informed() and time.monotonic() < deadline:
                time.sleep(0.02)
            server.close()
            raise

    # As any rank.

    def join_server(self, find_server: FindServer, server: RankServer | None = None) -> Cluster:
        """Ask the server at the address from `find_server` for admission, repeatedly, until all ranks have joined."""
        while True:
            tried_at = time.monotonic()
            server_address = find_server()
            if server_address is None:
                waiting = "waiting for rank 0"
            else:
                found = self.try_to_join(*server_address, server)
                if isinstance(found, Cluster):
                    return found
                waiting = found
            now = time.monotonic()
            if self._ended_at is not None and now - tried_at > FROZEN_S + DIAL_S:
                self._ended_at = now  # this process was paused
            if self._ended_at is not None and now - self._ended_at > self.config.lost_after_s:
                raise ClusterError("rank 0 lost before all ranks had joined: its connection ended")
            if now > self.deadline:
                raise ClusterError(f"rank {self.claim.rank} could not join {self.time_limit}: {waiting}")
            self.progress(waiting)
            time.sleep(max(0.0, tried_at + RETRY_S - time.monotonic()))

    def try_to_join(self, address: Address, port: int, server: RankServer | None = None) -> Any:
        """Ask for admission with one connection: return the cluster, or a text of what to wait for once it has ended.

        Raises ClusterError with the server's refusal, or if another program has the port.
        """
        where = f"{address.name} ({address.ip}):{port}"
        refused = f"waiting for rank 0: nothing listens at {where}"
        if self.claim.rank == 0:
            refused = f"waiting for {where}: rank 0 runs here, and MASTER_ADDR is another host, which does not answer"
        try:
            uplink = dial(address.ip, port, self.key, Who(self.claim.rank, self.life))
        except (Foreign, TimeoutError):
            found = "accepts connections and does not answer"
        except (Closed, ConnectionResetError, BrokenPipeError):  # the server may have been overloaded
            found = "closes connections"
        except Unproven:
            self._other_key = True
            found = "answers with another key: set the same LAB_KEY on all ranks"
        except OSError:
            self._foreign_since = None
            return refused
        else:
            self._foreign_since = None
            uplink.send(Join(self.claim))
            return self._wait_until_sealed(uplink, address, port, server)
        return self._is_foreign(address, port, f"waiting for rank 0: {where} {found}")

    def _wait_until_sealed(self, uplink: Uplink, address: Address, port: int, server: RankServer | None) -> Any:
        """Send heartbeats until all ranks are there, the server refuses, or the connection ends."""
        waiting, admitted, received_at = "", False, time.monotonic()
        while not uplink.ended:
            uplink.send(Heartbeat(Place(phase="join")))
            messages = uplink.messages(PERIOD_S)
            while messages:
                message, received_at = messages.pop(0), time.monotonic()
                match message:
                    case Refused(sentence):
                        raise ClusterError(sentence)
                    case Sealed():
                        uplink.unread = messages
                        return self.cluster(uplink, message, address, port, server)
                    case Waiting(sentence):
                        waiting, self._ended_at = sentence, None
                        admitted = not sentence or sentence.startswith(("waiting for rank ", "waiting for ranks "))
            now = time.monotonic()
            if server is not None and server.is_stalled(now):
                received_at = now  # the server's thread got no core; rank 0 is not dead
            if admitted and now - received_at > (bound_s := self.config.lost_after_s):
                uplink.close()
                raise ClusterError(f"rank 0 lost before all ranks had joined: no heartbeat for {bound_s:g} s")
            # Leave the decision to a server that answers: its own timeout is near, and every rank prints its sentence.
            if now > max(self.deadline, received_at) + REPORT_AFTER_S:
                uplink.close()
                raise ClusterError(f"rank {self.claim.rank} could not join {self.time_limit}: {waiting}")
            self.progress(waiting)
        self._ended_at = time.monotonic() if admitted else None
        return waiting

    def _is_foreign(self, address: Address, port: int, waiting: str) -> str:
        """Return what this rank waits for; raises ClusterError once another program has had the port for FOREIGN_S."""
        self._foreign_since = self._foreign_since or time.monotonic()
        if time.monotonic() - self._foreign_since > FOREIGN_S and port == self.config.master_port:
            at = f"MASTER_PORT={port} on {address.name}"
            if self._other_key:
                raise ClusterError(
                    f"{at} is used by a rank 0 with another key: set the same LAB_KEY on all ranks of a run, or choose"
                    " another port for another run"
                )
            raise ClusterError(f"{at} is used by another program, not by rank 0: choose another port")
        return waiting

    def cluster(self, uplink: Uplink, seal: Sealed, address: Address, port: int, server: RankServer | None) -> Cluster:
        members = {member.rank: member for member in seal.members}
        store = store_at(address.ip, port, self.key)
        where = address.ip, port
        return Cluster(
            self.claim.rank, len(members), store, members, seal.run_id, seal.token, self.key, self.strangers, uplink,
            where, self.claim, self.life, server, self.next_listening, seal.host,
            frozenset(seal.lost),
        )  # fmt: skip

    def join_by_agent_store(self, address: Address) -> Cluster:
        """Find rank 0 under torchrun: the agent's store exists before the ranks, and rank 0 writes its address into it.

        The store outlives its ranks, and each agent counts its own restarts (no count after a change of members): no
        variable of a rank names an attempt that all ranks share. So this rank reads rank 0's address again until that
        server admits it: the server of an earlier attempt does not answer any more.
        """
        import torch.distributed as dist

        store = connect_agent_store(address.ip, self.config.master_port)
        store = dist.PrefixStore(f"distlab/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
        if self.claim.rank == 0:
            # Ranks of other nodes know this host as MASTER_ADDR or, if the agent's store is elsewhere, by its address.
            ip = "" if is_local(address) else source_ip(address.family, address.ip) or ""
            here = address._replace(ip=ip or address.ip)
            listening = listening_socket(here)
            store.set("server", signed_address(self.key, f"{listening.getsockname()[1]} {ip}"))
            return self.serve(here, listening)

        def server_now() -> tuple[Address, int] | None:
            if not store.check(["server"]):
                return None
            value = store.get("server")
            place = value.decode(errors="replace").partition(" ")[2]
            if not hmac.compare_digest(value, signed_address(self.key, place).encode()):
                return None  # another program's value, or a server with another key
            port, _, ip = place.partition(" ")
            return address._replace(ip=ip or address.ip), int(port)

        return self.join_server(server_now)


def store_at(ip: str, port: int, key: bytes) -> "KeyedStore":
    """Return the store at that server; raises ClusterError."""
    from distlab.techniques.transport.store import KeyedStore  # imports torch

    try:
        return KeyedStore(ip, port, key, STORE_TIMEOUT_S, PURPOSE)
    except OSError as error:
        raise ClusterError(f"the store of rank 0 at {ip}:{port} did not answer: {error}") from None


def signed_address(key: bytes, place: str) -> str:
    """Return the value that publishes rank 0's port and address, with a mark that needs the run's key to compute."""
    return f"{derive_name(key, f'server at {place}')} {place}"


def connect_agent_store(ip: str, port: int) -> "dist.Store":
    import torch.distributed as dist

    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    # The constructor's own timeout fails on a port that accepts and stays silent; otherwise it expires first, because
    # a process that ends under a thread in C++ aborts.
    refusal = f"the agent's store at {ip}:{port} did not answer in {STORE_TIMEOUT_S:g} s"
    try:
        return bounded(
            lambda: dist.TCPStore(ip, port, None, False, timeout, wait_for_workers=False),
            STORE_TIMEOUT_S + 2.0, refusal,
        )  # fmt: skip
    except RuntimeError:
        raise ClusterError(refusal) from None


def init_process_group(cluster: Cluster, config: Config) -> None:
    """Create the default process group on the cluster's store, with LAB_COLLECTIVE_TIMEOUT_S per collective.

    gloo is bound to the interface with this rank's own address. By default it uses the address of the host's name,
    which is often 127.0.1.1. It reads the choice from the environment, also for subgroups.
    """
    import torch.distributed as dist

    from distlab.techniques.transport.store import Prefixed

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


# The key of a run, which both ends of every connection between ranks prove, and where it comes from.
#
# It is LAB_KEY, or the content of the file that LAB_KEY_FILE names; if neither is set, the launcher draws one for local
# ranks and `./run` for containers. Else it is the secret that Compose or an orchestrator mounts. Else it is derived
# from settings that all ranks share, which separates runs but is no secret: rank 0 prints that.

SECRET = Path("/run/secrets/lab_key")  # where Compose and Kubernetes put a secret of this name by custom
DERIVED = (
    "key        derived from MASTER_PORT, without a secret: any process on this network could act as a rank. Set the"
    " same LAB_KEY on all ranks"
)


class Key(NamedTuple):
    """A key of 32 bytes, and whether strangers could have derived it."""

    secret: bytes
    derived: bool


def key_of(config: Config, agent_run: str = "", secret: Path = SECRET) -> Key:
    """Return the run's key for these settings; `agent_run` separates runs at one torchrun port.

    Raises ConfigError if there is a secret that cannot be read.
    """
    text = config.key.get_secret_value() if config.key is not None else _read(config.key_file or secret)
    what = f"given\0{text}" if text else f"derived\0{config.master_port}\0{agent_run}"
    return Key(hashlib.sha256(b"distlab key of a run\0" + what.encode("utf-8", "surrogateescape")).digest(), not text)


def _read(secret: Path) -> str:
    """Return the secret in a file; empty if the file is missing or empty."""
    try:
        text = read_key(secret) if secret.is_file() else ""
    except OSError as error:
        raise ConfigError([f"{secret}, the key of this run, cannot be read: {error.strerror}"]) from None
    if text and len(text) < MIN_KEY:
        raise ConfigError(
            [f"{secret}, the key of this run, has {len(text)} characters, expected: none, or at least {MIN_KEY}"]
        )
    return text


def derive_name(key: bytes, what: str) -> str:
    """Return a name that only owners of the key can compute, such as the prefix of a run's keys in a store."""
    return hmac.digest(key, what.encode(), "sha256")[:16].hex()
