"""What is wrong with the settings, a sentence each: the variable, its value, and what is allowed."""

from typing import TYPE_CHECKING, Any

from workers.config.values import modes, suggest

if TYPE_CHECKING:
    from workers.config import Config

# No training of a variant is timed by itself: comm and train have none, largebatch's step together.
UNTIMED_MODES = ("comm", "train", "largebatch")
RECOMPUTING_MODES = ("dp", "fsdp")  # tp would send what a layer sends once more, pp runs its layers by itself


def contradictions(config: "Config") -> list[str]:
    """Faults of several variables together; those of one mode are found by its `refuse`."""
    faults = []
    if config.rank is not None and config.rank >= config.world_size:
        last = config.world_size - 1
        faults.append(f"RANK={config.rank} is outside of WORLD_SIZE={config.world_size}, allowed: 0 to {last}")
    if config.rank is None and config.master_addr is not None:
        faults.append(
            f"MASTER_ADDR={config.master_addr!r} is set and RANK is not: set both to be a rank, neither to start all"
        )
    if config.rank is not None and config.master_addr is None:
        faults.append(f"RANK={config.rank} is set and MASTER_ADDR is not: set it to the host of rank 0")
    if config.slow_rank is not None and int(config.slow_rank.partition(":")[0]) >= config.world_size:
        last = config.world_size - 1
        faults.append(
            f"LAB_SLOW_RANK={config.slow_rank!r} names a rank outside of WORLD_SIZE={config.world_size}, allowed: 0 to {last}"
        )
    if config.run_mode in UNTIMED_MODES:
        faults += untimed(config)
    if config.backend == "nccl" and config.device == "cpu" and "device" in config.model_fields_set:
        faults.append("LAB_BACKEND=nccl works on LAB_DEVICE=cuda alone")
    if config.recompute and config.run_mode not in RECOMPUTING_MODES:
        faults.append(
            f"LAB_RECOMPUTE=1 is not possible in {config.run_mode}, allowed: {', '.join(RECOMPUTING_MODES)}, "
            "whose ranks run whole layers"
        )
    return faults


def untimed(config: "Config") -> list[str]:
    """A sentence for each variable that would do nothing in these modes."""
    allowed = ", ".join(mode for mode in modes() if mode not in UNTIMED_MODES)
    asked = []
    if config.slow_rank is not None:
        asked.append(f"LAB_SLOW_RANK={config.slow_rank!r} slows a rank in the timed training of each variant")
    if config.trace:
        asked.append("LAB_TRACE=1 profiles a step of the timed training of each variant")
    return [f"{what}, and {config.run_mode} has none, allowed: {allowed}" for what in asked]


def sentence(fault: Any, given: str, field: Any) -> str:
    """One of pydantic's faults as a sentence; `given` is the text of the variable that fills pydantic's `field`."""
    value = f"{field.alias}={given!r}"
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
    return f"{value} is out of range: allowed is {_range(field)}"


def _range(field: Any) -> str:
    bounds = {key: getattr(rule, key) for rule in field.metadata for key in ("ge", "gt", "le") if hasattr(rule, key)}
    if "le" in bounds and "gt" in bounds:
        return f"more than {bounds['gt']}, up to {bounds['le']}"
    if "le" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    return f"{bounds['ge']} and more" if "ge" in bounds else f"more than {bounds['gt']}"
