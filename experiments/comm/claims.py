"""What a run of collectives has to claim, so that a check that vanishes is missed."""

from collections.abc import Iterator

from workers.contract import Claims, Mode

OPERATIONS, COMPARED = ("all_reduce", "reduce_scatter", "all_gather"), {0.25: "256 KiB", 4: "4 MiB", 64: "64 MiB"}
PRIMITIVES, GRADIENTS = 9, 12


def claims(mode: Mode, sweep_mib: float) -> Iterator[Claims]:
    """The primitives and their gradients, and of each way to sum what it leaves and sends."""
    yield Claims(("forward",), times=PRIMITIVES)
    yield Claims(("gradients",), times=GRADIENTS)
    yield Claims(("no autograd", "demo", "ring"))
    yield Claims(("speeds",))  # of the operations that the chosen variants have
    yield Claims(("sum",), ("naive", *mode.names))
    yield Claims(("contents",), mode.names, times=len(OPERATIONS))
    yield Claims(("drawn bytes",), mode.names)
    sizes = [name for mib, name in COMPARED.items() if mib <= sweep_mib]
    yield Claims([f"wire bytes {operation} {size}" for operation in OPERATIONS for size in sizes], mode.names)
