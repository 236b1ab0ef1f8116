"""Where the time of a step went on each rank, and how much communication the backward pass hid, as sections."""

from workers.report.claims import Run
from workers.report.markup import Markup, section, table
from workers.report.records import Ranks
from workers.report.spans import CLASSES, hidden, profiles, slowest_rank
from workers.report.units import milliseconds, share

MOST_PROFILES = 64  # rows, of variants and ranks: 14 of 8 took 26 kB of the page


def communication_hidden(run: Run, records: Ranks) -> Markup:
    """By variant and rank, how much of the communication in the profiled step ran during the backward pass."""
    cells = hidden(records, run["world_size"])
    if not cells:
        return Markup()
    ranks = [f"rank {rank}" for rank in range(run["world_size"])]
    note = (
        "Of the time in which a collective or a send of this rank was under way (a send: until it was waited for), the"
        " share in which the rank computed its backward pass. Seen in one step under the profiler; the spans of all"
        " ranks are in trace.json, which ui.perfetto.dev opens."
    )
    shown = table(["variant", *ranks], [[name, *row] for name, row in cells.items()], range(1, len(ranks) + 1))
    return section("Communication hidden", shown, note=note)


def training_profile(run: Run, records: Ranks) -> Markup:
    """Where the time of a step went, a row a variant and rank, and the slowest rank of each variant."""
    rows = []
    found = profiles(records, run["world_size"])
    all_ranks = len(found) * run["world_size"] <= MOST_PROFILES
    for variant, of_ranks in found.items():
        slowest, ratio = slowest_rank(of_ranks)
        for rank, seconds in enumerate(of_ranks):
            if seconds is None or (rank != slowest and not all_ranks):
                continue
            total = sum(seconds.values())
            cells = [share(seconds.get(kind, 0.0), total) for kind in CLASSES]
            word = f"slowest, {ratio:.2f} ×" if rank == slowest and len(of_ranks) > 1 else ""
            rows.append([variant, rank, milliseconds(total), *cells, word])
    note = (
        "Median milliseconds of a step on each rank, in brackets per cent of their sum; what lies inside another counts"
        " for the inner one. Slowest is the rank with the most work of its own (data, forward, backward, optimizer), so"
        " many times that of the fastest: the others wait for it, partly inside their communication."
        + ("" if all_ranks else " Of so many variants the slowest rank alone is shown; the others are in the records.")
    )
    columns = ["variant", "rank", "ms", *CLASSES, ""]
    return section("Training profile", table(columns, rows, numbers=range(1, len(columns) - 1)), note=note)
