"""What is wrong with the text of a variable, as a sentence: its name, its value, and what is allowed."""

from typing import Any

from workers.config.values import suggest

SECRET = ("LAB_KEY",)
MOST_SHOWN = 120  # letters of a value: nobody reads more of one that is wrong


def shown(value: object) -> str:
    """A value in quotes, with letters that no terminal shows escaped, and cut where it is long."""
    text = str(value)
    cut = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
    return repr(cut) + (f" ({len(text)} letters)" if cut != text else "")


def named_value(name: str, value: object) -> str:
    """A variable with its value, but not that of a key, since what is printed may be read by others."""
    return f"{name}=(not shown)" if name in SECRET else f"{name}={shown(value)}"


def sentence(fault: Any, given: str, field: Any) -> str:
    """One of pydantic's faults as a sentence; `given` is the text of the variable that fills pydantic's `field`."""
    value = named_value(field.alias, given)
    kind = fault["type"]
    if kind == "literal_error":
        allowed = [str(word) for word in field.annotation.__args__]
        return f"{value} is not one of {', '.join(allowed)}{suggest(given, allowed)}"
    if kind in ("int_parsing", "int_from_float"):
        return f"{value} is not a whole number"
    if kind in ("float_parsing", "finite_number"):
        return f"{value} is not a number"
    if kind == "bool_parsing":
        return f"{value} is neither 0 nor 1"
    if kind == "value_error":
        return f"{value} {fault['ctx']['error']}"
    if kind == "string_pattern_mismatch":
        return f"{value} is not a size such as 900m or 2g"
    bounds = _range(field)
    return f"{value} is out of range: allowed is {bounds}" if bounds else f"{value} is not {kind.split('_')[0]}"


def _range(field: Any) -> str:
    bounds = {key: getattr(rule, key) for rule in field.metadata for key in ("ge", "gt", "le") if hasattr(rule, key)}
    if "le" in bounds and "gt" in bounds:
        return f"more than {bounds['gt']}, up to {bounds['le']}"
    if "le" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    if "ge" in bounds:
        return f"{bounds['ge']} and more"
    return f"more than {bounds['gt']}" if "gt" in bounds else ""
