"""What goes wrong without hanging: each fact that a rank tells goes to whoever looks at its kind.

A finding is certain; what only looks wrong is asked as a question, and decides nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.axes import Begun, Copies, Draws, Dropouts, Norms, Parts, Shares
from distlab.tools.check.judge.memory_faults import Contents, Layouts, Lost
from distlab.tools.check.judge.parameter_calls import ParameterCalls
from distlab.tools.check.judge.rank_state import (
    AT_REST,
    DATA,
    DEVICES,
    WAITED,
    Call,
    CallPlace,
    Finding,
    RankState,
    call_text,
    ranks_do,
    typed,
)
from distlab.tools.check.judge.replicas import Replicas
from distlab.tools.check.judge.source_lines import divided_before

Group = tuple[str, tuple[int, ...]]  # what holds the parameters, and on which ranks
PassKey = tuple[str, str, int]  # line, callers, and number there of a pass over a DataLoader

# What the ranks train on: whether it is the same on all, and whether all have as much of it.
#
# Data parallel ranks that see the same samples compute one rank's gradient as often as there are ranks, and nothing
# but the loss curve shows it. The first inputs of a DDP are compared to the bit: one pair may be equal by chance, two
# are not.

ENOUGH_SAMPLES = 2  # inputs that have to be alike


class Samples:
    """Checksums of first inputs and batches, and how many batches there were."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._inputs: dict[Group, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        self._forwards: dict[str, str] = {}
        self._batches: dict[tuple[PassKey, int], dict[int, int]] = defaultdict(
            dict
        )  # by pass over a loader, and number
        self._counts: dict[PassKey, dict[int, int]] = defaultdict(dict)  # by pass, and rank
        self._shuffled: dict[PassKey, int] = {}  # by pass that trains, the sampler that may shuffle it

    def take_input(self, case: RankState, key: str, group: int, index: int, found: int, place: int) -> None:
        self._inputs[key, case.group(group).ranks][index][case.rank] = found
        self._forwards[key] = case.place(place).line

    def take_batch(self, case: RankState, turn: int, index: int, found: int) -> None:
        self._batches[case.course.key(turn), index][case.rank] = found

    def take_shuffled(self, case: RankState, turn: int, sampler: int) -> None:
        if case.rank == 0:
            self._shuffled[case.course.key(turn)] = sampler

    def take_count(self, case: RankState, turn: int, count: int, place: int) -> None:  # noqa: ARG002
        self._counts[case.course.key(turn)][case.rank] = count

    def shared(self) -> Iterator[Finding]:
        for (key, ranks), by_index in self._inputs.items():
            alike = [seen for seen in by_index.values() if set(seen) == set(ranks) and len(set(seen.values())) == 1]
            if len(ranks) > 1 and len(alike) >= ENOUGH_SAMPLES:
                sentence = (
                    f"{name_ranks(ranks)} train on the same data at {self._forwards[key]} ({key}): their first"
                    f" {len(alike)} inputs are equal to the bit, so each sample counts as often as there are ranks;"
                    " give the loader a DistributedSampler"
                )
                yield Finding(DATA, sentence, ranks)

    def questions(self) -> Iterator[str]:
        size = self._world_size
        for (line, _, turn), counts in self._counts.items():
            if len(set(counts.values())) > 1 and len(counts) == size:
                listed = ", ".join(f"rank {rank} {count}" for rank, count in sorted(counts.items()))
                yield f"are unequal numbers of batches meant (pass {turn} over the DataLoader at {line}: {listed})?"
        for first, then in self._shuffled_passes():
            seen = self._batches[first, 0]
            if seen == self._batches[then, 0] and len(seen) == len(set(seen.values())) == size > 1:
                again_at = (
                    f"pass {then[2]} over the DataLoader at {then[0]} begins with the same batches as the pass before"
                )
                yield f"is it meant that {again_at}? A DistributedSampler shuffles anew only after set_epoch(epoch)"
                return

    def _shuffled_passes(self) -> Iterator[tuple[PassKey, PassKey]]:
        """Passes that one shuffling sampler of rank 0's gave the batches to train on, each with the next."""
        by_sampler: dict[int, list[PassKey]] = defaultdict(list)
        for turn, sampler in self._shuffled.items():
            by_sampler[sampler].append(turn)
        for turns in by_sampler.values():
            yield from pairwise(turns)


# Whether gradients were divided by the number of ranks once: asked, as no run can prove it.
#
# A loss may be a mean over a rank's samples, or a rank's share of the mean over all of them, whose gradients are to be
# summed. The graph of a loss shows which, mostly, and where it does not, nothing is asked. Between the all_reduce and
# the step it is seen whether anything touched the tensors, and by how much they were scaled there: over three steps, to
# a part in a thousand.

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


