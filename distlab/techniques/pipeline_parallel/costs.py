"""Cost formulas of pipelines with p ranks, m microbatches and v stages per rank (Narayanan et al. 2021, "Megatron-LM",
section 2.2; Qi et al. 2023, "Zero Bubble Pipeline Parallelism")."""

UNSPLIT = ("one_microbatch", "gpipe", "1f1b", "interleaved")  # their backward passes are not split
FOLDED = ("zbv", "dualpipev")  # two stages per rank, arranged like a V


def bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle part of all ranks' time where backward passes are not split: (p-1)/(m+p-1), with chunks
    (p-1)/(v·m+p-1).

    With chunks a microbatch comes back to a rank after p others. If there are fewer, m < p, the first rank waits for
    it: a step takes the time of p + (m-1)/v microbatches (by simulation; Megatron allows only multiples of p).
    """
    if chunks > 1 and microbatches < ranks:
        return 1 - microbatches / (ranks + (microbatches - 1) / chunks)
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def idle_share(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle part of all ranks' time in `schedule`, if forwards, input gradients and weight gradients take
    equally long.

    In units of that time a rank with one stage works 3·m, with two 6·m. Raises KeyError for a schedule without a
    formula.
    """
    if schedule in UNSPLIT:
        return bubble(ranks, microbatches, chunks if schedule == "interleaved" else 1)
    wait, stages = ranks - 1, 2 if schedule in FOLDED else 1
    idle = {
        "zb_h1": max(wait, 2 * wait - (microbatches - 1)),
        "zbv": max(wait, 4 * wait - 2 * (microbatches - 1)),
        "dualpipev": wait,
    }[schedule]
    return idle / (3 * stages * microbatches + idle)


def ahead(schedule: str, ranks: int, microbatches: int, rank: int, chunks: int = 1) -> int:
    """Return how many forwards `rank` runs before its first backward, each chunk's counted separately: p-r in 1f1b and
    zb_h1, m in gpipe, 1 in one_microbatch.

    interleaved: 2(p-1-r) + (v-1)·g and the current one, at most v·m; g is the size of the first group, p if m is a
    multiple of it (Narayanan et al. 2021, section 2.2.2), else the larger share of m in m//p. On a V: all forwards of
    the way down before the first one comes back, and those after it on the way up: 2p if there are as many.
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
    """Return the most microbatches that `rank` keeps for their backward pass, each chunk's counted separately: as many
    as run ahead; min(m, p) on every rank in zb_h1, whose later ranks defer more; 2p+1 in dualpipev."""
    if schedule == "zb_h1":
        return min(microbatches, ranks)
    if schedule == "dualpipev":
        return 2 * ranks + 1
    return ahead(schedule, ranks, microbatches, rank, chunks)


def pipeline_ends(ranks: int, chunks: int, rank: int, *, folded: bool = False) -> int:
    """Return how many ends of `rank`'s stages border another rank: at each it sends one tensor per microbatch.

    The first and the last rank have one, those between have two; with v chunks 2v, without the model's own two ends. On
    a V rank 0 has both ends of the model, and the last rank's two stages are neighbours.
    """
    if ranks == 1:
        return 0
    if folded:
        return 4 - 2 * (rank in (0, ranks - 1))
    return 2 * chunks - (rank == 0) - (rank == ranks - 1)
