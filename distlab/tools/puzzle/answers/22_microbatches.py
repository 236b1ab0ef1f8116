"""The reference of puzzle 22."""


def accumulation_steps(microbatch: int, batch: int) -> int:
    return batch // microbatch


def accumulated(gradients: list[float]) -> tuple[float, float]:
    return sum(gradients), sum(gradients) / len(gradients)


def scaled_rate(base_rate: float, base_batch: int, batch: int) -> float:
    return base_rate * batch / base_batch
