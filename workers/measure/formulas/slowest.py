"""The seconds of the slowest rank, which all others wait for."""

from collections.abc import Sequence


def slowest_of(everyone: Sequence[Sequence[float]]) -> list[float]:
    """Of each of several stretches, of all ranks' seconds for each."""
    return [max(of_stretch) for of_stretch in zip(*everyone, strict=True)]


def none_slower(slowest: Sequence[float], own: Sequence[float]) -> bool:
    """Whether no stretch took this rank longer; asked on every rank, it is true everywhere or `slowest` is wrong."""
    return all(mine <= most for mine, most in zip(own, slowest, strict=True))
