"""What ranks along one axis of a device mesh should hold alike, or each for itself: rank 0 compares what they tell."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.rank_state import DATA, DROPOUT, REPLICAS, Finding, RankState, ranks_do, typed

# Dropout inside a tensor-parallel group: ranks that hold the same activations have to drop the same of them.
#
# Which ranks those are the script's own device mesh says, by an axis called tp, or LAB_MESH. Where activations differ
# they are cut, and there each rank has to draw its own: so ranks are compared only where their inputs are equal.

AXIS = "tp"


class Dropouts:
    """The first dropouts of all ranks: the state of the random generator before, and the checksum of the input."""

    def __init__(self, world_size: int, mesh: Sequence[tuple[str, int]]) -> None:
        sizes = [size for _, size in mesh]
        self._groups = groups_of(AXIS, [name for name, _ in mesh], sizes, list(range(world_size)))
        self._seen: dict[int, dict[int, tuple[int, int, str]]] = defaultdict(dict)

    def take_mesh(self, case: RankState, names: list[str], ranks: Any) -> None:  # noqa: ARG002
        """A device mesh of the script's, as nested lists of ranks."""
        sizes, level = [], ranks
        while isinstance(level, list):
            sizes.append(len(level))
            level = level[0]
        numbers = flat(ranks)
        typed(numbers, [int] * len(numbers))
        self._groups = self._groups or groups_of(AXIS, names, sizes, numbers)

    def take(self, case: RankState, index: int, state: int, given: int, place: int) -> None:
        """One dropout of one rank."""
        self._seen[index][case.rank] = state, given, case.place(place).line

    def apart(self) -> Iterator[Finding]:
        """Groups whose ranks drop others of the same activations."""
        for ranks in self._groups:
            for index, seen in sorted(self._seen.items()):
                here = [seen[rank] for rank in ranks if rank in seen]
                states, given = {state for state, _, _ in here}, {each for _, each, _ in here}
                if len(here) == len(ranks) > 1 and len(given) == 1 and len(states) > 1:
                    sentence = (
                        f"dropout #{index} at {here[0][2]}: {name_ranks(ranks)} of one tensor-parallel group have the"
                        " same activations and another state of the random generator, so each drops others; seed them"
                        " alike"
                    )
                    yield Finding(DROPOUT, sentence, tuple(ranks))
                    break


