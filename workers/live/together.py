"""What the ranks' states say together, which none of them knows alone: losses of the whole batch, and bytes by peer."""

import math
from collections.abc import Mapping
from typing import Any

from workers.report.live import LiveState

Curve = list[list[Any]]  # [step, loss] each; None where it is no number
States = Mapping[int, LiveState]


def curves(states: States) -> dict[str, Curve]:
    """The loss of the global batch by variant, at the steps that every rank has noted which knows losses at all."""
    names = list(dict.fromkeys(name for state in states.values() for name in state.losses))
    return {
        name: summed([dict(state.losses[name]) for state in states.values() if name in state.losses]) for name in names
    }


def summed(of_ranks: list[dict[int, float | None]]) -> Curve:
    """Shares of the same steps added up."""
    steps = sorted(set.intersection(*(set(shares) for shares in of_ranks)))
    return [[step, added([shares[step] for shares in of_ranks])] for step in steps]


def added(shares: list[float | None]) -> float | None:
    """Their sum, None if one of them is no number."""
    known = [share for share in shares if share is not None]
    return round(math.fsum(known), 6) if len(known) == len(shares) else None


def matrix(states: States, world_size: int) -> list[list[int | None]]:
    """Row r: the bytes that rank r has sent to each rank; None of itself, and where one of the two says nothing.

    The rank at the other end is the one that names the same connection from there. Bytes to an end that nobody names
    are left out: the store's, or those of a rank that has not written yet.
    """
    owner = {ends(near, far): rank for rank, state in states.items() for near, far, _ in state.sent}
    measured = {rank for rank, state in states.items() if not state.unmeasured}
    sent: list[list[int | None]] = [
        [0 if rank != peer and {rank, peer} <= measured else None for peer in range(world_size)]
        for rank in range(world_size)
    ]
    for rank, state in states.items():
        for near, far, num_bytes in state.sent:
            peer = owner.get(ends(far, near), rank)
            sent[rank][peer] = None if peer == rank else (sent[rank][peer] or 0) + num_bytes
    return sent


def ends(near: list[Any], far: list[Any]) -> tuple[Any, ...]:
    """Both ends of a connection, which name it together."""
    return (*near, *far)
