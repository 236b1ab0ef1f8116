"""Experts: places, and the bytes of tokens that travel to them and back.

T are the tokens of a batch on all N ranks, each of which chooses k of E experts and is a row of D numbers. Sources:
Lepikhin et al. 2020, "GShard", section 2.2 (places); Fedus et al. 2021, "Switch Transformers", section 5.5 (what
moves).
"""

import math


def expert_places(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """C = ceil(factor·k·T/E), the choices that an expert takes; with a factor of 0 all that want it, at most one a
    token."""
    if not factor:
        return num_tokens
    return math.ceil(factor * top_k * num_tokens / num_experts)


def row_bytes(given: int, taken: int, width: int, itemsize: int = 4) -> int:
    """What a rank sends of rows that it gives to other ranks and takes from them: 2D(given + taken) numbers.

    Forward it gives rows, and gives back what it made of those that it took; backward the gradients of both.
    """
    return 2 * (given + taken) * width * itemsize


def even_row_bytes(world_size: int, num_tokens: int, top_k: int, width: int, itemsize: int = 4) -> float:
    """The same if all experts are wanted alike, with as many on each rank: 4(N-1)/N x k·T/N·D numbers."""
    away = top_k * num_tokens / world_size * (world_size - 1) / world_size
    return 4 * away * width * itemsize
