"""Decide which of the processes that claim to be ranks rank 0's server admits to a run.

A pure state machine over connections and time, so that duplicate ranks, differing settings and fast restarts are tested
without a socket. Until all are there, a fault ends the start for all ranks, with the same sentence. After that the run
is complete: a late process is refused alone, or waits for the end of a run whose rank it replaces.
"""

import os
import secrets
import socket
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from distlab.lab.cluster import name_ranks
from distlab.lab.cluster.address import is_loopback
from distlab.lab.cluster.messages import MAX_TEXT, Claim, Member
from distlab.lab.config import Config, text_of

# A rank that restarts fast is no duplicate of its dead predecessor, unless that one sends a sign of life this long
# after the newcomer joined. Earlier signs may have been in transit.
CROSSING_S = 0.6
# A stranger of a larger world is judged only this long after it joined: by then a second rank 0 may show that it
# belongs to another run.
STRANGER_S = 2.0
# What may differ between ranks: their location, paths, timeouts and container limits. The key is never sent: a rank
# with another key is not admitted.
OWN = {
    "rank", "world_size", "run_mode", "local_rank", "master_addr", "master_port", "key",
    "join_timeout_s", "lost_after_s", "collective_timeout_s", "cpus", "memory",
}  # fmt: skip


def claim_of(
    config: Config, version: str, outward_ip: str, contents: Mapping[str, str] | None = None,
    listening: socket.socket | None = None,
) -> Claim:  # fmt: skip
    """Return the claim of this process; `contents` are checksums of the files that settings name, equal on all ranks,
    and `listening` is where it will serve if the run continues without rank 0."""
    assert config.rank is not None, "a rank is started with RANK"
    settings = shared_settings(config) | dict(contents or {})
    return Claim(
        config.rank, config.world_size, config.run_mode, version, settings,
        socket.gethostname(), os.getpid(), secrets.token_hex(4), outward_ip,
        listening.getsockname()[1] if listening is not None else 0,
    )  # fmt: skip


def too_long(claim: Claim) -> bool:
    """Return whether a setting is longer than a server reads."""
    return any(len(each) > MAX_TEXT for each in (claim.run_mode, *claim.settings, *claim.settings.values()))


def shared_settings(config: Config) -> dict[str, str]:
    """Return the settings of this rank that must be equal on all ranks, the mode's own variables included."""
    shared = {}
    for part in (config, config.options):
        for name, entry in type(part).model_fields.items():
            value = getattr(part, name)
            paths = isinstance(value, Path) or isinstance(entry.default, Path)
            if entry.alias and name not in OWN and not paths and value != entry.default:
                shared[entry.alias] = text_of(value).encode(errors="replace").decode()
    return shared


def default_of(alias: str) -> str:
    defaults = [entry.default for entry in Config.model_fields.values() if entry.alias == alias]
    return text_of(defaults[0]) if defaults and defaults[0] is not None else "unset"


def differences(one: Claim, other: Claim) -> str:
    """Return what differs between two claims of one run, with both values; empty if nothing does."""
    pairs = [
        ("WORLD_SIZE", str(one.world_size), str(other.world_size)),
        ("RUN_MODE", one.run_mode, other.run_mode),
        ("the version of the code", one.version[:12], other.version[:12]),
    ]
    for name in sorted(one.settings | other.settings):
        pairs.append((name, one.settings.get(name, default_of(name)), other.settings.get(name, default_of(name))))
    ours, theirs = [[f"{name}={p[side]}" for name, *p in pairs if p[0] != p[1]] for side in (0, 1)]
    if not ours:
        return ""
    return (
        f"{', '.join(ours)} on rank {one.rank} (host {one.host}) but {', '.join(theirs)} on rank {other.rank} "
        f"(host {other.host}): all ranks of a run need the same"
    ).replace("the version of the code=", "the version of the code is ")


def twice(first: Claim, second: Claim) -> str:
    """Return the sentence about two processes of one rank."""
    hosts = [f"host {one.host} (pid {one.pid})" for one in (first, second)]
    return f"rank {first.rank} runs twice, on {hosts[0]} and on {hosts[1]}: give each its own RANK"


@dataclass
class Asker:
    """A process that asks for admission, through its connection `peer`."""

    peer: Hashable
    claim: Claim
    ip: str
    life: int
    asked_at: float
    heard_at: float
    ended_at: float | None = None


@dataclass(frozen=True)
class Reply:
    """The answer to a connection: wait, or refused."""

    peer: Hashable
    sentence: str
    refused: bool


