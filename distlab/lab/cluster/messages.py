"""What a rank and rank 0's server send each other, beside the requests of the store: one tagged union of structs.

Only a process that has proven the key of the run is listened to (distlab/techniques/transport/handshake.py). What it
sends is decoded to these types and bounds; anything else ends its connection.
"""

from typing import Annotated

from msgspec import Meta, Struct

from distlab.lab.config import MAX_WORLD_SIZE
from distlab.lab.report.records import Lost
from distlab.techniques.transport.store_server import Message, StoreRequest

PURPOSE = "rank 0's server"  # what the port is for, which both ends of a connection prove
MAX_TEXT = 1024  # characters of a sentence or a setting

Rank = Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]


class Claim(Struct, frozen=True):
    """One process that wants to be a rank, and what it was started with."""

    rank: Rank
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
    run_mode: Text
    version: Text  # hash of the sources
    settings: dict[Text, Text] = {}  # by variable: what must agree and is not the default
    host: Text = ""
    pid: int = 0
    uid: Text = ""  # tells two processes of one rank apart
    outward_ip: Text = ""
    next_port: Port = 0  # where it will serve if the run goes on without rank 0; 0 where it would not


class Member(Struct, frozen=True):
    """A rank of the run: where it runs, and at which port it would serve in rank 0's place.

    `life` tells two processes apart that are the same rank one after the other.
    """

    rank: Rank
    host: Text
    ip: Text
    pid: int
    life: int = 0
    next_port: Port = 0


class Place(Struct, frozen=True):
    """Where a rank is in its run; `turn` counts its changes of place, the same on all ranks of a step.

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
    """Why ranks end, and which ranks were lost."""

    exit_code: Annotated[int, Meta(ge=0, lt=256)]
    sentence: str
    lost: tuple[Lost, ...] = ()


# From a rank.


class Join(Message):
    """The first message; `token` is that of a run which this rank has left and wants to rejoin."""

    claim: Claim
    token: Text = ""


class Beat(Message):
    """A heartbeat."""

    place: Place


class Ending(Message):
    """This rank ends by itself, and the others with this verdict; `stopped` by a signal, which they may get too."""

    verdict: Verdict
    stopped: bool


class Acknowledge(Message):
    """This rank has the verdict of the finished run, and will return it."""


class Killed(Message):
    """The process of a rank was killed, as whoever started it knows."""

    rank: Rank
    how: Text


class Leave(Message):
    """This rank has come to its normal end, or goes on without the server."""


class MayLeave(Message):
    """From now on the run goes on without a rank that is lost."""


class Meet(Message):
    """This rank has left its group, and meets the others to agree on the next view: `why`, and what it has."""

    view: int
    members: list[tuple[Rank, int]]  # of that view, ranks and their lives
    why: Text
    report: bytes


class Ask(Message):
    """This rank is outside, and asks to be taken in."""

    wish: bytes


class Plan(Message):
    """The first member's answer to Decide `number`."""

    number: int
    members: list[tuple[Rank, int]]
    plan: bytes


class Done(Message):
    """The view of this number has come to its end."""

    number: int


class Reborn(Message):
    """This process has forgotten all that it had, as one that was killed and started again: another `life`."""

    life: int


# From the server.


class Waiting(Message):
    """Not all ranks are there yet."""

    sentence: Text


class Refused(Message):
    """This process is not let in."""

    sentence: str


class Sealed(Message):
    """All ranks are there; or, of a run that goes on: all that it has had, each as the process that it was last."""

    token: Text
    run_id: Text
    members: list[Member]
    gone: tuple[int, ...] = ()
    host: int = 0  # whose process serves


class Places(Message):
    """Where the ranks are; a heartbeat of the server."""

    places: list[tuple[Rank, Place]]


class Over(Message):
    """The run ends with this verdict; `stopped` as in Ending."""

    verdict: Verdict
    stopped: bool


class Gone(Message):
    """Ranks were lost, and the run goes on."""

    lost: list[Lost]
    sentence: str


class Back(Message):
    """A rank that was lost is here again, as this member."""

    member: Member


class Committed(Message):
    """All ranks have acknowledged the verdict: it stands."""


class Living(Message):
    """The ranks that live, what those that are outside ask for, and why others meet; `done` as in Done."""

    lives: dict[Rank, int]
    asking: list[tuple[Rank, int, bytes]]
    met: dict[Rank, Text]
    done: int


class Decide(Message):
    """To the first member: all have met, with these reports; decide on view `number`."""

    number: int
    reports: list[tuple[Rank, int, bytes]]


class View(Message):
    """The members that go on, in their order, and the first one's plan."""

    number: int
    members: list[tuple[Rank, int]]
    plan: bytes


AboutViews = Meet | Ask | Plan | Done | Reborn
FromRank = Join | Beat | Ending | Killed | Acknowledge | Leave | MayLeave | AboutViews | StoreRequest
FromServer = Waiting | Refused | Sealed | Places | Over | Gone | Back | Committed | Living | Decide | View
