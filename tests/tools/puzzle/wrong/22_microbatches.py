"""Three typical wrong answers to puzzle 22, and why each is refused."""

REFUSED = {
    1: r"steps on rank 0 .* it is the batch times the microbatch: divide, do not multiply",
    2: r"mean on rank 0 .* it is divided by the lesson's 4 microbatches: the second time there are 3",
    3: r"rate on rank 0 .* it is by the square root rule: the linear one multiplies by 4",
}


def accumulation_steps_1(microbatch: int, batch: int) -> int:
    """The batch times the microbatch."""
    return batch * microbatch


def accumulated_2(gradients: list[float]) -> tuple[float, float]:
    """Right for the lesson's numbers only."""
    return sum(gradients), sum(gradients) / 4


def scaled_rate_3(base_rate: float, base_batch: int, batch: int) -> float:
    """The square root rule."""
    return base_rate * (batch / base_batch) ** 0.5