class Admission:
    """The admission of processes to a run; `own` is rank 0's claim, `refusal` the sentence that ends the start for all.
    For `window_s` after the seal a rank of a larger world still ends it."""

    def __init__(self, own: Claim, run_id: str, window_s: float, lost_after_s: float) -> None:
        self.own, self.run_id, self.window_s, self.lost_after_s = own, run_id, window_s, lost_after_s
        self.refusal = ""
        self.members: dict[int, Asker] = {}
        self.sealed_at: float | None = None
        self._waiting: list[Asker] = []  # its rank is taken, or it is late
        self._second_host: Claim | None = None  # a rank 0 that asked after the seal: another run needs this port
        self._largest = own.world_size
        self._told: set[int] = set()

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        here = {rank for rank, asker in self.members.items() if asker.ended_at is None}
        return [rank for rank in range(self.own.world_size) if rank not in here]

    def ask(self, peer: Hashable, claim: Claim, ip: str, now: float, life: int = 0) -> None:
        """Record that a process asks for its place."""
        asker = Asker(peer, claim, ip, life, now, now)
        self._largest = max(self._largest, claim.world_size)
        fault = differences(claim, self.own)
        holder = self.members.get(claim.rank)
        if self.sealed_at is not None:
            self._second_host = claim if claim.rank == 0 else self._second_host
            self._waiting.append(asker)
        elif self.refusal or fault:
            self.refusal = self.refusal or fault
            self._waiting.append(asker)
        elif claim.rank == 0 and claim.uid != self.own.uid:
            self.refusal = twice(self.own, claim)
            self._waiting.append(asker)
        elif holder is not None and holder.ended_at is None:
            self._waiting.append(asker)
        else:
            self.members[claim.rank] = asker

    def hear(self, peer: Hashable, now: float) -> None:
        """Record a sign of life of a connection."""
        for asker in (*self.members.values(), *self._waiting):
            if asker.peer == peer:
                asker.heard_at = now

    def end(self, peer: Hashable, now: float) -> None:
        """Record that a connection has ended."""
        self._waiting = [asker for asker in self._waiting if asker.peer != peer]
        for asker in self.members.values():
            if asker.peer == peer:
                asker.ended_at = now

    def forgive(self, now: float) -> None:
        """Ignore all silence until now, because this process itself did not run."""
        for asker in (*self.members.values(), *self._waiting):
            asker.heard_at = now
            asker.ended_at = None if asker.ended_at is None else now

    def look(self, now: float) -> list[Reply]:
        """Return the reply that each connection gets now; admitted members only get the ranks that are missing."""
        if self.sealed_at is not None:
            return [reply for asker in self._waiting if (reply := self._late(asker, now, self.sealed_at))]
        for asker in list(self._waiting) if not self.refusal else []:
            self._fill(asker, now)
        self._give_up(now)
        askers = [*(each for each in self.members.values() if each.ended_at is None), *self._waiting]
        if self.refusal:
            self._told |= {asker.claim.rank for asker in askers}
            return [Reply(asker.peer, self.refusal, True) for asker in askers]
        missing = self.missing()
        sentence = f"waiting for {name_ranks(missing)}" if missing else ""
        waits = {each.claim.uid: f"waiting for the earlier rank {each.claim.rank} to respond" for each in self._waiting}
        return [Reply(asker.peer, waits.get(asker.claim.uid, sentence), False) for asker in askers]

    def _fill(self, asker: Asker, now: float) -> None:
        """Process a second claim to a rank that is already here: from its duplicate, or from its successor."""
        holder = self.members[asker.claim.rank]
        if holder.ended_at is not None or now - holder.heard_at > self.lost_after_s:
            self.members[asker.claim.rank] = asker
            self._waiting.remove(asker)
        elif holder.heard_at > asker.asked_at + CROSSING_S:
            self.refusal = twice(holder.claim, asker.claim)

    def _give_up(self, now: float) -> None:
        """End the start if a rank has joined and left: the others learn it from here only."""
        ended = {rank: asker.ended_at for rank, asker in self.members.items() if asker.ended_at is not None}
        gone = sorted(rank for rank, at in ended.items() if now - at > self.lost_after_s)
        silent = sorted(
            rank for rank, asker in self.members.items()
            if asker.ended_at is None and now - asker.heard_at > self.lost_after_s
        )  # fmt: skip
        if not self.refusal and (gone or silent):
            why = "its connection ended" if gone else f"no heartbeat for {self.lost_after_s:g} s"
            self.refusal = f"{name_ranks(gone or silent)} lost before all ranks had joined: {why}"

    def _late(self, asker: Asker, now: float, sealed_at: float) -> Reply | None:
        """Return the reply to a process that asks after the seal, when the run is complete.

        One of a larger world shows that more ranks were meant to start: that ends the start for all.
        """
        claim, fault = asker.claim, differences(asker.claim, self.own)
        if claim.rank == 0:
            of = f"rank 0's of the run {self.run_id}, on host {self.own.host} (pid {self.own.pid})"
            return Reply(asker.peer, f"this port is {of}: choose another MASTER_PORT for another run", True)
        holder = self.members.get(claim.rank)
        if holder is not None:
            lives = holder.ended_at is None and holder.heard_at > asker.asked_at + CROSSING_S
            if lives or fault:
                return Reply(asker.peer, fault or twice(holder.claim, claim), True)
            waits = f"waiting for the end of an earlier run, which had its own rank {claim.rank} on host"
            return Reply(asker.peer, f"{waits} {holder.claim.host}", False)
        if now - asker.asked_at <= STRANGER_S:
            return Reply(asker.peer, f"waiting for rank 0 to decide about {fault}", False)
        of_another_run = self._second_host is not None and self._second_host.world_size == claim.world_size
        if not of_another_run and asker.asked_at - sealed_at <= self.window_s:
            self.refusal = fault
        return Reply(asker.peer, fault, True)

    def all_told(self) -> bool:
        """Return whether every rank has received the refusal, up to the largest WORLD_SIZE in any claim."""
        return self._told | {0} >= set(range(self._largest))

    def seal(self, now: float) -> list[Member]:
        """Fix the members, once none is missing."""
        assert not self.missing(), "only a whole cluster is sealed"
        self.sealed_at = now
        return list(self._members())

    def _members(self) -> Iterator[Member]:
        on_loopback = all(is_loopback(asker.ip) for asker in self.members.values())
        for rank, asker in sorted(self.members.items()):
            claim, ip = asker.claim, asker.ip
            # A rank on rank 0's machine may connect from 127.0.0.1, where ranks of other machines cannot reach it.
            reachable = ip if on_loopback or not is_loopback(ip) else claim.outward_ip or ip
            yield Member(rank, claim.host, reachable, claim.pid, asker.life, claim.next_port)
