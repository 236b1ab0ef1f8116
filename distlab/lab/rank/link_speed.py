"""Measure the speed of a link that LAB_NET_RATE or LAB_NET_DELAY has slowed, outside of every count.

Every rank sends to its right neighbour at the same time. The rate is the median over windows of a few pieces, in the
second half of a long message, which excludes TCP's slow start, the initially full bucket, different start times and
short stalls. The receiver takes the time, because a sender is done once its kernel has the bytes; it then sends the
result back. The round trip is that of eight bytes, the median of ten.
"""

import itertools
import statistics
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

from distlab.lab.cluster import link
from distlab.lab.lab import Lab
from distlab.lab.report.units import human_bits, milliseconds

PIECES, SKIPPED_PIECES = (
    64,
    32,
)  # the latter not measured: at 10 Mbit/s TCP needs a second to reach its rate
WINDOW_PIECES = 4
MESSAGE_S, LEAST_MESSAGE_BYTES, MOST_BYTES = 3.2, 1 << 15, 1 << 29  # of a message, at the requested rate
PINGS = 10


def measure_link(lab: Lab) -> None:
    """Report the requested and the measured speed, if a slow link was requested."""
    requested = link.requested(lab.config)
    if not requested:
        return
    if lab.world_size == 1:
        lab.say(f"{requested} changes nothing: one rank has nothing to send", "link")
        return
    shaped = link.shaped(lab.config)
    if shaped is not None and shaped.lacks:
        lab.say(f"{shaped.lacks}; the run continues", "link")
    if lab.config.backend == "nccl":
        lab.say(f"{requested} is not measured with LAB_BACKEND={lab.config.backend}", "link")
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
        f"{requested} requested; measured {human_bits(min(everyone))} to {human_bits(max(everyone))} per rank, "
        f"round trip {milliseconds(trip_s)} ms",
        "link",
    )


def neighbours(rank: int, world_size: int) -> tuple[int, int]:
    """Return this rank's neighbours in a ring: the left one, which sends to it, and the right one."""
    return (rank - 1) % world_size, (rank + 1) % world_size


def wait_for(works: Iterable[dist.Work | None]) -> None:
    """Wait for messages of this rank, in this order."""
    for work in works:
        assert work is not None  # only a rank outside of the group has none
        work.wait()


def message_bytes(bits_s: float | None) -> int:
    """Return the size of the timed message; the largest if no rate was requested."""
    return MOST_BYTES if bits_s is None else int(min(max(bits_s / 8 * MESSAGE_S, LEAST_MESSAGE_BYTES), MOST_BYTES))


def measured_bits_s(lab: Lab, message: int) -> float:
    """Return bits per second from this rank to its right neighbour, while all ranks send `message` bytes."""
    left, right = neighbours(lab.rank, lab.world_size)
    piece = torch.zeros(message // PIECES, dtype=torch.uint8, device=lab.device)
    arriving = torch.empty_like(piece)  # pieces may overwrite each other: their contents are not used
    arrivals = [dist.irecv(arriving, left, lab.group, tag) for tag in range(PIECES)]
    dist.barrier(lab.group)  # not a barrier of the store, whose answers would queue behind the first ranks' messages
    sent = [dist.isend(piece, right, lab.group, tag) for tag in range(PIECES)]
    arrived_s = []
    for arrival in arrivals:
        wait_for([arrival])
        arrived_s.append(time.perf_counter())
    wait_for(sent)
    rates = lab.exchange.everyone("the link's rate", median_bits_s(len(piece), arrived_s))
    return float(rates[right])


def median_bits_s(piece_bytes: int, arrived_s: list[float]) -> float:
    """Return the median window's bits per second, of pieces that arrived at `arrived_s`, without the first ones."""
    ends = arrived_s[SKIPPED_PIECES - 1 :: WINDOW_PIECES]
    return statistics.median(
        8 * piece_bytes * WINDOW_PIECES / (after - before) for before, after in itertools.pairwise(ends)
    )


def round_trip_s(lab: Lab) -> float:
    """Return the seconds of a small message to the right neighbour and back, while all ranks send one."""
    left, right = neighbours(lab.rank, lab.world_size)
    word = torch.zeros(1, dtype=torch.float64, device=lab.device)
    requests, replies = (
        [dist.irecv(torch.empty_like(word), peer, lab.group, first + turn) for turn in range(PINGS)]
        for peer, first in ((left, 0), (right, PINGS))
    )
    dist.barrier(lab.group)
    trips_s = []
    for turn in range(PINGS):
        started = time.perf_counter()
        sent = [dist.isend(word, right, lab.group, turn)]
        wait_for([requests[turn]])
        sent.append(dist.isend(word, left, lab.group, PINGS + turn))
        wait_for([replies[turn]])
        trips_s.append(time.perf_counter() - started)
        wait_for(sent)
    return statistics.median(trips_s)
