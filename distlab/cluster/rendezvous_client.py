"""A rank on its way in: it asks rank 0's board to be let in, and says every 3 s who is being waited for."""

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from distlab.cluster import ClusterError
from distlab.cluster.address import Address, receive, send, something_listens
from distlab.cluster.authenticated_messages import Dropped, MessageVerifier, fault
from distlab.cluster.message_signer import ANYONE, MessageSigner
from distlab.cluster.rendezvous_server import OTHER_KEY, Claim
from distlab.config import Config

ASK_EVERY_S = 0.1
SAY_AFTER_S = 3.0  # what is waited for: most ranks come sooner
SAY_EVERY_S = 9.5
# A port that accepts connections, while nobody answers as the board for so long, is another program's. A dying
# earlier run frees it sooner.
FOREIGN_S = 4.0
FORGOTTEN_AFTER = 3  # unanswered questions: then the board may be another one
Board = tuple[Address, int]  # rank 0's address, and the port that it answers at


@dataclass
class RendezvousClient:
    """What one rank carries while it joins."""

    config: Config
    claim: Claim
    udp: socket.socket
    say: Callable[[str], None]
    deadline: float
    said_at: float
    key: bytes
    dropped: Dropped = field(init=False)
    seal: MessageSigner = field(init=False)
    opener: MessageVerifier = field(init=False)
    _board: bytes = ANYONE  # the number of the board, once it has greeted
    _unanswered: int = 0
    _pause_s: float = SAY_AFTER_S
    _sealed: str = ""  # the token of the run that is sealed
    _members: dict[int, dict[str, Any]] = field(default_factory=dict)  # of its members those that are known so far

    def __post_init__(self) -> None:
        self.dropped = Dropped(self.say)
        self.seal = MessageSigner(self.key)
        self.opener = MessageVerifier(self.key, self.seal.sender, self.dropped)
        if fault(self._question()):
            raise ClusterError("a setting of this rank is too long to be told to the others: 1024 characters at most")

    def progress(self, sentence: str) -> None:
        """Say what is being waited for, after `SAY_AFTER_S` and then every `SAY_EVERY_S`."""
        if sentence and time.monotonic() - self.said_at >= self._pause_s:
            self.said_at, self._pause_s = time.monotonic(), SAY_EVERY_S
            self.say(sentence)

    @property
    def expired(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def bound(self) -> str:
        return f"in {self.config.join_timeout_s:g} s (LAB_JOIN_TIMEOUT_S)"

    def _question(self) -> dict[str, Any]:
        return {"kind": "claim", "claim": asdict(self.claim), "knows": self._knows()}

    def _ask(self, board: Address, port: int) -> None:
        send(self.udp, self.seal.seal(self._question(), self._board), (board.ip, port))

    def ask_once(self, board: Address, port: int) -> dict[str, Any] | None:
        """The board's answer, or None within `ASK_EVERY_S`; raises its refusal."""
        self._ask(board, port)
        deadline = time.monotonic() + ASK_EVERY_S
        answer: dict[str, Any] | None = None
        while answer is None and time.monotonic() < deadline:
            time.sleep(0.005)
            for datagram, source in receive(self.udp):
                opened = self.opener.open(datagram, source)
                if opened is None:
                    continue
                if opened.message["kind"] == "greet":
                    self._board = bytes.fromhex(opened.message["greet"])
                    self._ask(board, port)
                else:
                    answer = opened.message
        self._unanswered = self._unanswered + 1 if answer is None else 0
        if self._unanswered >= FORGOTTEN_AFTER:
            self._board = ANYONE
        if answer is not None and "refuse" in answer:
            raise ClusterError(str(answer["refuse"]))
        return answer

    @property
    def meets_another_key(self) -> bool:
        """Whether anybody has answered with another key."""
        return self.dropped.by_fault[OTHER_KEY] > 0

    def ask_until_sealed(
        self, board_now: Callable[[], Board | None], store_port: int | None
    ) -> tuple[Address, dict[str, Any]]:
        """Ask the board that is where `board_now` says, anew before each question, until all ranks are there.

        `store_port` is the TCP port that rank 0 opens too, None under an agent.
        """
        foreign_since: float | None = None
        let_in_at: float | None = None  # when rank 0 last answered as one that waits for others with this rank
        while True:
            asked_at = time.monotonic()
            board = board_now()
            answer = self.ask_once(*board) if board is not None else None
            let_in_at = self._look_at_rank_0(answer, let_in_at, asked_at)
            if board is None:
                waiting = "waiting for rank 0"
            elif answer is None:
                listens = store_port is not None and something_listens(board[0], store_port)
                waiting = self._silence(*board, listens)
                foreign_since = (foreign_since or asked_at) if listens else None
                if foreign_since is not None and time.monotonic() - foreign_since > FOREIGN_S:
                    raise ClusterError(self.taken(*board))
            elif "sealed" in answer:
                self._learn(answer["sealed"])
                if self._knows() == self.claim.world_size:
                    return board[0], answer["sealed"] | {"members": list(self._members.values())}
                waiting, foreign_since = "", None
            else:
                waiting, foreign_since = str(answer.get("wait", "")), None
            # A board that answers has the word: its own bound is near, and every rank says its sentence.
            if time.monotonic() > self.deadline + (SAY_AFTER_S if answer else 0.0):
                raise ClusterError(f"rank {self.claim.rank} could not join {self.bound}: {waiting}")
            self.progress(waiting)
            time.sleep(max(0.0, asked_at + ASK_EVERY_S - time.monotonic()))

    def _learn(self, sealed: dict[str, Any]) -> None:
        """Take in the members of an answer: each brings the next MAX_MEMBERS."""
        if sealed["token"] != self._sealed:
            self._sealed, self._members = sealed["token"], {}
        self._members |= {member["rank"]: member for member in sealed["members"]}

    def _knows(self) -> int:
        """How many members are known from rank 0 on, without a gap."""
        return next(rank for rank in range(len(self._members) + 1) if rank not in self._members)

    def _look_at_rank_0(self, answer: dict[str, Any] | None, let_in_at: float | None, asked_at: float) -> float | None:
        """When rank 0 was last known to gather ranks, this one among them; raises ClusterError where it has gone."""
        now, lost_after_s = time.monotonic(), self.config.lost_after_s
        if answer is not None:
            wait = answer.get("wait")
            return now if wait is not None and (wait == "" or wait.startswith("waiting for rank")) else None
        if let_in_at is not None and now - asked_at > 1.0:  # this rank was frozen itself
            return now
        if let_in_at is not None and now - let_in_at > lost_after_s:
            raise ClusterError(f"rank 0 lost before all ranks had joined: no answer for {lost_after_s:g} s")
        return let_in_at

    def _silence(self, board: Address, port: int, listens: bool) -> str:
        where = f"{board.name} ({board.ip}):{port}"
        if self.claim.rank == 0:
            return (
                f"waiting for {where}: MASTER_ADDR is not this host, where rank 0 runs, and no other rank 0 answers"
                " there"
            )
        if self.meets_another_key:
            return f"waiting for rank 0: {where} answers with another key: set the same LAB_KEY on all ranks"
        if listens:
            return f"waiting for rank 0: {where} accepts connections and does not answer"
        return f"waiting for rank 0: nothing listens at {where}"

    def taken(self, address: Address, port: int) -> str:
        """The sentence about a port that is not this run's, the same on rank 0 and on those who ask."""
        if not self.meets_another_key:
            return (
                f"MASTER_PORT={port} on {address.name} is taken by another program, not by rank 0: choose another port"
            )
        return (
            f"MASTER_PORT={port} on {address.name} is held by a rank 0 with another key: set the same LAB_KEY on all"
            " ranks of a run, or choose another port for another run"
        )
