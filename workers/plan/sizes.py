"""Sizes as people write them, 7B, 80GB, 400Gbit, and back. Units are powers of ten, GiB and its kin powers of two."""

import re

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BINARY = {"k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
# What is less is nothing, what is more no machine: an exabyte, 10^18 parameters, 10^9 GPUs, layers or tokens. Between
# them no sum overflows, whatever is multiplied.
LEAST, MOST, MOST_WHOLE = 1e-9, 1e18, 1e9


class NotASize(ValueError):
    """The message says what is wrong with the value, and what is allowed."""


def _positive(number: str, factor: float, most: float = MOST) -> float:
    value = _bounded(number, factor, most)
    if value < LEAST:
        raise NotASize("is nothing, allowed: more than 0")
    return value


def _bounded(number: str, factor: float, most: float = MOST) -> float:
    value = float(number) * factor
    if value > most:
        raise NotASize(f"is beyond any machine, allowed: up to {most:g}")
    return value


def count(written: str) -> float:
    """7B as 7e9: parameters, or FLOP/s with T; K, M, B (or G) and T are powers of ten."""
    match = re.fullmatch(NUMBER + "([KMBGT]?)", written.strip(), re.IGNORECASE)
    if match is None:
        raise NotASize("is not a number such as 350M, 7B or 1.3B")
    return _positive(match[1], COUNTS[match[2].upper().replace("G", "B")])


def whole(written: str) -> int:
    """A whole number from 1 to a billion."""
    if not re.fullmatch("[0-9]+", written.strip()):
        raise NotASize("is not a whole number")
    return int(_positive(written, 1, MOST_WHOLE))


def nbytes(written: str) -> float:
    """80GB as 8e10 bytes, 80GiB as 80·2^30."""
    match = re.fullmatch(NUMBER + "([kmgt]?)(i?)b", written.strip(), re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise NotASize("is not a size such as 80GB, 900MB or 80GiB")
    return _positive(match[1], (BINARY if match[3] else PREFIXES)[match[2].lower()])


def rate(written: str) -> float:
    """400Gbit, 400Gbit/s, 400Gbps, 50GB/s or 50GBps as bytes a second: B is a byte, and b alone is refused for what it
    may be."""
    match = re.fullmatch(NUMBER + "([kKmMgGtT]?)(?:((?i:bit)(?:/s)?|bps)|B(?:/s|ps)?)", written.strip())
    if match is None:
        raise NotASize("is not a rate such as 400Gbit, 100mbit or 400Gbps, in bits, or 50GB/s or 50GBps, in bytes")
    return _positive(match[1], PREFIXES[match[2].lower()] / (8 if match[3] else 1))


def seconds(written: str) -> float:
    """5us as 5e-6 seconds; 0 is allowed: a link without latency."""
    match = re.fullmatch(NUMBER + "(us|ms|s)", written.strip(), re.IGNORECASE)
    if match is None:
        raise NotASize("is not a time such as 5us or 2ms")
    return _bounded(match[1], {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2].lower()])


def share(written: str) -> float:
    """40% or 0.4 as 0.4; more than 0, up to 1."""
    match = re.fullmatch(NUMBER + "(%?)", written.strip())
    if match is None:
        raise NotASize("is not a share such as 40% or 0.4")
    value = float(match[1]) / (100 if match[2] else 1)
    if not LEAST <= value <= 1:
        raise NotASize("is out of range, allowed: more than 0, up to 1 (100%)")
    return value


def shown_count(value: float) -> str:
    """7e9 as "7B"."""
    for letter in ("T", "B", "M", "K"):
        if value >= COUNTS[letter]:
            return f"{value / COUNTS[letter]:.4g}{letter}"
    return f"{value:.4g}"
