"""Pipelines: p ranks, m microbatches, v stages a rank (Narayanan et al. 2021, "Megatron-LM", section 2.2; Qi et al.
2023, "Zero Bubble Pipeline Parallelism")."""

IN_ONE = ("one_microbatch", "gpipe", "1f1b", "interleaved")  # whose backward passes are not split
FOLDED = ("zbv", "dualpipev")  # two stages a rank, that lie like a V


def bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """The part of all ranks' time that idles where a backward pass is one piece: (p-1)/(m+p-1), with chunks
    (p-1)/(v·m+p-1).

    With chunks a microbatch comes back to a rank after p others. Where there are fewer, m < p, the first rank waits for
    it: a step takes the time of p + (m-1)/v microbatches (by simulation; Megatron allows multiples of p alone).
    """
    if chunks > 1 and microbatches < ranks:
        return 1 - microbatches / (ranks + (microbatches - 1) / chunks)
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def idle_share(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> float:
    """The part of all ranks' time that idles in `schedule`, where a forward, the gradient of an input and those of
    weights take as long.

    Counted in that time, of one stage: 3·m are work, 6·m of two. Raises KeyError for a schedule that has no formula.
    """
    if schedule in IN_ONE:
        return bubble(ranks, microbatches, chunks if schedule == "interleaved" else 1)
    wait, stages = ranks - 1, 2 if schedule in FOLDED else 1
    idle = {
        "zb_h1": max(wait, 2 * wait - (microbatches - 1)),
        "zbv": max(wait, 4 * wait - 2 * (microbatches - 1)),
        "dualpipev": wait,
    }[schedule]
    return idle / (3 * stages * microbatches + idle)


def ahead(schedule: str, ranks: int, microbatches: int, rank: int, chunks: int = 1) -> int:
    """Passes forward that `rank` makes before its first backward, with chunks each apart: p-r in 1f1b and zb_h1,
    m in gpipe, 1 in one_microbatch.

    interleaved: 2(p-1-r) + (v-1)·g ahead and the one in turn, of v·m; g is the size of the first group, p where m is a
    multiple of it (Narayanan et al. 2021, section 2.2.2), else the larger share of m in m//p. On a V all that go down
    before the first comes back, and those behind it on the way up: 2p, where there are as many.
    """
    if schedule == "interleaved":
        group = -(-microbatches // max(1, microbatches // ranks))
        return min(chunks * microbatches, 2 * (ranks - 1 - rank) + (chunks - 1) * group + 1)
    up = min(microbatches, rank + 1)
    return {
        "one_microbatch": 1,
        "gpipe": microbatches,
        "1f1b": min(microbatches, ranks - rank),
        "zb_h1": min(microbatches, ranks - rank),
        "zbv": min(microbatches, 2 * ranks - 1 - rank) + up,
        "dualpipev": 2 * ranks + (rank == ranks - 1),
    }[schedule]


def in_flight(schedule: str, ranks: int, microbatches: int, rank: int, chunks: int = 1) -> int:
    """Microbatches that `rank` holds at most for what is left of their backward pass, with chunks each apart: as many
    as run ahead; in zb_h1, whose later ranks put more off, min(m, p) on every rank, in dualpipev 2p+1."""
    if schedule == "zb_h1":
        return min(microbatches, ranks)
    if schedule == "dualpipev":
        return 2 * ranks + 1
    return ahead(schedule, ranks, microbatches, rank, chunks)


def pipeline_ends(ranks: int, chunks: int, rank: int, *, folded: bool = False) -> int:
    """Ends of `rank`'s stages with another rank behind them: at each it sends an activation, or a gradient, a
    microbatch.

    One for the first and the last rank and two between, and with v chunks 2v, less the model's own two ends. Folded
    like a V both ends of the model are on rank 0, and the last rank's two stages are neighbours.
    """
    if ranks == 1:
        return 0
    if folded:
        return 4 - 2 * (rank in (0, ranks - 1))
    return 2 * chunks - (rank == 0) - (rank == ranks - 1)
