"""Parse sizes such as 7B, 80GB, 400Gbit. Units are powers of ten; GiB etc. are powers of two."""

import re

from distlab.tools.plan.job import COUNTS

PREFIXES = {
    "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40,
}  # fmt: skip
NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]{1,2})?|\.[0-9]+)"
# Smaller or larger values are not realistic: an exabyte, 10^18 parameters, 10^9 GPUs, layers or tokens. Within these
# bounds no product overflows.
LEAST, MOST, MOST_WHOLE = 1e-9, 1e18, 1e9


class NotASize(ValueError):
    """Raised for an invalid value; the message has the error and what is allowed."""


def _matched(pattern: str, written: str, otherwise: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Match[str]:
    match = re.fullmatch(pattern, written.strip(), flags)
    if match is None:
        raise NotASize(otherwise)
    return match


def _bounded(number: str, factor: float, least: float = LEAST, most: float = MOST) -> float:
    value = float(number) * factor
    if value > most:
        raise NotASize(f"is beyond any machine, allowed: up to {most:g}")
    if value < least:
        raise NotASize("is nothing, allowed: more than 0")
    return value


def count(written: str) -> float:
    """Parse 7B as 7e9: parameters, or FLOP/s with T; K, M, B (or G) and T are powers of ten."""
    match = _matched(NUMBER + "([KMBGT]?)", written, "is not a number such as 350M, 7B or 1.3B")
    return _bounded(match[1], COUNTS[match[2].upper().replace("G", "B")])


def whole_number(written: str) -> int:
    """Parse a whole number from 1 to a billion."""
    match = _matched("[0-9]+", written, "is not a whole number")
    return int(_bounded(match[0], 1, most=MOST_WHOLE))


def nbytes(written: str) -> float:
    """Parse 80GB as 8e10 bytes, 80GiB as 80·2^30."""
    match = _matched(NUMBER + "([kmgt]i|[kmgt]?)b", written, "is not a size such as 80GB, 900MB or 80GiB")
    return _bounded(match[1], PREFIXES[match[2].lower()])


def rate(written: str) -> float:
    """Parse 400Gbit, 400Gbit/s, 400Gbps, 50GB/s or 50GBps as bytes per second: B is a byte, and b alone is
    ambiguous."""
    otherwise = "is not a rate such as 400Gbit, 100mbit or 400Gbps, in bits, or 50GB/s or 50GBps, in bytes"
    pattern = NUMBER + "([kKmMgGtT]?)(?:((?i:bit)(?:/s)?|bps)|B(?:/s|ps)?)"
    match = _matched(pattern, written, otherwise, re.NOFLAG)
    return _bounded(match[1], PREFIXES[match[2].lower()] / (8 if match[3] else 1))


def seconds(written: str) -> float:
    """Parse 5us as 5e-6 seconds; 0 is a link without latency."""
    match = _matched(NUMBER + "(us|ms|s)", written, "is not a time such as 5us or 2ms")
    return _bounded(match[1], {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2].lower()], least=0)


def share(written: str) -> float:
    """Parse 40% or 0.4 as 0.4; more than 0, up to 1."""
    match = _matched(NUMBER + "(%?)", written, "is not a share such as 40% or 0.4")
    value = float(match[1]) / (100 if match[2] else 1)
    if not LEAST <= value <= 1:
        raise NotASize("is out of range, allowed: more than 0, up to 1 (100%)")
    return value
