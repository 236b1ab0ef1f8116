"""Rank 0's board: every rank asks it again and again to be let in, and it answers what is wrong or who is missing.

What has no key of the run never comes here (below). A pure state machine over claims, so that a doubled rank,
a differing setting or a fast restart is tested without a socket. Ranks ask over UDP rather than in a TCPStore: a
store's client cannot be bounded (its constructor waits for ever on a port that accepts and stays silent, its `check` on
a stopped server), and a rank 0 that cannot open its store can still say so. A rank asks every 0.1 s; one that has not
asked for `ASKING_S` is gone, and a newcomer may take its place.
"""

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distlab.cluster import name_ranks
from distlab.cluster.address import AT_ONCE, is_loopback, receive, send
from distlab.cluster.authenticated_messages import MAX_MEMBERS, Dropped, MessageVerifier
from distlab.cluster.message_signer import ANYONE, HEAD, MessageSigner
from distlab.config import Config, text_of

ASKING_S = 1.5
# A rank that restarts fast is no double of its dead predecessor: that one has to give a sign of life so long after the
# newcomer's first question. Signs that were on their way are older.
CROSSING_S = 0.6
# A stranger of a larger world is judged only so long after its first question: a second rank 0 may show by then that it
# belongs to another run.
STRANGER_S = 2.0
# What ranks may see differently: where they are, their paths, their bounds and their container's limits. The key is
# shown to nobody: who has another one is not heard.
OWN = {
    "rank", "world_size", "run_mode", "local_rank", "master_addr", "master_port", "key",
    "join_timeout_s", "lost_after_s", "collective_timeout_s", "cpus", "memory",
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One process that wants to be a rank, and what it was started with."""

    rank: int
    world_size: int
    run_mode: str
    version: str  # hash of the sources
    settings: dict[str, str] = field(default_factory=dict)  # by variable: what must agree and is not the default
    host: str = ""
    pid: int = 0
    uid: str = ""  # tells two processes of one rank apart
    outward_ip: str = ""

    @classmethod
    def of(cls, config: Config, version: str, outward_ip: str, contents: Mapping[str, str] | None = None) -> "Claim":
        """The claim of this process; `contents` are checksums of what the settings name, which ranks need alike."""
        assert config.rank is not None, "a rank is started with RANK"
        return cls(
            config.rank, config.world_size, config.run_mode, version, _shared(config) | dict(contents or {}),
            socket.gethostname(), os.getpid(), secrets.token_hex(4), outward_ip,
        )  # fmt: skip

    def differences(self, other: "Claim") -> str | None:
        """What differs between two claims of one run, both values each, or None."""
        pairs = [
            ("WORLD_SIZE", str(self.world_size), str(other.world_size)),
            ("RUN_MODE", self.run_mode, other.run_mode),
            ("the version of the code", self.version[:12], other.version[:12]),
        ]
        for name in sorted(self.settings | other.settings):
            pairs.append((name, self.settings.get(name, _default(name)), other.settings.get(name, _default(name))))
        ours, theirs = [[f"{name}={p[side]}" for name, *p in pairs if p[0] != p[1]] for side in (0, 1)]
        if not ours:
            return None
        return (
            f"{', '.join(ours)} on rank {self.rank} (host {self.host}) but {', '.join(theirs)} on rank {other.rank} "
            f"(host {other.host}): all ranks of a run need the same"
        ).replace("the version of the code=", "the version of the code is ")


def _shared(config: Config) -> dict[str, str]:
    """What all ranks need alike and this one sets: the mode's own variables too."""
    shared = {}
    for part in (config, config.options):
        for name, entry in type(part).model_fields.items():
            value = getattr(part, name)
            paths = isinstance(value, Path) or isinstance(entry.default, Path)
            if entry.alias and name not in OWN and not paths and value != entry.default:
                shared[entry.alias] = text_of(value)
    return shared


def _default(alias: str) -> str:
    defaults = [entry.default for entry in Config.model_fields.values() if entry.alias == alias]
    return text_of(defaults[0]) if defaults and defaults[0] is not None else "unset"


def twice(first: Claim, second: Claim) -> str:
    """The sentence about two processes of one rank."""
    hosts = [f"host {one.host} (pid {one.pid})" for one in (first, second)]
    return f"rank {first.rank} runs twice, on {hosts[0]} and on {hosts[1]}: give each its own RANK"


@dataclass(frozen=True)
class Member:
    """A rank of the sealed cluster: where it runs and where it hears heartbeats."""

    rank: int
    host: str
    ip: str
    udp_port: int
    pid: int


class RendezvousServer:
    """Who is here; `refusal` is the sentence that ends the start for all, once there is one."""

    def __init__(self, own: Claim, ip: str, udp_port: int, run_id: str, window_s: float) -> None:
        self.own, self.run_id, self.window_s = own, run_id, window_s
        self.refusal: str | None = None
        self.sealed: dict[str, Any] | None = None
        self._asking: dict[str, Claim] = {}  # by uid: all processes that ever asked
        self.frozen_until = 0.0  # rank 0 did not listen itself until then: nobody's silence counts before
        self._told: set[str] = set()  # those that have heard the refusal
        self._sealed_at = 0.0
        self._claims: dict[int, tuple[Claim, str, int]] = {own.rank: (own, ip, udp_port)}
        self._asked_at: dict[int, float] = {}
        self._first_asked: dict[str, float] = {}  # by uid: when a process asked for a place that was taken
        self._second_host: Claim | None = None  # a rank 0 that came after the seal: another run wants this port

    def missing(self, now: float) -> list[int]:
        """The ranks that are not asking to be let in."""
        here = {rank for rank, asked in self._asked_at.items() if now - asked <= ASKING_S} | {self.own.rank}
        return [rank for rank in range(self.own.world_size) if rank not in here]

    def silent(self, now: float, lost_after_s: float) -> list[int]:
        """The ranks that have asked, and for so long no more: a question is a heartbeat until all have met."""
        return sorted(
            rank for rank, asked in self._asked_at.items() if now - max(asked, self.frozen_until) > lost_after_s
        )

    def give_up(self, ranks: list[int], lost_after_s: float) -> None:
        """End the start for all: these have gone before all had joined, and nobody tells them."""
        self.refusal = f"{name_ranks(ranks)} lost before all ranks had joined: no question for {lost_after_s:g} s"
        self._told |= {self._claims[rank][0].uid for rank in ranks}

    def all_told(self) -> bool:
        """Whether every rank has heard the refusal, those of the largest WORLD_SIZE that anyone believes in."""
        world_size = max([self.own.world_size, *(claim.world_size for claim in self._asking.values())])
        ranks = {self._asking[uid].rank for uid in self._told} | {self.own.rank}
        return self._told == set(self._asking) and ranks >= set(range(world_size))

    def unaware(self, started: set[int]) -> set[int]:
        """The members that neither have heard the refusal here nor are `started`: still asking, or opening the
        store."""
        heard = {claim.rank for claim, _, _ in self._claims.values() if claim.uid in self._told}
        return set(self._claims) - {self.own.rank} - heard - started

    def answer(
        self,
        claim: Claim,
        ip: str,
        udp_port: int,
        now: float,
        heard_at: Mapping[int, float] | None = None,
        knows: int = 0,
    ) -> dict[str, Any]:
        """The reply to one claim: `refuse`, `wait` or `sealed`, with the members that follow the first `knows`.

        `heard_at` is when each rank was heard since the seal.
        """
        self._asking[claim.uid] = claim
        holder = self._claims.get(claim.rank)
        if self.refusal is None and holder is not None and holder[0].uid == claim.uid:
            self._asked_at[claim.rank] = now
        elif self.refusal is None and self.sealed is None:
            reply = self._newcomer(claim, ip, udp_port, now)
            if reply:
                return reply
        elif self.refusal is None:
            reply = self._latecomer(claim, now, heard_at or self._asked_at)
            if reply:
                return reply
        if self.refusal is not None:
            self._told.add(claim.uid)
            return {"refuse": self.refusal}
        if self.sealed is not None:
            return {"sealed": self.sealed | {"members": self.sealed["members"][knows : knows + MAX_MEMBERS]}}
        return {"wait": f"waiting for {name_ranks(self.missing(now))}"} if self.missing(now) else {"wait": ""}

    def _newcomer(self, claim: Claim, ip: str, udp_port: int, now: float) -> dict[str, Any] | None:
        """One that asks for the first time, before the seal: it is let in, or all are refused."""
        fault = claim.differences(self.own)
        holder = self._claims.get(claim.rank)
        if fault is None and holder is not None:
            first_asked = self._first_asked.setdefault(claim.uid, now)
            last_sign = now if claim.rank == self.own.rank else self._asked_at[claim.rank]
            if last_sign > first_asked + CROSSING_S or claim.rank == self.own.rank:
                fault = twice(holder[0], claim)
            elif now - last_sign <= ASKING_S:
                return {"wait": f"waiting for the earlier rank {claim.rank} to respond, from host {holder[0].host}"}
        if fault is None:
            self._claims[claim.rank], self._asked_at[claim.rank] = (claim, ip, udp_port), now
        else:
            self.refusal = fault
        return None

    def _latecomer(self, claim: Claim, now: float, heard_at: Mapping[int, float]) -> dict[str, Any] | None:
        """One that comes after the seal, when the run is whole: it alone is refused, or waits for the run's end.

        But one of a larger world shows that the ranks were not all meant to be this few: that ends the start for all.
        """
        first_asked = self._first_asked.setdefault(claim.uid, now)
        fault = claim.differences(self.own)
        if claim.rank == self.own.rank:
            self._second_host = claim
            return {
                "refuse": (
                    f"this port is rank 0's of the run {self.run_id}, on host {self.own.host} (pid {self.own.pid}):"
                    " choose another MASTER_PORT for another run"
                )
            }
        if claim.rank in self._claims:
            holder = self._claims[claim.rank][0]
            if fault is None and heard_at.get(claim.rank, now) <= first_asked + CROSSING_S:
                # Its predecessor has just died: this run is about to end, the next begins.
                return {
                    "wait": (
                        f"waiting for the end of an earlier run, which had its own rank {claim.rank} on host"
                        f" {holder.host}"
                    )
                }
            return {"refuse": fault or twice(holder, claim)}
        if now - first_asked <= STRANGER_S:
            return {"wait": f"waiting for rank 0 to decide about {fault}"}
        of_another_run = self._second_host is not None and self._second_host.world_size == claim.world_size
        if of_another_run or first_asked - self._sealed_at > self.window_s:
            return {"refuse": str(fault)}  # it does not belong to this start: the run goes on without it
        self.refusal = fault
        return None

    def seal(self, token: str, store_port: int, now: float) -> dict[int, Member]:
        """Fix the members and tell them, with the port of the store, to all who ask; every rank must be here."""
        assert len(self._claims) == self.own.world_size, "only a whole cluster is sealed"
        members = {}
        on_loopback = all(is_loopback(ip) for _, ip, _ in self._claims.values())
        for rank, (claim, ip, udp_port) in sorted(self._claims.items()):
            # A rank on rank 0's own machine may have come by 127.0.0.1, where ranks of other machines do not find it.
            reachable = ip if on_loopback or not is_loopback(ip) else claim.outward_ip or ip
            members[rank] = Member(rank, claim.host, reachable, udp_port, claim.pid)
        self._sealed_at = now
        self.sealed = {
            "token": token,
            "run_id": self.run_id,
            "store_port": store_port,
            "members": [asdict(member) for member in members.values()],
        }
        return members


# The socket at which rank 0's board is asked, on MASTER_PORT: what is not sealed with the key of the run is dropped.
#
# An asker does not know whom it speaks to: it *knocks*, with a claim for anyone, and is greeted with the board's
# number. Only a claim for that number counts, so that one which was recorded in another run does not. Nothing of the
# lab's speaks TCP there: connections are closed as they come, and the port is held so that no other run can have it.

RESEND_S = 0.5  # a lost reply is asked for again within this time
OTHER_KEY = "sealed with another key"


class RendezvousSocket:
    """The board and its sockets: answers those who ask, whenever `serve` is called. `guard` holds the TCP port."""

    def __init__(
        self,
        board: RendezvousServer,
        udp: socket.socket,
        key: bytes,
        dropped: Dropped,
        guard: socket.socket | None = None,
    ) -> None:
        self.board, self.udp, self.guard = board, udp, guard
        self._seal = MessageSigner(key)
        self._dropped = dropped
        self._opener = MessageVerifier(key, self._seal.sender, dropped)
        self._opener.know_run(ANYONE)
        if guard is not None:
            guard.setblocking(False)

    def serve(self, heard_at: Mapping[int, float] | None = None) -> None:
        """Answer all claims that have come; `heard_at` as in Board.answer."""
        for datagram, address in receive(self.udp):
            others = self._dropped.by_fault[OTHER_KEY]
            opened = self._opener.open(datagram, address)
            if opened is not None and opened.message["kind"] == "claim":
                if opened.audience == ANYONE:
                    self._reply({"greet": self._seal.sender.hex()}, opened.sender, address)
                else:
                    claim = Claim(**opened.message["claim"])
                    answer = self.board.answer(claim, *address, time.monotonic(), heard_at, opened.message["knows"])
                    self._reply(answer, opened.sender, address)
            elif opened is None and self._dropped.by_fault[OTHER_KEY] > others:
                self._show_key(datagram, address)
        self._turn_away()

    def _reply(self, answer: dict[str, object], asker: bytes, address: tuple[str, int]) -> None:
        send(self.udp, self._seal.seal({"kind": next(iter(answer)), **answer}, asker), address)

    def _show_key(self, datagram: bytes, address: tuple[str, int]) -> None:
        """Let one who knocks with another key see that it is another: it can read no more than that.

        Only a knock is answered, with no knock and less than came: two boards never answer each other.
        """
        _, _, asker, audience, _ = HEAD.unpack_from(datagram)
        shown = self._seal.seal({}, asker)
        if audience == ANYONE != asker and len(shown) < len(datagram):
            send(self.udp, shown, address)

    def _turn_away(self) -> None:
        """Close what has connected; who had sent something is counted. Ranks that only look whether the port is held
        send nothing."""
        for _ in range(AT_ONCE if self.guard is not None else 0):
            assert self.guard is not None
            try:
                connection, address = self.guard.accept()
            except OSError:
                return
            with connection:
                try:
                    said = connection.recv(1, socket.MSG_DONTWAIT)
                except OSError:
                    continue
            if said:
                self._dropped.turned_away("not sealed", (str(address[0]), int(address[1])))

    def linger(self, at_most_s: float) -> None:
        """Stay until every rank has heard the refusal, or for `at_most_s`."""
        deadline = time.monotonic() + at_most_s
        told_at = None
        while time.monotonic() < deadline:
            self.serve()
            if told_at is None and self.board.all_told():
                told_at = time.monotonic()
            if told_at is not None and time.monotonic() - told_at > RESEND_S:
                return
            time.sleep(0.02)
