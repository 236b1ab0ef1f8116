"""The lab's own transport (LAB_BACKEND=tcp), tried on what is known before anything is sent by it.

sums       every operation in every type, on small integers, which all types hold exactly: any difference is a wrong
           message. A length that nothing divides goes through rank 0 and back where that is the way of small sums, a
           long one from rank to rank, and of an even number of ranks one pair by pair (distlab/collectives/by_hand.py)
order      of two groups, and of one key, to the right neighbour: what two groups send under one tag comes over one
           connection; of one key the first that was sent is the first that is received, whether it was posted, came
           before anybody asked, or is taken. A barrier in between makes sure what has come by then, on any machine
stranger   rank 0 opens connections once more and is dialled first by a thread of its own that says it is rank 1 and has
           another key. Rank 1 dials after that, and has to be the one that is heard
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives.point_to_point import Message
from distlab.lab import Lab
from distlab.transport.handshake import MAGIC, NONCE_BYTES, PROOF_BYTES, Who, proof
from distlab.transport.process_group import TcpBackend, TcpGroup, purpose
from distlab.transport.tcp import Channel, LinkError

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip
COUNTING = 32  # ranks that put in something: all types hold such sums exactly
SHORT, LONG, LONGEST = 5, 200_003, 5 << 20  # numbers; the last one is of bytes
SUMS_CONTROL = "tests/rank/test_transport_self_test.py::test_a_sum_that_lacks_a_rank_is_seen"

Call = Callable[["Numbers"], tuple[Tensor, Tensor]]  # what came of it on this rank, and what should have


class Numbers:
    """What each rank puts in: 1 to 3, by rank and place."""

    def __init__(self, rank: int, world_size: int, length: int, dtype: torch.dtype) -> None:
        self.rank, self.world_size, self.length, self.dtype = rank, world_size, length, dtype
        self.last = world_size - 1

    def of(self, rank: int, shift: int = 0) -> Tensor:
        """Those of one rank, for all or for the one at `shift`."""
        return ((rank < COUNTING) * ((torch.arange(self.length) + 2 * rank + shift) % 3 + 1)).to(self.dtype)

    @property
    def mine(self) -> Tensor:
        return self.of(self.rank)

    @property
    def all(self) -> Tensor:
        return torch.stack([self.of(rank) for rank in range(self.world_size)])

    def parts(self, rank: int) -> list[Tensor]:
        return [self.of(rank, shift) for shift in range(self.world_size)]

    @property
    def due(self) -> Tensor:
        """[N, length], what all have for this rank."""
        return torch.stack([self.of(rank, self.rank) for rank in range(self.world_size)])

    @property
    def place(self) -> Tensor:
        return self.blank()[0]

    def blank(self) -> list[Tensor]:
        """A place for each rank's, in which nothing is right."""
        return [torch.zeros(self.length, dtype=self.dtype) for _ in range(self.world_size)]


def check_sums(lab: Lab) -> None:
    lab.at(0, "known sums")
    wrong = list(differing(lab.rank, lab.world_size))
    detail = f"of {len(CALLS)} operations in {len(DTYPES)} types: {', '.join(wrong[:4]) or 'all as they should be'}"
    lab.check("transport", len(wrong), 0, detail=detail, control=SUMS_CONTROL)


def differing(rank: int, world_size: int) -> Iterator[str]:
    """The operations that leave something else on this rank."""
    for dtype in DTYPES:
        yield from tried(Numbers(rank, world_size, SHORT, dtype), CALLS if dtype in WHOLLY else IN_ALL_TYPES)
    yield from tried(Numbers(rank, world_size, LONG, torch.float32), BY_SIZE)
    yield from tried(Numbers(rank, world_size, LONGEST, torch.uint8), ["all_reduce"])


