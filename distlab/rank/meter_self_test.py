"""A known case for each meter, before anything is measured by it: a meter that is wrong would call all else right.

  memory    tensors of all classes, of sizes that tell them apart, at rest and at the peak; one that is saved twice
  seconds   a thread that computes for a while, and one that sleeps, beside what other clocks say of the same stretch
  spans     made-up marks, of which the seconds by class, the idle share and what is hidden are known
  ranks     made-up steps of three ranks: the median of each, the slowest of all, and the row that tells it
  ledger    a tensor from every rank to every other one, whose size tells who sent it to whom: exactly these bytes as
            called, and on the wire to each peer that peer's within the frames of one message, by which sizes differ

None depends on how fast the machine is: clocks are held against clocks around them. Of links that were made slow it is
measured how slow they are, outside of every count.
"""

import itertools
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.cluster import link
from distlab.collectives.costs import TOLERATED_BYTES
from distlab.collectives.phases import Span
from distlab.collectives.point_to_point import Peers
from distlab.lab import Lab
from distlab.measure.memory import MemoryLedger
from distlab.measure.storages import SavedActivations
from distlab.measure.timeline import Lap, bubble, hidden_seconds, profile
from distlab.measure.traffic import Traffic
from distlab.rank.transport_self_test import finish, neighbours
from distlab.report import records
from distlab.report.tables import measured, slowest_rank
from distlab.report.units import human_bits, milliseconds
from distlab.report.verdict import judge, slowest

CONTROL = "tests/rank/test_meter_self_test.py::test_a_meter_that_is_wrong_is_seen"
WEIGHTS, INPUTS, BUCKET, MASTERS, MOMENTS, MESSAGE = 512, 512, 896, 640, 768, 1152  # numbers, the first 3 of 2 bytes
WORKING = 16  # bytes of two numbers beside what has a name
CYCLE = 64  # numbers that only a collector frees
LENGTH_S = 0.002  # of the thread's own computing, and of its sleep


