"""A rank on its way in: it asks rank 0's board to be let in, and says every 3 s who is being waited for."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.cluster import ClusterError
from workers.cluster.address import Address, something_listens
from workers.cluster.board import Claim
from workers.cluster.board_socket import ask, receive
from workers.config import Config

ASK_EVERY_S = 0.1
SAY_EVERY_S = 3.0
# A port that accepts connections, while nobody answers as the board for so long, is another program's. A dying
# earlier run frees it sooner.
FOREIGN_S = 4.0


@dataclass
class Arrival:
    """What one rank carries while it joins."""

    config: Config
    claim: Claim
    udp: socket.socket
    say: Callable[[str], None]
    deadline: float
    said_at: float

    def progress(self, sentence: str) -> None:
        """Say what is being waited for, every `SAY_EVERY_S`."""
        if sentence and time.monotonic() - self.said_at >= SAY_EVERY_S:
            self.said_at = time.monotonic()
            self.say(sentence)

    @property
    def expired(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def bound(self) -> str:
        return f"in {self.config.join_timeout_s:g} s (LAB_JOIN_TIMEOUT_S)"

    def ask_once(self, board: Address, port: int) -> dict[str, Any] | None:
        """The board's answer, or None within `ASK_EVERY_S`; raises its refusal."""
        ask(self.udp, self.claim, (board.ip, port))
        deadline = time.monotonic() + ASK_EVERY_S
        answer: dict[str, Any] | None = None
        while answer is None and time.monotonic() < deadline:
            time.sleep(0.005)
            for message, _ in receive(self.udp):
                if message.get("to") == self.claim.uid:
                    answer = message
        if answer is not None and "refuse" in answer:
            raise ClusterError(str(answer["refuse"]))
        return answer

    def ask_until_sealed(self, board: Address, port: int, store_port: int | None) -> dict[str, Any]:
        """Ask until all ranks are there; `store_port` is the TCP port that rank 0 opens too, None under an agent."""
        foreign_since: float | None = None
        while True:
            asked_at = time.monotonic()
            answer = self.ask_once(board, port)
            if answer is None:
                listens = store_port is not None and something_listens(board, store_port)
                waiting = self._silence(board, port, listens)
                foreign_since = (foreign_since or asked_at) if listens else None
                if foreign_since is not None and time.monotonic() - foreign_since > FOREIGN_S:
                    raise ClusterError(taken(board, port))
            elif "sealed" in answer:
                sealed: dict[str, Any] = answer["sealed"]
                return sealed
            else:
                waiting, foreign_since = str(answer.get("wait", "")), None
            # A board that answers has the word: its own bound is near, and every rank says its sentence.
            if time.monotonic() > self.deadline + (SAY_EVERY_S if answer else 0.0):
                raise ClusterError(f"rank {self.claim.rank} was not let in {self.bound}: {waiting}")
            self.progress(waiting)
            time.sleep(max(0.0, asked_at + ASK_EVERY_S - time.monotonic()))

    def _silence(self, board: Address, port: int, listens: bool) -> str:
        """What to say while nobody answers."""
        where = f"{board.name} ({board.ip}):{port}"
        if self.claim.rank == 0:
            return (
                f"waiting for {where}: MASTER_ADDR is not this host, where rank 0 runs, and no other rank 0 answers"
                " there"
            )
        if listens:
            return f"waiting for rank 0: {where} accepts connections and does not answer"
        return f"waiting for rank 0: nothing listens at {where}"


def taken(address: Address, port: int) -> str:
    """The sentence about a port that another program holds, the same on rank 0 and on those who ask."""
    return f"MASTER_PORT={port} on {address.name} is taken by another program, not by rank 0: choose another port"
