"""What the watches of a run tell each other: JSON datagrams from each rank's one UDP socket, to all other ranks at
once."""

from typing import Any

from workers.cluster.board_socket import receive, send
from workers.cluster.rendezvous import Cluster
from workers.cluster.verdict import Verdict

SENT_TIMES = 3  # words that nobody would ask for again


class Post:
    """The addresses of all other ranks; what comes from another run is not read."""

    def __init__(self, cluster: Cluster) -> None:
        self._socket, self._token = cluster.socket, cluster.token
        self.addresses = {
            rank: (member.ip, member.udp_port) for rank, member in cluster.members.items() if rank != cluster.rank
        }

    def tell(self, message: dict[str, Any]) -> None:
        """Send one message to every other rank."""
        for address in self.addresses.values():
            send(self._socket, message | {"token": self._token}, address)

    def tell_verdict(self, verdict: Verdict, stopped: bool) -> None:
        """Send the words that this rank leaves by, or parts from others."""
        for _ in range(SENT_TIMES):
            self.tell({"kind": "verdict", "verdict": verdict.to_json(), "stopped": stopped})

    def messages(self) -> list[dict[str, Any]]:
        """All that has come from ranks of this run."""
        return [message for message, _ in receive(self._socket) if message.get("token") == self._token]

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()