class Remembering(torch.optim.Optimizer):
    """An optimizer as far as memory goes: making one of torch's imports its compiler, a second."""

    def __init__(self, state: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        self.state = state  # type: ignore[assignment]


def check_meters(lab: Lab) -> None:
    lab.at(0, "the meters")
    faults = [*memory_faults(lab.device, lab.group), *seconds_faults(), *span_faults(), *rank_faults()]
    detail = faults[0] if faults else "memory, seconds, spans and ranks of known cases"
    lab.check("meters", len(faults), 0, detail=detail, control=CONTROL)


def memory_faults(device: torch.device, group: dist.ProcessGroup) -> Iterator[str]:
    """What the meters of memory make of a step that holds so much of each class."""
    with MemoryLedger(device) as memory:
        weight = nn.Parameter(torch.zeros(WEIGHTS, dtype=torch.bfloat16, device=device))
        master = nn.Parameter(torch.zeros(MASTERS, device=device))
        optimizer = Remembering({master: {"moment": torch.zeros(MOMENTS, device=device)}})
        inputs = torch.zeros(INPUTS, dtype=torch.bfloat16, device=device)
        bucket = torch.zeros(BUCKET, dtype=torch.bfloat16, device=device)
        message = torch.zeros(MESSAGE, device=device)
        with SavedActivations(memory.saves) as saved, memory.step():
            dist.all_reduce(message, group=group)
            (weight * inputs * inputs).sum().backward()
            weight.grad = bucket[:WEIGHTS]  # autograd's own goes
            message.untyped_storage().resize_(0)  # or the meter would wait for it to be let go
            cycle: list[object] = [torch.zeros(CYCLE, device=device)]
            cycle.append(cycle)  # gone at rest, and not when the step is over
            del cycle
    del weight, master, optimizer, inputs, bucket, message
    held = {"parameters": 2 * WEIGHTS, "gradients": 2 * BUCKET, "optimizer": 4 * (MASTERS + MOMENTS)}
    yield from unlike("bytes at rest", held | {"activations": 2 * INPUTS, "communication": 0}, memory.rest)
    yield from unlike("bytes saved for the backward pass", (2 * INPUTS, 0), (saved.peak_bytes, saved.live_bytes))
    with SavedActivations() as saved:
        for length in (INPUTS, INPUTS // 2):  # the most comes first
            (nn.Parameter(torch.zeros(length)) * torch.zeros(length)).sum().backward()
    yield from unlike("the most bytes saved", (4 * INPUTS, 0), (saved.peak_bytes, saved.live_bytes))
    # When the gradient comes, that of its product is there, too; the loss and its gradient are two numbers.
    working = memory.peak["activations"] - 2 * INPUTS - 2 * WEIGHTS
    peak = memory.peak | {"activations": working if not 0 <= working <= WORKING else 0}
    held |= {"gradients": 2 * (BUCKET + WEIGHTS), "activations": 0, "communication": 4 * MESSAGE}
    yield from unlike("bytes at the peak", held, peak)


def seconds_faults() -> Iterator[str]:
    """What a lap makes of a thread that computes, and of one that sleeps."""
    with Lap() as around, Lap() as computing:
        until = time.thread_time() + LENGTH_S
        while time.thread_time() < until:
            pass
    yield from out_of_bounds("computing", 0.9 * LENGTH_S, computing.cpu_s, around.cpu_s)
    yield from out_of_bounds("the time of computing", 0.9 * LENGTH_S, computing.wall_s, around.wall_s)
    outside, busy = time.perf_counter(), time.process_time()
    with Lap() as asleep:
        time.sleep(LENGTH_S)
    busy, outside = time.process_time() - busy, time.perf_counter() - outside
    yield from out_of_bounds("a sleep's computing", 0.0, asleep.cpu_s, busy)
    yield from out_of_bounds("a sleep", 0.9 * LENGTH_S, asleep.wall_s, outside)


def span_faults() -> Iterator[str]:
    """What the timeline makes of marks that lie inside each other, of ranks that take turns, and of two at once."""
    nested = [
        Span("forward", "0", 0, 4), Span("all_reduce", "", 1, 2), Span("input", "0", 4, 7), Span("weight", "0", 7, 10),
        Span("wait", "", 9, 10), Span("optimizer", "", 12, 13),
    ]  # fmt: skip
    seconds = {"data": 0, "forward": 3, "backward": 5, "communication": 1, "optimizer": 1, "waiting": 1}
    yield from unlike("seconds by class", seconds, profile(nested))
    turns = [[Span("forward", "0", 0, 1), Span("backward", "0", 3, 4)], [Span("forward", "0", 1, 2)]]
    yield from unlike("the idle share", 1 - 3 / 8, bubble(turns))
    sent, computed = [Span("send", "", 0, 2), Span("send", "", 1, 3)], [Span("forward", "0", 2, 5)]
    yield from unlike("hidden seconds", 1, hidden_seconds(sent, computed))


def rank_faults() -> Iterator[str]:
    taken = [[1.0, 9.0, 2.0], [3.0, 3.0, 8.0], [1.0, 1.0, 1.0]]
    written: records.Ranks = {
        rank: [
            records.Start(rank, "known", "known", len(taken), "", {}, {}, {}),
            records.Steps("known", seconds, [second / 4 for second in seconds]),
            records.End(rank, 0.0, None, 0.0, 0.0),
        ]
        for rank, seconds in enumerate(taken)
    }
    run = judge(written)
    (variant,) = run["variants"]
    yield from unlike("the median step of each rank", [2.0, 3.0, 1.0], variant["step_seconds"])
    yield from unlike("the median CPU seconds of each rank", [0.5, 0.75, 0.25], variant["cpu_seconds"])
    yield from unlike("the slowest rank's step", 3.0, slowest(variant["step_seconds"]))
    yield from unlike("ms a step as told", milliseconds(3.0), measured(run, written).rows[0][1])
    work = [{"forward": 1.0, "waiting": 9.0}, {"forward": 2.0, "optimizer": 1.0}, {"backward": 2.0}]
    yield from unlike("the rank with most work of its own", (1, 3.0), slowest_rank([*work]))


def unlike(what: str, wanted: object, found: object) -> Iterator[str]:
    if found != wanted:
        yield f"{what}: {found} where it is {wanted}"


def out_of_bounds(what: str, least: float, found: float, most: float) -> Iterator[str]:
    if not least <= found <= most:
        yield f"{what}: {found:g} s where it is {least:g} to {most:g}"


# --- the ledger ---

LEAST_BYTES, STEP_BYTES = 2048, 512
UNSEEN = (
    "wire bytes are not visible: NCCL sends past the sockets where it can (NCCL_DEBUG=INFO says which way), so called"
    " bytes decide"
)


def unseen_on(backend: str, world_size: int) -> str:
    """Why nobody looks at sockets; empty where they tell all that is sent."""
    return UNSEEN if backend == "nccl" and world_size > 1 else ""


AMOUNT_CONTROL = "tests/rank/test_meter_self_test.py::test_a_ledger_that_counts_wrong_is_seen"


def amount(sender: int, receiver: int) -> int:
    """Bytes from `sender` to `receiver`: of eight ranks each sends eight different ones, and gets as many."""
    return LEAST_BYTES + STEP_BYTES * ((sender + 3 * receiver) % 8)


def check_ledger(lab: Lab) -> None:
    if lab.world_size == 1:
        lab.say("one rank sends nothing, so there is nothing to count", "ledger")
        return
    lab.at(0, "the ledger")
    traffic = counted(lab)
    others = [rank for rank in range(lab.world_size) if rank != lab.rank]
    sent = {peer: amount(lab.rank, peer) for peer in others}
    missing = abs(traffic.called_bytes - sum(sent.values()))
    lab.check("ledger", missing, 0.0, detail=f"of {sum(sent.values())} B sent, B off as called", control=AMOUNT_CONTROL)
    if lab.config.backend == "nccl":
        lab.say(UNSEEN, "ledger")
    elif traffic.wire_error is not None:
        lab.say(f"{traffic.wire_error}: it is compared with nothing", "ledger")
        lab.waive("ledger", traffic.wire_error)
    else:
        off = {peer: abs(traffic.wire[peer].sent - nbytes) for peer, nbytes in sent.items()}
        worst = max(off, key=lambda peer: off[peer])
        detail = f"B off on the wire to rank {worst}, which was sent {sent[worst]} B in one message"
        lab.check("ledger", off[worst], TOLERATED_BYTES, detail=detail, control=AMOUNT_CONTROL)


def counted(lab: Lab) -> Traffic:
    """What the ledger sees of one message from each rank to each."""
    peers = Peers(lab.group)
    device = lab.device if peers.batched else torch.device("cpu")
    others = [rank for rank in range(lab.world_size) if rank != lab.rank]
    receives = [(peer, torch.empty(amount(peer, lab.rank), dtype=torch.uint8, device=device)) for peer in others]
    sends = [(peer, torch.zeros(amount(lab.rank, peer), dtype=torch.uint8, device=device)) for peer in others]
    with lab.count() as traffic:
        received, sent = peers.post(peers.new_tag(), receives, sends)
        finish([*received, *sent])
    return traffic


# --- the links ---
#
# Every rank sends to its right neighbour at once. The rate is the median over windows of a few pieces, in the second
# half of a long message: what TCP needs to find its pace, the bucket that was full at the start, who began when, and a
# stall on the way are then no part of it. The receiver holds the watch, since a sender is done once its kernel took the
# bytes; so each rank is told what its right neighbour saw. The round trip is that of eight bytes, the median of ten.

PIECES, SKIPPED_PIECES = 64, 32  # of a message, and of those the first: at 10 Mbit/s TCP finds its pace in a second
WINDOW_PIECES = 4
MESSAGE_S, LEAST_MESSAGE_BYTES, MOST_BYTES = 3.2, 1 << 15, 1 << 29  # of a message, at the rate that was asked for
PINGS = 10


def measure_link(lab: Lab) -> None:
    """Say what was asked for and what was measured, if a slow link was asked for."""
    wanted = link.asked(lab.config)
    if not wanted:
        return
    if lab.world_size == 1:
        lab.say(f"{wanted} changes nothing: one rank has nothing to send", "link")
        return
    shaped = link.shaped(lab.config)
    if shaped is not None and shaped.lacks:
        lab.say(f"{shaped.lacks}; the run continues", "link")
    if lab.config.backend == "nccl":
        lab.say(f"{wanted} was set, and is not measured with {lab.config.backend}", "link")
        return
    lab.at(0, "the link")
    rate, delay = lab.config.net_rate, lab.config.net_delay
    bits_s = link.bits_s(rate) if rate is not None else None
    trip_s, seen = round_trip_s(lab), measured_bits_s(lab, message_bytes(bits_s))
    if bits_s is not None:
        lab.compare("link rate", bits_s, seen, "bit/s", formula="LAB_NET_RATE", shown="a time")
    if delay is not None:
        lab.compare(
            "link round trip", 2 * link.seconds(delay), trip_s, "s", formula="2 x LAB_NET_DELAY", shown="a time"
        )
    everyone = lab.exchange.everyone("link", seen)
    lab.say(
        f"{wanted} asked for; measured {human_bits(min(everyone))} to {human_bits(max(everyone))} a rank, "
        f"round trip {milliseconds(trip_s)} ms",
        "link",
    )


def message_bytes(bits_s: float | None) -> int:
    """The size of the message that is timed; the largest where no rate was asked for."""
    return MOST_BYTES if bits_s is None else int(min(max(bits_s / 8 * MESSAGE_S, LEAST_MESSAGE_BYTES), MOST_BYTES))


def measured_bits_s(lab: Lab, message: int) -> float:
    """Bits a second from this rank to its right neighbour, while all ranks send `message` bytes."""
    left, right = neighbours(lab.rank, lab.world_size)
    piece = torch.zeros(message // PIECES, dtype=torch.uint8, device=lab.device)
    arriving = torch.empty_like(piece)  # pieces may overwrite each other: nobody reads them
    arrivals = [dist.irecv(arriving, left, lab.group, tag) for tag in range(PIECES)]
    dist.barrier(lab.group)  # not the store's: its answers would queue behind what the first ranks already send
    sent = [dist.isend(piece, right, lab.group, tag) for tag in range(PIECES)]
    arrived_s = []
    for arrival in arrivals:
        finish([arrival])
        arrived_s.append(time.perf_counter())
    finish(sent)
    rates = lab.exchange.everyone("the link's rate", median_bits_s(len(piece), arrived_s))
    return float(rates[right])


def median_bits_s(piece_bytes: int, arrived_s: list[float]) -> float:
    """The median window's bits a second, of pieces that arrived at `arrived_s`, the first ones skipped."""
    ends = arrived_s[SKIPPED_PIECES - 1 :: WINDOW_PIECES]
    return statistics.median(
        8 * piece_bytes * WINDOW_PIECES / (after - before) for before, after in itertools.pairwise(ends)
    )


def round_trip_s(lab: Lab) -> float:
    """Seconds of a word to the right neighbour and back, while all ranks send one."""
    left, right = neighbours(lab.rank, lab.world_size)
    word = torch.zeros(1, dtype=torch.float64, device=lab.device)
    asked, answered = (
        [dist.irecv(torch.empty_like(word), peer, lab.group, first + turn) for turn in range(PINGS)]
        for peer, first in ((left, 0), (right, PINGS))
    )
    dist.barrier(lab.group)
    trips_s = []
    for turn in range(PINGS):
        started = time.perf_counter()
        sent = [dist.isend(word, right, lab.group, turn)]
        finish([asked[turn]])
        sent.append(dist.isend(word, left, lab.group, PINGS + turn))
        finish([answered[turn]])
        trips_s.append(time.perf_counter() - started)
        finish(sent)
    return statistics.median(trips_s)
