"""The messages between a rank and rank 0's server, except requests to the store: one tagged union of structs.

A process must first prove the run's key (distlab/techniques/transport/handshake.py). Its messages are then decoded to
these types and bounds; anything else ends the connection.
"""

from typing import Annotated

from msgspec import Meta, Struct

from distlab.lab.config import MAX_WORLD_SIZE
from distlab.lab.report.records import Lost
from distlab.techniques.transport.store_server import Message, StoreRequest

PURPOSE = "rank 0's server"  # the purpose of the port, which both ends of a connection prove
MAX_TEXT = 1024  # characters of a sentence or a setting

Rank = Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]


class Claim(Struct, frozen=True):
    """A process that wants to be a rank, and the settings that it was started with."""

    rank: Rank
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
    run_mode: Text
    version: Text  # hash of the sources
    settings: dict[Text, Text] = {}  # by variable: settings that must be equal and differ from the default
    host: Text = ""
    pid: int = 0
    uid: Text = ""  # distinguishes two processes of one rank
    outward_ip: Text = ""
    next_port: Port = 0  # where it will serve if the run continues without rank 0; 0 if it would not


class Member(Struct, frozen=True):
    """A rank of the run: its address, and the port at which it would serve in place of rank 0.

    `life` distinguishes two processes that are the same rank one after the other.
    """

    rank: Rank
    host: Text
    ip: Text
    pid: int
    life: int = 0
    next_port: Port = 0


class Place(Struct, frozen=True):
    """The place of a rank in its run; `turn` counts its changes of place, the same on all ranks of a step.

    `calls` are the collectives that it has begun in this place: of two ranks in one place, the one with fewer is
    behind. `memory` is its share of the container's limit.
    """

    step: int = 0
    phase: Text = "start"
    turn: int = 0
    calls: int = 0
    in_phase_s: float = 0.0
    memory: float | None = None

    def __str__(self) -> str:
        return f"at step {self.step} in {self.phase}"


class Verdict(Struct, frozen=True):
    """The reason why ranks end, and the ranks that were lost."""

    exit_code: Annotated[int, Meta(ge=0, lt=256)]
    sentence: str
    lost: tuple[Lost, ...] = ()


# From a rank.


class Join(Message):
    """The first message; `token` is that of a run which this rank has left and wants to rejoin."""

    claim: Claim
    token: Text = ""


class Heartbeat(Message):
    """A heartbeat."""

    place: Place


class Ending(Message):
    """The end of this rank, with this verdict for the others; `stopped` by a signal, which they may get too."""

    verdict: Verdict
    stopped: bool


class Acknowledge(Message):
    """A rank's receipt for the verdict of the finished run, which it will return."""


class Killed(Message):
    """The process of a rank was killed, as its parent reports."""

    rank: Rank
    how: Text


class Leave(Message):
    """The normal end of this rank, or of its use of this server."""


class MayLeave(Message):
    """From now on the run continues without a rank that is lost."""


class Meet(Message):
    """A rank has left its group and meets the others to agree on the next view: `why`, and its state."""

    view: int
    members: list[tuple[Rank, int]]  # members of that view, ranks and their lives
    why: Text
    report: bytes


class Ask(Message):
    """A rank outside the view asks for admission."""

    request: bytes


class Plan(Message):
    """The first member's answer to Decide `number`."""

    number: int
    members: list[tuple[Rank, int]]
    plan: bytes


class Done(Message):
    """The view of this number has ended."""

    number: int


class Reborn(Message):
    """A process has forgotten its state, like one that was killed and restarted: it has another `life`."""

    life: int


# From the server.


class Waiting(Message):
    """Not all ranks are there yet."""

    sentence: Text


class Refused(Message):
    """The server refuses this process."""

    sentence: str


class Sealed(Message):
    """All ranks are there; in a run that continues: all ranks that it ever had, each as its last process."""

    token: Text
    run_id: Text
    members: list[Member]
    lost: tuple[int, ...] = ()
    host: int = 0  # whose process serves


class Places(Message):
    """The places of the ranks; also a heartbeat of the server."""

    places: list[tuple[Rank, Place]]


class RunEnded(Message):
    """The run ends with this verdict; `stopped` as in Ending."""

    verdict: Verdict
    stopped: bool


class RanksLost(Message):
    """Ranks were lost, and the run continues."""

    lost: list[Lost]
    sentence: str


class Returned(Message):
    """A lost rank is back, as this member."""

    member: Member


class Committed(Message):
    """All ranks have acknowledged the verdict: it is final."""


class Living(Message):
    """The living ranks, the requests of ranks outside, and why others meet; `done` as in Done."""

    lives: dict[Rank, int]
    requests: list[tuple[Rank, int, bytes]]
    met: dict[Rank, Text]
    done: int


class Decide(Message):
    """A request to the first member: all have met, with these reports; decide on view `number`."""

    number: int
    reports: list[tuple[Rank, int, bytes]]


class View(Message):
    """The members that continue, in their order, and the first one's plan."""

    number: int
    members: list[tuple[Rank, int]]
    plan: bytes


AboutViews = Meet | Ask | Plan | Done | Reborn
FromRank = Join | Heartbeat | Ending | Killed | Acknowledge | Leave | MayLeave | AboutViews | StoreRequest
FromServer = Waiting | Refused | Sealed | Places | RunEnded | RanksLost | Returned | Committed | Living | Decide | View
