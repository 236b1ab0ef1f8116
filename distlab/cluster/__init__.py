"""Ranks as a cluster: they find each other, watch each other, and end together with the same sentence."""

from collections.abc import Iterable

MOST_NAMED = 16


class ClusterError(Exception):
    """The cluster cannot run; the message is the sentence to print, the exit code is 3."""


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 1 and 3`, `ranks 1, 2 and 3`; of more than MOST_NAMED the first and how many more."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > MOST_NAMED:
        return f"ranks {', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
