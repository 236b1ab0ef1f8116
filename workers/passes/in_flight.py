"""Microbatches in flight: how many a rank of a pipeline held for what was left of their backward pass, at most."""

from typing import Any, Protocol

from workers.lab import Lab
from workers.measure.formulas.pipelines import in_flight

CONTROL = "tests/workers/passes/test_in_flight.py::test_too_many_in_flight_fail"


class OfStages(Protocol):
    """A strategy with an `engine` that runs the stages among its `parts` (strategies/pipelined.py, stacked.py)."""

    engine: Any
    parts: Any


def check_in_flight(lab: Lab, name: str, strategy: OfStages, schedule: str) -> None:
    """No rank holds more than `schedule` says; of an engine that does not count them nothing is claimed."""
    held, mesh, chunks = strategy.engine.most_in_flight, lab.mesh, len(strategy.parts.stages)
    if held is None:
        return
    allowed = in_flight(schedule, mesh.size("pp"), lab.config.num_microbatches, mesh.index("pp"), chunks)
    detail = f"{held} microbatches held at most, {allowed} allowed"
    lab.check("in flight", max(0, held - allowed), 0, name, detail, control=CONTROL)