def groups_of(axis: str, names: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """The groups along an axis of a mesh whose `ranks` stand in order, the outermost axis first; none without it."""
    if axis not in names or len(names) != len(sizes) or prod(sizes) != len(ranks):
        return []
    position = list(names).index(axis)
    size, inner = sizes[position], prod(sizes[position + 1 :])
    starts = [start for start in range(len(ranks)) if start // inner % size == 0]
    return [[ranks[start + step * inner] for step in range(size)] for start in starts]


def flat(nested: Any) -> list[int]:
    return [number for each in nested for number in flat(each)] if isinstance(nested, list) else [nested]


def ranks_along(case: RankState, ranks: list[Any]) -> tuple[int, ...]:
    """These ranks, of which the one that tells is one; raises ValueError otherwise."""
    typed(ranks, [int] * len(ranks))
    if case.rank not in ranks or not all(0 <= rank < case.world_size for rank in ranks):
        raise ValueError(f"the ranks {ranks} told by rank {case.rank} of {case.world_size}")
    return tuple(ranks)


# What comes again and again is known by its line and its number there: a rank may do more of it alone at other lines.

At = tuple[str, str, int]  # a line, the lines that called it, and how often it was reached before


def at(case: RankState, place: int, turn: int) -> At:
    found = case.place(place)
    return found.line, found.callers, turn


# Copies that a DTensor declares: along an axis on which it is replicated, ranks hold the same bits.
#
# The last step that all told decides, and those before it say since when: a script may bring ranks together again.
# Rounding is let pass, which other machines do in another way: norms that differ by less than one part in 100,000.

Along = tuple[str, tuple[int, ...]]  # the name of an axis, and the ranks along it
Held = tuple[int, float]  # the bits of a tensor as a checksum, and its norm
ROUNDING = 1e-5
END = -1  # in the place of a step


class Copies:
    """What ranks hold of replicated parameters, and of tensors that `DTensor.from_local` was told are replicated."""

    def __init__(self) -> None:
        self._held: dict[Along, dict[int, dict[int, dict[str, Held]]]] = defaultdict(lambda: defaultdict(dict))
        self._declared: dict[Along, dict[At, dict[int, Held]]] = defaultdict(lambda: defaultdict(dict))

    def take(self, case: RankState, step: int, axis: str, ranks: list[int], held: list[list[Any]]) -> None:
        for each in held:
            typed(each, [str, int, float])
        found = {name: (bits, float(norm)) for name, bits, norm in held}
        self._held[axis, ranks_along(case, ranks)][step][case.rank] = found

    def take_declared(
        self, case: RankState, turn: int, axis: str, ranks: list[int], bits: int, norm: float, place: int
    ) -> None:
        self._declared[axis, ranks_along(case, ranks)][at(case, place, turn)][case.rank] = bits, float(norm)

    def apart(self) -> Iterator[Finding]:
        yield from self._parameters_apart()
        told: set[str] = set()
        for (axis, ranks), turns in sorted(self._declared.items()):
            for (line, _, turn), seen in turns.items():
                if line not in told and set(seen) == set(ranks) and differ(list(seen.values())):
                    told.add(line)
                    sentence = (
                        f"{name_ranks(ranks)}, one group along the axis {axis}, have other values at {line} (call"
                        f" #{turn} of DTensor.from_local), where the tensor is declared Replicate: give all ranks of"
                        f" the axis {axis} the same samples, or say run_check=True, which broadcasts the first rank's"
                    )
                    yield Finding(REPLICAS, sentence, ranks)

    def _parameters_apart(self) -> Iterator[Finding]:
        """Of each axis one sentence, whatever number of groups it has."""
        found: dict[tuple[str, str], list[tuple[int, ...]]] = defaultdict(list)
        for (axis, ranks), by_step in self._held.items():
            whole = {step: seen for step, seen in by_step.items() if set(seen) == set(ranks)}
            if not whole or not (names := names_apart(whole[END if END in whole else max(whole)])):
                continue
            since = min((step for step in whole if step > 0 and names_apart(whole[step])), default=0)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            when = f", since step {since}{' or before' if since > 1 else ''}" if since else ""
            found[axis, f"{names[0]}{more}{when}"].append(ranks)
        for (axis, which), groups in sorted(found.items()):
            sentence = (
                f"replicas differ along the axis {axis}: {', '.join(map(name_ranks, sorted(groups)))} hold other values"
                f" of {which}; the parameters are declared Replicate along it, and what averages gradients keeps a"
                f" difference: begin with one seed, or one checkpoint, on all ranks of the axis {axis}"
            )
            yield Finding(REPLICAS, sentence, tuple(sorted(rank for group in groups for rank in group)))


def names_apart(seen: dict[int, dict[str, Held]]) -> list[str]:
    """The tensors that all ranks have told, and not alike."""
    return [
        name for name in next(iter(seen.values()))
        if all(name in held for held in seen.values()) and differ([held[name] for held in seen.values()])
    ]  # fmt: skip


def differ(held: Sequence[Held]) -> bool:
    """Whether tensors are not the same, by more than rounding."""
    norms = [norm for _, norm in held]
    return len({bits for bits, _ in held}) > 1 and max(norms) - min(norms) > ROUNDING * max(norms)


# Ranks along a data-parallel axis that are given the same samples.
#
# Of FullyShardedDataParallel and fully_shard the first inputs of a step are compared. Where a script sums gradients by
# itself, nobody knows which inputs belong to them: there the gradients that go into the sum are, which differ wherever
# ranks have other samples, or other parts of one sample.

ENOUGH_STEPS = 2  # in which ranks are alike; and not with the same input each time, which would be a constant


class Shares:
    """First inputs of steps along axes, and what went into sums of gradients."""

    def __init__(self) -> None:
        self._given: dict[Along, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        self._lines: dict[Along, str] = {}

    def take(self, case: RankState, step: int, axis: str, ranks: list[int], found: int, place: int) -> None:
        self._add((f"the axis {axis}", ranks_along(case, ranks)), step, case, found, place)

    def take_summands(self, case: RankState, step: int, group: int, found: int, place: int) -> None:
        self._add(("", case.group(group).ranks), step, case, found, place)

    def _add(self, along: Along, step: int, case: RankState, found: int, place: int) -> None:
        self._given[along][step][case.rank] = found
        self._lines[along] = case.place(place).line

    def alike(self) -> Iterator[Finding]:
        """Of each axis one sentence, whatever number of groups it has."""
        found: dict[tuple[str, str, int], list[tuple[int, ...]]] = defaultdict(list)
        for (axis, ranks), by_step in self._given.items():
            same = [set(seen.values()) for seen in by_step.values() if set(seen) == set(ranks)]
            alike = [each for each in same if len(each) == 1]
            if len(ranks) > 1 and len(alike) == len(same) >= ENOUGH_STEPS and len(set.union(*alike)) > 1:
                found[axis, self._lines[axis, ranks], len(alike)].append(ranks)
        for (axis, line, steps), groups in sorted(found.items()):
            who = ", and ".join(map(name_ranks, sorted(groups)))
            if axis:
                which = f"along {axis} train on the same data at {line}: the inputs of their first {steps} steps"
            else:
                which = (
                    f"train on the same data: the gradients that go into their sum at {line} in the first {steps} steps"
                )
            sentence = (
                f"{who} {which} are equal to the bit, so each sample counts as often as there are ranks; give the"
                " loader a DistributedSampler, or seed what draws the samples by the rank"
            )
            yield Finding(DATA, sentence, tuple(sorted(rank for group in groups for rank in group)))


# Permutations that ranks have to draw alike, to take other parts of them.


class Draws:
    """Passes over a DistributedSampler, and what random_split gave."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._drawn: dict[At, dict[int, tuple[int, int, int, int, int]]] = defaultdict(dict)
        self._splits: dict[At, dict[int, tuple[tuple[int, ...], int]]] = defaultdict(dict)

    def take(
        self, case: RankState, turn: int, seed: int, epoch: int, subset: int, size: int, replicas: int, place: int
    ) -> None:
        self._drawn[at(case, place, turn)][case.rank] = seed, epoch, subset, size, replicas

    def take_split(self, case: RankState, turn: int, sizes: list[int], found: int, place: int) -> None:
        typed(sizes, [int] * len(sizes))
        self._splits[at(case, place, turn)][case.rank] = tuple(sizes), found

    def apart(self) -> Iterator[Finding]:
        """The first pass in which ranks draw from other permutations."""
        for (line, _, turn), seen in self._drawn.items():
            if len(seen) < self._world_size or len({each[3:] for each in seen.values()}) > 1:
                continue  # other data sets, or other passes
            first = min(seen)
            for index, (what, remedy) in enumerate(SAMPLING):
                odd = [rank for rank in sorted(seen) if seen[rank][index] != seen[first][index]]
                if odd:
                    values = f" ({seen[odd[0]][index]}, and {seen[first][index]} on rank {first})" if index < 2 else ""
                    sentence = (
                        f"{ranks_do(odd, 'draw')} from another permutation in pass {turn} over a DistributedSampler at"
                        f" {line}: {what}{values}; some samples come twice and some never; {remedy}"
                    )
                    yield Finding(DATA, sentence, tuple(odd))
                    return

    def questions(self) -> Iterator[str]:
        for (line, _, _), seen in self._splits.items():
            sizes, found = zip(*seen.values(), strict=True)
            if len(seen) == self._world_size and len(set(sizes)) == 1 and len(set(found)) > 1:
                yield (
                    f"is it meant that random_split at {line} gives each rank another permutation? What one rank"
                    " validates with, others train on: give it generator=torch.Generator().manual_seed(n)"
                )
                return


SAMPLING = (
    ("it has another seed", "give the sampler of all ranks one seed"),
    ("it is in another epoch", "call set_epoch(epoch) on all ranks"),
    (
        "its data set is another Subset",
        "seed the split of the data set alike: generator=torch.Generator().manual_seed(n)",
    ),
)


# Norms of gradients that are cut over ranks: each rank's own is not the norm.

NEAR = 1e-4  # relative


class Norms:
    """What clip_grad_norm_ has returned for gradients that are cut over ranks, and the norm that it cuts to."""

    def __init__(self) -> None:
        self._norms: dict[tuple[tuple[int, ...], At], dict[int, tuple[float, float, str]]] = defaultdict(dict)

    def take(self, case: RankState, turn: int, norm: float, most: float, ranks: list[int], by: str, place: int) -> None:
        if ranks:
            self._norms[ranks_along(case, ranks), at(case, place, turn)][case.rank] = float(norm), float(most), by

    def apart(self) -> Iterator[Finding]:
        told: set[str] = set()
        for (ranks, (line, _, _)), seen in sorted(self._norms.items()):
            norms = [each[0] for each in seen.values()]
            scaled = any(norm > most for norm, most, _ in seen.values())
            differ = max(norms) - min(norms) > NEAR * max(norms)
            if line not in told and set(seen) == set(ranks) and differ and scaled:
                told.add(line)
                listed = ", ".join(f"{each[0]:.4g} on rank {rank}" for rank, each in sorted(seen.items()))
                part, remedy = CUT.get(seen[ranks[0]][2], CUT[""])
                sentence = (
                    f"clip_grad_norm_ at {line} gives {listed}: each rank has the norm of its own {part}, so {part}s"
                    f" are scaled by other factors; {remedy}"
                )
                yield Finding(REPLICAS, sentence, ranks)


BY_HAND = (
    "all_reduce the squares of these norms over the group, and scale by the root of their sum"
    " (torch.nn.utils.clip_grads_with_norm_)"
)
CUT = {  # what a rank has, and what to do, by what cuts the gradients
    "FSDP": ("shard", "call clip_grad_norm_ of the FullyShardedDataParallel module"),
    "reduce_scatter": ("shard", BY_HAND),
    "": ("part", BY_HAND),
}


# Tensor parallelism by hand: ranks sum their parts of an activation, which are of one batch, or mean nothing.


class Parts:
    """The first inputs of ranks that sum activations over a group in which nobody averages gradients."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[int, ...], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        self._lines: dict[tuple[int, ...], str] = {}

    def take(self, case: RankState, step: int, group: int, found: int, place: int) -> None:
        ranks = case.group(group).ranks
        self._inputs[ranks][step][case.rank] = found
        self._lines[ranks] = case.place(place).line

    def apart(self) -> Iterator[Finding]:
        for ranks, by_step in self._inputs.items():
            whole = [set(seen.values()) for seen in by_step.values() if set(seen) == set(ranks)]
            if len(whole) >= ENOUGH_STEPS and all(len(each) > 1 for each in whole):
                sentence = (
                    f"{name_ranks(ranks)} sum their parts of an activation at {self._lines[ranks]} (tensor"
                    f" parallelism), and have other samples: the inputs of their first {len(whole)} steps differ; give"
                    " all ranks of that group the same samples, or broadcast those of one"
                )
                yield Finding(REPLICAS, sentence, ranks)


# Weights that FSDP cuts: it takes each rank's part of that rank's own model.


class Begun:
    """The weights of each rank where FSDP took them, and nothing was loaded until the first forward pass."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, tuple[int, ...]], dict[int, dict[str, int]]] = defaultdict(dict)
        self._lines: dict[tuple[int, tuple[int, ...]], str] = {}

    def take(self, case: RankState, turn: int, ranks: list[int], sums: list[list[Any]], place: int) -> None:
        key = turn, ranks_along(case, ranks)
        self._sums[key][case.rank] = {str(name): int(found) for name, found in sums}
        self._lines[key] = case.place(place).line

    def questions(self) -> Iterator[str]:
        for (turn, ranks), seen in sorted(self._sums.items()):
            first = seen.get(ranks[0], {})
            names = [name for name in first if len({each.get(name) for each in seen.values()}) > 1]
            if names and set(seen) == set(ranks):
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                yield (
                    f"is it meant that {name_ranks(ranks)} have other weights ({names[0]}{more}) where FSDP takes them"
                    f" at {self._lines[turn, ranks]}? Each keeps its own rank's part: seed or load them on all ranks"
                    " alike, or send rank 0's to all (sync_module_states=True; set_model_state_dict with"
                    " broadcast_from_rank0)"
                )
                return
