"""Faults that do not hang: each report of a rank goes to the fault for its kind.

`SilentFaults.faults` lists them in the order of their reports; add a new one there. A finding is certain; what may be
intended is a question, and does not fail the run.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_type_hints

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.axes import ClippedNorms, Copies, Dropouts, InitialWeights, PartialSums
from distlab.tools.check.judge.call_tensors import Handles, Layouts, ParameterCalls, UnusedResults
from distlab.tools.check.judge.fault import Fault
from distlab.tools.check.judge.rank_state import DEVICES, Finding, RankState, typed
from distlab.tools.check.judge.replicas import Replicas
from distlab.tools.check.judge.samples import Batches, Permutations, SameInputs, SameInputsOnAxis


class Devices(Fault):
    """GPUs used by several ranks, if their host has one per rank; with fewer they must share."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[int, tuple[int, str, int]]] = defaultdict(dict)  # number, id, cards: of each rank

    def on_device(self, state: RankState, device: int, uuid: str, host: str, visible: int) -> None:
        self._devices[host][state.rank] = device, uuid, visible

    def findings(self) -> Iterator[Finding]:
        for host, devices in self._devices.items():
            on = defaultdict[tuple[int, str], list[int]](list)
            for rank, (number, uuid, visible) in devices.items():
                if visible >= len(devices):
                    on[number, uuid].append(rank)
            for (number, _), ranks in on.items():
                if len(ranks) > 1:
                    what = f"{name_ranks(ranks)} compute on one device, cuda:{number} of {host}"
                    remedy = "call torch.cuda.set_device(LOCAL_RANK) before anything else"
                    yield Finding(DEVICES, f"{what}: {remedy}", tuple(ranks))


class SilentFaults:
    """All reports of a run so far."""

    def __init__(self, world_size: int, mesh: Sequence[tuple[str, int]] = ()) -> None:
        self.parameter_calls, self.handles = ParameterCalls(), Handles()
        self.faults: list[Fault] = [
            self.parameter_calls, Replicas(self.parameter_calls), SameInputs(), Batches(),
            Dropouts(world_size, mesh), Copies(), SameInputsOnAxis(), Permutations(), ClippedNorms(), PartialSums(),
            InitialWeights(), Layouts(), UnusedResults(), Devices(),
        ]  # fmt: skip
        self._handlers: dict[str, Any] = {
            name.removeprefix("on_"): getattr(each, name)
            for each in (*self.faults, self.handles) for name in dir(each) if name.startswith("on_")
        }  # fmt: skip

    def receive(self, state: RankState, report: list[Any]) -> Iterable[Finding]:
        """Process one report of one rank; return its immediate findings. Raises any exception if a value does not have
        the type that its method declares, since stored values are used later, without knowing their rank."""
        kind, *values = report
        handler = self._handlers.get(kind)
        if handler is None:
            return ()
        hints = get_type_hints(handler)
        typed(values, [hints[name] for name in hints if name not in ("state", "return")])
        return handler(state, *values) or ()

    def at_end(self) -> Iterator[Finding]:
        """Yield findings once all scripts have ended."""
        for each in self.faults:
            yield from each.findings()

    def questions(self) -> Iterator[str]:
        for each in self.faults:
            yield from each.questions()
