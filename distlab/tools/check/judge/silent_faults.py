"""What goes wrong without hanging: each fact that a rank tells goes to the fault that takes its kind.

`Quiet.faults` are all of them, in the order in which they are told: who adds one writes it there. A finding is
certain; what only looks wrong is asked as a question, and decides nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.axes import Begun, Copies, Dropouts, Norms, Parts
from distlab.tools.check.judge.call_tensors import Handles, Layouts, Lost, ParameterCalls
from distlab.tools.check.judge.fault import Fault
from distlab.tools.check.judge.rank_state import DEVICES, CallPlace, Finding, RankState, typed
from distlab.tools.check.judge.replicas import Replicas
from distlab.tools.check.judge.samples import Batches, Draws, SameInputs, SameShares
from distlab.tools.check.judge.source_lines import divided_before

NEAR = 1e-3
ENOUGH_STEPS = 2  # steps of each rank


class Step(NamedTuple):
    """The gradient at a step beside what was reduced."""

    ratio: float  # of their norms
    by_script: bool  # the all_reduce is the script's own, else DDP's
    untouched: bool  # since the all_reduce
    size: int  # of the group
    reduced_at: CallPlace
    stepped_at: CallPlace
    of_mean: bool  # the loss is known to be a mean over a rank's own samples


class Gradients(Fault):
    """Whether gradients were divided by the number of ranks once: asked, as no run can prove it.

    A loss may be a mean over a rank's samples, or a rank's share of the mean over all of them, whose gradients are to
    be summed. The graph of a loss shows which, mostly, and where it does not, nothing is asked. Between the all_reduce
    and the step it is seen whether anything touched the tensors, and by how much they were scaled there: over three
    steps, to a part in a thousand.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._steps: dict[int, list[Step]] = defaultdict(list)

    def take_gradient(
        self, case: RankState, ratio: float, by_script: bool, untouched: bool, size: int, reduced_at: int,
        stepped_at: int, of_mean: bool,
    ) -> None:  # fmt: skip
        """One step of one rank, whose places come as numbers."""
        if not 1 <= size <= self._world_size:
            raise ValueError(f"a group of {size} ranks: expected 1 to {self._world_size}")
        step = Step(float(ratio), by_script, untouched, size, case.place(reduced_at), case.place(stepped_at), of_mean)
        self._steps[case.rank].append(step)

    def questions(self) -> Iterator[str]:
        steps = [step for of_rank in self._steps.values() for step in of_rank]
        if len(self._steps) < self._world_size or len(steps) < ENOUGH_STEPS * self._world_size or steps[0].size < 2:
            return
        if not all(step.of_mean for step in steps):
            return
        size, first = steps[0].size, steps[0]
        if all(step.by_script and step.untouched and abs(step.ratio - 1) < NEAR for step in steps):
            if divided_before(first.reduced_at):
                return
            yield (
                f"possible bug: gradients are summed over {size} ranks and never averaged. Nothing divides them between"
                f" their all_reduce at {first.reduced_at.line} and the step at {first.stepped_at.line}, and the loss is"
                f" a mean over a rank's own samples, so they are {size} times those of the mean over all samples"
            )
        elif all(not step.by_script and abs(step.ratio * size - 1) < NEAR for step in steps):
            then = f"at the step at {first.stepped_at.line} they are 1/{size} of that"
            yield f"are the gradients divided by {size} twice? DDP has divided them, and {then}"


class Devices(Fault):
    """Each card on which several ranks compute, where their host shows them a card a rank; on fewer they have to."""

    def __init__(self) -> None:
        self._told: dict[str, dict[int, tuple[int, str, int]]] = defaultdict(dict)  # number, id, cards: of each rank

    def take_device(self, case: RankState, device: int, uuid: str, host: str, visible: int) -> None:
        self._told[host][case.rank] = device, uuid, visible

    def findings(self) -> Iterator[Finding]:
        for host, devices in self._told.items():
            on = defaultdict[tuple[int, str], list[int]](list)
            for rank, (number, uuid, visible) in devices.items():
                if visible >= len(devices):
                    on[number, uuid].append(rank)
            for (number, _), ranks in on.items():
                if len(ranks) > 1:
                    what = f"{name_ranks(ranks)} compute on one device, cuda:{number} of {host}"
                    remedy = "call torch.cuda.set_device(LOCAL_RANK) before anything else"
                    yield Finding(DEVICES, f"{what}: {remedy}", tuple(ranks))


class Quiet:
    """All facts of a run so far."""

    def __init__(self, world_size: int, mesh: Sequence[tuple[str, int]] = ()) -> None:
        self.parameter_calls, self.handles = ParameterCalls(), Handles()
        self.faults: list[Fault] = [
            self.parameter_calls, Replicas(self.parameter_calls), Gradients(world_size), SameInputs(), Batches(),
            Dropouts(world_size, mesh), Copies(), SameShares(), Draws(), Norms(), Parts(), Begun(), Layouts(),
            Lost(), Devices(),
        ]  # fmt: skip
        self._takers: dict[str, Any] = {
            name.removeprefix("take_"): getattr(each, name)
            for each in (*self.faults, self.handles) for name in dir(each) if name.startswith("take_")
        }  # fmt: skip

    def take(self, case: RankState, fact: list[Any]) -> Iterable[Finding]:
        """One fact of one rank; what is wrong with it at once. Raises an exception of any kind where a value is not of
        the type that its taker names: what is kept is looked at later, where nobody asks whose it was."""
        kind, *values = fact
        taker = self._takers.get(kind)
        if taker is None:
            return ()
        hints = get_type_hints(taker)
        typed(values, [hints[name] for name in hints if name not in ("case", "return")])
        return taker(case, *values) or ()

    def at_end(self) -> Iterator[Finding]:
        """Of scripts that have all ended."""
        for each in self.faults:
            yield from each.findings()

    def questions(self) -> Iterator[str]:
        for each in self.faults:
            yield from each.questions()
