"""Pipelines: p ranks, m microbatches, v stages a rank (Narayanan et al. 2021, "Megatron-LM", section 2.2)."""


def bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """The part of all ranks' time that idles: (p-1)/(m+p-1), with chunks (p-1)/(v·m+p-1).

    With chunks a microbatch comes back to a rank after p others. Where there are fewer, m < p, the first rank waits for
    it: a step takes the time of p + (m-1)/v microbatches (by simulation; Megatron allows multiples of p alone).
    """
    if chunks > 1 and microbatches < ranks:
        return 1 - microbatches / (ranks + (microbatches - 1) / chunks)
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def in_flight(schedule: str, ranks: int, microbatches: int, rank: int, chunks: int = 1) -> int:
    """Microbatches that `rank` holds for their backward pass at most, and passes forward that it makes before the first
    backward: min(m, p-r) in 1f1b, m in gpipe, 1 in naive.

    With chunks each counts apart: 2(p-1-r) + (v-1)·g ahead and the one in turn, of v·m. g is the size of the first
    group, p where m is a multiple of it (Narayanan et al. 2021, section 2.2.2), else the larger share of m in m//p.
    """
    if schedule == "interleaved":
        group = -(-microbatches // max(1, microbatches // ranks))
        return min(chunks * microbatches, 2 * (ranks - 1 - rank) + (chunks - 1) * group + 1)
    return {"naive": 1, "gpipe": microbatches, "1f1b": min(microbatches, ranks - rank)}[schedule]


def pipeline_ends(ranks: int, chunks: int, rank: int) -> int:
    """Ends of `rank`'s stages with another rank behind them: at each it sends an activation, or a gradient, a
    microbatch.

    One for the first and the last rank and two between, and with v chunks 2v, less the model's own two ends.
    """
    return 0 if ranks == 1 else 2 * chunks - (rank == 0) - (rank == ranks - 1)