def tried(numbers: Numbers, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        found, wanted = CALLS[name](numbers)
        if not torch.equal(found, wanted):
            yield f"{name} of {numbers.length} in {str(numbers.dtype).removeprefix('torch.')}"


def finish(works: Iterable[Message | dist.Work | None]) -> None:
    """Wait for messages and operations of this rank, in this order."""
    for work in works:
        assert work is not None  # only a rank outside of the group has none
        work.wait()


def done(found: Tensor | list[Tensor], call: Callable[[Any], object], wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The place that `call` has filled, or all places in one, beside what has to be there."""
    call(found)
    found = found if isinstance(found, Tensor) else torch.stack(found)
    return found, wanted.to(found.dtype)


def all_reduce(numbers: Numbers, op: dist.ReduceOp.RedOpType, wanted: Tensor) -> tuple[Tensor, Tensor]:
    return done(numbers.mine, lambda place: dist.all_reduce(place, op), wanted)


def mean(numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Of what can be divided; of whole numbers the sum."""
    if not numbers.dtype.is_floating_point:
        return all_reduce(numbers, dist.ReduceOp.SUM, numbers.all.sum(0))
    return all_reduce(numbers, dist.ReduceOp.AVG, numbers.all.sum(0) / numbers.world_size)


def every_second(numbers: Numbers) -> tuple[Tensor, Tensor]:
    """A tensor that does not lie in one piece; what lies between stays as it was."""
    found = torch.stack([numbers.mine, numbers.mine], 1)
    dist.all_reduce(found[:, 0])
    return found, torch.stack([numbers.all.sum(0).to(numbers.dtype), numbers.mine], 1)


def waited_for_later(numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Two that are under way at once."""
    one, other = numbers.mine, 2 * numbers.mine
    works = [dist.all_reduce(each, async_op=True) for each in (one, other)]
    finish(works[::-1])
    total = numbers.all.sum(0)
    return torch.stack([one, other]), torch.stack([total, 2 * total]).to(numbers.dtype)


def reduce(numbers: Numbers) -> tuple[Tensor, Tensor]:
    found = numbers.mine
    dist.reduce(found, numbers.last)
    return (found, numbers.all.sum(0).to(numbers.dtype)) if numbers.rank == numbers.last else (found, found)


def gather(numbers: Numbers) -> tuple[Tensor, Tensor]:
    places = numbers.blank() if numbers.rank == numbers.last else None
    dist.gather(numbers.mine, places, numbers.last)
    return (torch.stack(places), numbers.all) if places is not None else (numbers.mine, numbers.mine)


def passed_on(numbers: Numbers) -> tuple[Tensor, Tensor]:
    """To the next rank, two messages of one tag, which come in their order."""
    before, after = neighbours(numbers.rank, numbers.world_size)
    first, second = numbers.place, numbers.place
    works = [dist.isend(each, after, tag=1) for each in (numbers.mine, numbers.mine + 1)]
    for place in (first, second):
        dist.recv(place, before, tag=1)
    finish(works)
    wanted = numbers.of(before)
    return torch.stack([first, second]), torch.stack([wanted, wanted + 1])


CALLS: dict[str, Call] = {
    "all_reduce": lambda n: all_reduce(n, dist.ReduceOp.SUM, n.all.sum(0)),
    "the least": lambda n: all_reduce(n, dist.ReduceOp.MIN, n.all.amin(0)),
    "the most": lambda n: all_reduce(n, dist.ReduceOp.MAX, n.all.amax(0)),
    "the mean": mean,
    "every second": every_second,
    "two all_reduces": waited_for_later,
    "reduce": reduce,
    "broadcast": lambda n: done(n.mine, lambda place: dist.broadcast(place, n.last), n.of(n.last)),
    "all_gather": lambda n: done(n.blank(), lambda places: dist.all_gather(places, n.mine), n.all),
    "all_gather_into_tensor": lambda n: done(
        torch.cat(n.blank()), lambda place: dist.all_gather_into_tensor(place, n.mine), n.all.flatten()
    ),
    "reduce_scatter": lambda n: done(n.place, lambda place: dist.reduce_scatter(place, n.parts(n.rank)), n.due.sum(0)),
    "reduce_scatter_tensor": lambda n: done(
        n.place, lambda place: dist.reduce_scatter_tensor(place, torch.cat(n.parts(n.rank))), n.due.sum(0)
    ),
    "gather": gather,
    "scatter": lambda n: done(
        n.place,
        lambda place: dist.scatter(place, n.parts(n.last) if n.rank == n.last else None, n.last),
        n.of(n.last, n.rank),
    ),
    "all_to_all": lambda n: done(n.blank(), lambda places: dist.all_to_all(places, n.parts(n.rank)), n.due),
    "send and recv": passed_on,
}
# What moves bytes alone is alike in all types, and each call costs what the slowest rank takes to be scheduled: all in
# all types took 34 s on two cores with a load of 28.
WHOLLY = (torch.float32, torch.uint8)
IN_ALL_TYPES = ("all_reduce", "reduce", "reduce_scatter", "send and recv")
BY_SIZE = ("all_reduce", "two all_reduces", "reduce_scatter", "all_gather", "send and recv")


# --- order ---

MESSAGES_CONTROL = "tests/rank/test_transport_self_test.py::test_messages_that_are_mixed_are_seen"


def check_transport(lab: Lab) -> None:
    if lab.world_size == 1 or not isinstance(lab.group, TcpGroup):
        return
    lab.at(0, "the transport")
    transport, ranks = lab.group.channel.transport, range(lab.world_size)
    one, other = (Channel(transport, ranks, lab.rank, f"known {name}") for name in ("one", "other"))
    came = [*of_two_groups(lab, one, other), *posted_then_taken(lab, one), *early_then_taken(lab, one)]
    faults = [
        f"message {number} where message {wanted} was due" for wanted, number in enumerate(came) if number != wanted
    ]
    detail = faults[0] if faults else f"{len(came)} messages of two groups"
    lab.check("transport order", len(faults), 0, detail=detail, control=MESSAGES_CONTROL)


def of_two_groups(lab: Lab, one: Channel, other: Channel) -> list[int]:
    """Messages 0 and 1 under one tag, of which the second is asked for first."""
    left, right = neighbours(lab.rank, lab.world_size)
    sent = [channel.send([numbered(number)], right, 1) for number, channel in enumerate((one, other))]
    places = [numbered(), numbered()]
    awaited = [channel.recv([place], left, 1) for channel, place in ((other, places[1]), (one, places[0]))]
    finish([*awaited, *sent])
    return [int(place) for place in places]


def posted_then_taken(lab: Lab, channel: Channel) -> list[int]:
    """Messages 2 and 3, of which the first was posted when the second one is taken."""
    left, right = neighbours(lab.rank, lab.world_size)
    first, second = numbered(), numbered()
    posted = channel.recv([first], left, 2)
    sent = [channel.send([numbered(number)], right, 2) for number in (2, 3)]
    lab.exchange.barrier("two messages of one key")
    channel.recv_when_awaited([second], left, 2).wait()
    finish([posted, *sent])
    return [int(first), int(second)]


def early_then_taken(lab: Lab, channel: Channel) -> list[int]:
    """Messages 4, 5 and 7 of one key and 6 of another, which is asked for first: 4 and 5 have come when 7 is sent."""
    left, right = neighbours(lab.rank, lab.world_size)
    places = [numbered() for _ in range(4)]
    sent = [channel.send([numbered(number)], right, tag) for number, tag in ((4, 3), (5, 3), (6, 4))]
    channel.recv([places[2]], left, 4).wait()
    lab.exchange.barrier("messages that came early")
    sent.append(channel.send([numbered(7)], right, 3))
    lab.exchange.barrier("and one more of their key")
    for place in (places[0], places[1], places[3]):
        channel.recv_when_awaited([place], left, 3).wait()
    finish(sent)
    return [int(place) for place in places]


def numbered(number: int = -1) -> Tensor:
    """A message that says which it is; of a place, none."""
    return torch.tensor([number])


def neighbours(rank: int, world_size: int) -> tuple[int, int]:
    """Of this rank, in a ring: the left one, which sends to it, and the right one."""
    return (rank - 1) % world_size, (rank + 1) % world_size


# --- a stranger ---

BOUND_S = 10.0
TOLD, CALLED, HEARD = "the transport's stranger", 1, 42
STRANGER_CONTROL = "tests/rank/test_transport_self_test.py::test_a_stranger_that_is_let_in_is_seen"


def check_stranger(lab: Lab) -> None:
    """Ranks 0 and 1 connect while a stranger tries to; the others go on."""
    if lab.rank > 1:
        return
    lab.at(0, "a stranger")
    store = dist.PrefixStore("stranger", lab.exchange.store)
    bound_s = min(BOUND_S, lab.config.collective_timeout_s)
    if lab.rank == 0:
        threading.Thread(target=dial, args=(store, lab.hooks.own_ip, listening(), bound_s), daemon=True).start()
    else:
        with suppress(dist.DistStoreError):  # a stranger that found nobody has been kept out
            store.wait([TOLD], timedelta(seconds=bound_s))
    fault = heard_wrongly(lab, store, bound_s)
    if lab.rank == 0:
        detail = fault or "it said that it was rank 1 before rank 1 did, and was not heard"
        lab.check("stranger", bool(fault), 0, detail=detail, control=STRANGER_CONTROL)


def heard_wrongly(lab: Lab, store: dist.Store, bound_s: float) -> str:
    """What came of a message from rank 1 to rank 0, where it is not that."""
    message = torch.full((8,), HEARD * lab.rank, dtype=torch.int64)
    try:
        channel = TcpBackend(lab.hooks.own_ip, lab.hooks.secret).channel(
            store, [0, CALLED], lab.rank, "stranger", bound_s
        )
        channel.transport.groups += 1
        if lab.rank == CALLED:
            channel.send([message], 0, tag=1).wait()
        else:
            channel.recv([message], CALLED, tag=1).wait()
        channel.transport.leave()
    except LinkError as error:
        return f"rank {CALLED} was not heard: {error}"
    return "" if bool((message == HEARD).all()) else "another was heard in the place of rank 1"


def dial(store: dist.Store, host: str, before: set[int], bound_s: float) -> None:
    """Dial what this process listens at and did not `before`, as rank 1 and with a key that is another."""
    deadline = time.monotonic() + bound_s / 2
    while time.monotonic() < deadline:
        for port in listening() - before:
            with suppress(OSError), socket.create_connection((host, port), 1.0) as connection:
                nonce = secrets.token_bytes(NONCE_BYTES)
                connection.settimeout(bound_s / 2)
                connection.sendall(MAGIC + nonce)
                nonces = nonce + connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)[:NONCE_BYTES]
                connection.sendall(proof(secrets.token_bytes(32), b"dialler", purpose(0), nonces, Who(CALLED)))
                store.set(TOLD, "dialled")
                connection.recv(1)  # until it is closed
                return
        time.sleep(0.005)
    store.set(TOLD, "nobody listened")


def listening() -> set[int]:
    """The TCP ports at which this process listens."""
    ports = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as copy:
                    internet = copy.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        ports.add(copy.getsockname()[1])
    return ports
