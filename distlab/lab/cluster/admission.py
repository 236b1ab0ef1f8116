"""Decide which of the processes that claim to be ranks rank 0's server admits to a run.

A pure state machine over connections and time, so that duplicate ranks, differing settings and fast restarts are tested
without a socket. Until all ranks have joined, a fault cancels the start for all of them, with the same sentence. After
that the run is complete: a late process alone is refused, or it waits for the end of the run whose rank it replaces.
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
IN_TRANSIT_S = 0.6
# A stranger of a larger world is judged only this long after it joined: by then a second rank 0 may show that it
# belongs to another run.
STRANGER_S = 2.0
# What may differ between ranks: their location, paths, timeouts and container limits. The key is never sent: a rank
# with another key is not admitted.
MAY_DIFFER = {
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
            if entry.alias and name not in MAY_DIFFER and not paths and value != entry.default:
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
    first, second = [[f"{name}={p[side]}" for name, *p in pairs if p[0] != p[1]] for side in (0, 1)]
    if not first:
        return ""
    return (
        f"{', '.join(first)} on rank {one.rank} (host {one.host}) but {', '.join(second)} on rank {other.rank} "
        f"(host {other.host}): all ranks of a run need the same"
    ).replace("the version of the code=", "the version of the code is ")


def duplicate_rank(first: Claim, second: Claim) -> str:
    """Return the error for two processes with one rank."""
    hosts = [f"host {one.host} (pid {one.pid})" for one in (first, second)]
    return f"rank {first.rank} runs twice, on {hosts[0]} and on {hosts[1]}: give each its own RANK"


@dataclass
class Applicant:
    """A process that asks for admission, through its connection `peer`."""

    peer: Hashable
    claim: Claim
    ip: str
    life: int
    requested_at: float
    last_heartbeat_at: float
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
        self.members: dict[int, Applicant] = {}
        self.sealed_at: float | None = None
        self._waiting: list[Applicant] = []  # another process has the rank, or it is late
        self._second_host: Claim | None = None  # a rank 0 that asked after the seal: another run needs this port
        self._largest = own.world_size
        self._informed: set[int] = set()

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        present = {rank for rank, applicant in self.members.items() if applicant.ended_at is None}
        return [rank for rank in range(self.own.world_size) if rank not in present]

    def request(self, peer: Hashable, claim: Claim, ip: str, now: float, life: int = 0) -> None:
        """Record that a process asks to join."""
        applicant = Applicant(peer, claim, ip, life, now, now)
        self._largest = max(self._largest, claim.world_size)
        fault = differences(claim, self.own)
        holder = self.members.get(claim.rank)
        if self.sealed_at is not None:
            self._second_host = claim if claim.rank == 0 else self._second_host
            self._waiting.append(applicant)
        elif self.refusal or fault:
            self.refusal = self.refusal or fault
            self._waiting.append(applicant)
        elif claim.rank == 0 and claim.uid != self.own.uid:
            self.refusal = duplicate_rank(self.own, claim)
            self._waiting.append(applicant)
        elif holder is not None and holder.ended_at is None:
            self._waiting.append(applicant)
        else:
            self.members[claim.rank] = applicant

    def on_heartbeat(self, peer: Hashable, now: float) -> None:
        """Record a sign of life of a connection."""
        for applicant in (*self.members.values(), *self._waiting):
            if applicant.peer == peer:
                applicant.last_heartbeat_at = now

    def end(self, peer: Hashable, now: float) -> None:
        """Record that a connection has ended."""
        self._waiting = [applicant for applicant in self._waiting if applicant.peer != peer]
        for applicant in self.members.values():
            if applicant.peer == peer:
                applicant.ended_at = now

    def restart_timeouts(self, now: float) -> None:
        """Ignore all silence until now, because this process itself did not run."""
        for applicant in (*self.members.values(), *self._waiting):
            applicant.last_heartbeat_at = now
            applicant.ended_at = None if applicant.ended_at is None else now

    def replies(self, now: float) -> list[Reply]:
        """Return the reply that each connection gets now; admitted members only get the ranks that are missing."""
        if self.sealed_at is not None:
            return [reply for applicant in self._waiting if (reply := self._late_reply(applicant, now, self.sealed_at))]
        for applicant in list(self._waiting) if not self.refusal else []:
            self._resolve_second_claim(applicant, now)
        self._check_losses(now)
        applicants = [*(each for each in self.members.values() if each.ended_at is None), *self._waiting]
        if self.refusal:
            self._informed |= {applicant.claim.rank for applicant in applicants}
            return [Reply(applicant.peer, self.refusal, True) for applicant in applicants]
        missing = self.missing()
        sentence = f"waiting for {name_ranks(missing)}" if missing else ""
        waits = {each.claim.uid: f"waiting for the earlier rank {each.claim.rank} to answer" for each in self._waiting}
        return [Reply(applicant.peer, waits.get(applicant.claim.uid, sentence), False) for applicant in applicants]

    def _resolve_second_claim(self, applicant: Applicant, now: float) -> None:
        """Process a second claim to a rank that has joined: from a duplicate, or from a restarted process."""
        holder = self.members[applicant.claim.rank]
        if holder.ended_at is not None or now - holder.last_heartbeat_at > self.lost_after_s:
            self.members[applicant.claim.rank] = applicant
            self._waiting.remove(applicant)
        elif holder.last_heartbeat_at > applicant.requested_at + IN_TRANSIT_S:
            self.refusal = duplicate_rank(holder.claim, applicant.claim)

    def _check_losses(self, now: float) -> None:
        """Cancel the start if a rank has joined and was lost, because no watchdog reports that yet."""
        ended = {rank: applicant.ended_at for rank, applicant in self.members.items() if applicant.ended_at is not None}
        disconnected = sorted(rank for rank, at in ended.items() if now - at > self.lost_after_s)
        silent = sorted(
            rank for rank, applicant in self.members.items()
            if applicant.ended_at is None and now - applicant.last_heartbeat_at > self.lost_after_s
        )  # fmt: skip
        if not self.refusal and (disconnected or silent):
            why = "its connection ended" if disconnected else f"no heartbeat for {self.lost_after_s:g} s"
            self.refusal = f"{name_ranks(disconnected or silent)} lost before all ranks had joined: {why}"

    def _late_reply(self, applicant: Applicant, now: float, sealed_at: float) -> Reply | None:
        """Return the reply to a process that asks after the seal, when the run is complete.

        One of a larger world shows that more ranks were meant to start: that ends the start for all.
        """
        claim, fault = applicant.claim, differences(applicant.claim, self.own)
        if claim.rank == 0:
            user = f"the run {self.run_id}, whose rank 0 is on host {self.own.host} (pid {self.own.pid})"
            return Reply(applicant.peer, f"this port is used by {user}: choose another MASTER_PORT", True)
        holder = self.members.get(claim.rank)
        if holder is not None:
            lives = holder.ended_at is None and holder.last_heartbeat_at > applicant.requested_at + IN_TRANSIT_S
            if lives or fault:
                return Reply(applicant.peer, fault or duplicate_rank(holder.claim, claim), True)
            waiting = f"waiting for the end of an earlier run, whose rank {claim.rank} is on host"
            return Reply(applicant.peer, f"{waiting} {holder.claim.host}", False)
        if now - applicant.requested_at <= STRANGER_S:
            return Reply(applicant.peer, f"waiting for rank 0 to decide about {fault}", False)
        of_another_run = self._second_host is not None and self._second_host.world_size == claim.world_size
        if not of_another_run and applicant.requested_at - sealed_at <= self.window_s:
            self.refusal = fault
        return Reply(applicant.peer, fault, True)

    def all_informed(self) -> bool:
        """Return whether every rank has received the refusal, up to the largest WORLD_SIZE in any claim."""
        return self._informed | {0} >= set(range(self._largest))

    def seal(self, now: float) -> list[Member]:
        """Fix the members, once none is missing."""
        assert not self.missing(), "a rank is missing"
        self.sealed_at = now
        return list(self._members())

    def _members(self) -> Iterator[Member]:
        on_loopback = all(is_loopback(applicant.ip) for applicant in self.members.values())
        for rank, applicant in sorted(self.members.items()):
            claim, ip = applicant.claim, applicant.ip
            # A rank on rank 0's machine may connect from 127.0.0.1, where ranks of other machines cannot reach it.
            reachable = ip if on_loopback or not is_loopback(ip) else claim.outward_ip or ip
            yield Member(rank, claim.host, reachable, claim.pid, applicant.life, claim.next_port)