class Gradients:
    """The first steps of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._steps: dict[int, list[Step]] = defaultdict(list)

    def take(
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


class Quiet:
    """All facts of a run so far."""

    def __init__(self, world_size: int, mesh: Sequence[tuple[str, int]] = ()) -> None:
        self._replicas, self._samples = Replicas(), Samples(world_size)
        self.parameter_calls = ParameterCalls()
        self._gradients, self._dropouts = Gradients(world_size), Dropouts(world_size, mesh)
        self._copies, self._shares, self._draws = Copies(), Shares(), Draws(world_size)
        self._norms, self._parts, self._begun = Norms(), Parts(), Begun()
        self._layouts, self._contents, self._lost = Layouts(), Contents(), Lost()
        self._handles: dict[tuple[CallPlace, CallPlace | None], tuple[str, list[int]]] = {}  # by call and its wait
        self._devices: dict[str, dict[int, tuple[int, str, int]]] = defaultdict(dict)  # number, id, cards: of each rank
        self._takers = {
            "module": self._replicas.take_module,
            "parameters": self.parameter_calls.take_names,
            "averaged": self._replicas.take_averaged,
            "elsewhere": self._replicas.take_elsewhere,
            "weights": self._replicas.take_weights,
            "gradients": self._replicas.take_gradients,
            "states": self._replicas.take_states,
            "buffers": self._replicas.take_buffers,
            "trace": self._replicas.take_trace,
            "options": self._replicas.take_options,
            "fault": self._replicas.take_fault,
            "input": self._samples.take_input,
            "batch": self._samples.take_batch,
            "batches": self._samples.take_count,
            "shuffled": self._samples.take_shuffled,
            "gradient": self._gradients.take,
            "mesh": self._dropouts.take_mesh,
            "dropout": self._dropouts.take,
            "device": self._take_device,
            "copies": self._copies.take,
            "declared": self._copies.take_declared,
            "given": self._shares.take,
            "summands": self._shares.take_summands,
            "drawn": self._draws.take,
            "split": self._draws.take_split,
            "clipped": self._norms.take,
            "entered": self._parts.take,
            "taken": self._begun.take,
            "unread": self._lost.take_unread,
            "cut": self._lost.take_cut,
            "strided": self._layouts.take,
            "summed": self._contents.take,
            "unwaited": self._take_handle,
            "written": self._take_handle,
        }

    def take(self, case: RankState, fact: list[Any]) -> Iterable[Finding]:
        """One fact of one rank; what is wrong with it at once. Raises an exception of any kind where a value is not of
        the type that its taker names: what is kept is looked at later, where nobody asks whose it was."""
        kind, *values = fact
        taker: Any = self._takers.get(kind)
        if taker is None:
            return ()
        hints = get_type_hints(taker)
        typed(values, [hints[name] for name in hints if name not in ("case", "return")])
        return taker(case, *values) or ()

    def _take_device(self, case: RankState, device: int, uuid: str, host: str, visible: int) -> None:
        self._devices[host][case.rank] = device, uuid, visible

    def _take_handle(self, case: RankState, call: Call, waited_at: Any = None) -> None:
        """A call, and the place of its wait if it had one."""
        self._handles.setdefault((call.place, waited_at), (call_text(call), []))[1].append(case.rank)

    def handles(self) -> Iterator[Finding]:
        """Calls whose handles or tensors were not left alone, each line once."""
        for (place, waited_at), (called, of_ranks) in self._handles.items():
            ranks = sorted(set(of_ranks))
            if waited_at is None:
                sentence = (
                    f"{ranks_do(ranks, 'never wait')} for {called} of {place}: its tensor may be read or freed before"
                    " the call has ended; keep the handle and call wait()"
                )
            else:
                sentence = (
                    f"{ranks_do(ranks, 'write')} into the tensor of {called} between its call at {place} and the wait"
                    f" at {waited_at}: what is sent or summed is neither the old value nor the new one"
                )
            yield Finding(WAITED if waited_at is None else AT_REST, sentence, tuple(ranks))

    def at_end(self) -> Iterator[Finding]:
        mixed = list(self.parameter_calls.findings())
        yield from mixed
        yield from self._replicas.drifted(explained={finding.ranks for finding in mixed})
        yield from self._samples.shared()
        yield from self._dropouts.apart()
        yield from self._copies.apart()
        yield from self._shares.alike()
        yield from self._draws.apart()
        yield from self._norms.apart()
        yield from self._parts.apart()
        yield from self._layouts.apart()
        yield from self._contents.written()
        for host, devices in self._devices.items():
            yield from shared_devices(host, devices)

    def questions(self) -> Iterator[str]:
        yield from self.parameter_calls.questions()
        yield from self._replicas.questions()
        yield from self._gradients.questions()
        yield from self._samples.questions()
        yield from self._draws.questions()
        yield from self._begun.questions()
        yield from self._lost.questions()


def shared_devices(host: str, devices: Mapping[int, tuple[int, str, int]]) -> Iterator[Finding]:
    """Each card on which several ranks compute, where their host shows them a card a rank; on fewer they have to."""
    on = defaultdict[tuple[int, str], list[int]](list)
    for rank, (number, uuid, visible) in devices.items():
        if visible >= len(devices):
            on[number, uuid].append(rank)
    for (number, _), ranks in on.items():
        if len(ranks) > 1:
            what = f"{name_ranks(ranks)} compute on one device, cuda:{number} of {host}"
            yield Finding(DEVICES, f"{what}: call torch.cuda.set_device(LOCAL_RANK) before anything else", tuple(ranks))
