"""Numbers for readers: three digits and a unit; MB is 10^6 bytes, as network vendors and the papers count."""

import math
from collections.abc import Iterable
from typing import Any

MOST_NAMED = 16  # ranks
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def human_bytes(value: float | None) -> str:
    """Return 9600000 as "9.60 MB"; a missing value as "-"."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    power = 0
    while abs(value) >= 999.5 and power < len(BYTE_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.0f} B" if power == 0 else f"{three_digits(value)} {BYTE_UNITS[power]}"


def byte_unit(most: float) -> tuple[float, str]:
    """Return the bytes per unit and its name, for a table or a chart whose largest number is `most` bytes."""
    return next(
        (1000.0**power, unit)
        for power, unit in reversed(list(enumerate(BYTE_UNITS)))
        if most >= 1000**power or not power
    )


def human_bits(value: float) -> str:
    """Return bits per second: 98200000 as "98.2 Mbit/s"."""
    power = next((power for power in (3, 2, 1) if abs(value) >= 999.5 * 1000 ** (power - 1)), 0)
    return f"{three_digits(value / 1000**power)} {('', 'k', 'M', 'G')[power]}bit/s"


def milliseconds(seconds: float | None) -> str:
    """Return 0.0812 s as "81.2", without the unit, for columns that name it."""
    return "-" if seconds is None else three_digits(seconds * 1000)


def duration(seconds: float) -> str:
    """Return a duration for people: "41 s", "2.5 min", "3.4 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"


def share(seconds: float, total_s: float) -> str:
    """Return milliseconds and per cent of a total, such as "12.3 (41)"; "-" if there is nothing."""
    return f"{milliseconds(seconds)} ({100 * seconds / total_s:.0f})" if seconds > 0 else "-"


def three_digits(value: float) -> str:
    """Return 81.234 as "81.2", 1.6 as "1.60", 1234.5 as "1234"; values below a thousandth with an exponent."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3}f}"


def difference(value: float) -> str:
    """Return a largest difference: "0" only if it is exactly 0, else two digits such as "2.8e-17"."""
    return "0" if value == 0 else f"{value:.1e}"


def allowed(check: dict[str, Any]) -> str:
    """Return a check's tolerance with its unit, such as "8 epsilons of bfloat16"."""
    bound = f"{check['tolerance']:.3g}"
    return counted(float(bound), check["unit"]) if check["unit"] else bound


def quantity(value: float, unit: str) -> str:
    """Return a compared number with its unit: bytes, bits and seconds scaled, others unchanged."""
    if unit == "B":
        return human_bytes(value)
    if unit == "bit/s":
        return human_bits(value)
    if unit == "s":
        return f"{milliseconds(value)} ms"
    return counted(value, unit)


def counted(number: float, what: str) -> str:
    """Return a number with what it counts, in plural or singular: "37 calls", "1 call", "1 epsilon of bfloat16"."""
    noun, *rest = what.split(" ")
    if number == 1 and noun.endswith("s") and "/" not in noun:
        noun = noun.removesuffix("es") if noun.endswith("ches") else noun.removesuffix("s")
    shown = str(number) if isinstance(number, int) else f"{number:.4g}"
    return " ".join([shown, noun, *rest]).rstrip()


def round_step(width: float, most: int) -> float:
    """Return 1, 2 or 5 times a power of ten, such that an axis of this width has at most `most` steps."""
    power = 10.0 ** math.floor(math.log10(width / most))
    return next(power * times for times in (1, 2, 5, 10) if width / (power * times) <= most)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 2`, `ranks 1 and 3`, `ranks 1, 2 and 3`; of more than MOST_NAMED the first and how many more."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > MOST_NAMED:
        return f"ranks {', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
