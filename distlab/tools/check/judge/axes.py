"""Faults along one axis of a device mesh: copies that must be equal, samples that must differ, norms, dropout."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.fault import Fault, Occurrence, Table, and_more, occurrence, ranks_of
from distlab.tools.check.judge.rank_state import DROPOUT, REPLICAS, Finding, RankState, typed

AXIS = "tp"


class Dropouts(Fault):
    """Dropout in a tensor-parallel group: ranks with the same activations must drop the same elements.

    The groups come from the script's device mesh, by an axis called tp, or from LAB_MESH. Where activations are sharded
    each rank must draw its own masks, so only ranks with equal inputs are compared.
    """

    def __init__(self, world_size: int, mesh: Sequence[tuple[str, int]]) -> None:
        sizes = [size for _, size in mesh]
        self._groups = groups_of(AXIS, [name for name, _ in mesh], sizes, list(range(world_size)))
        self._seen: dict[int, dict[int, tuple[int, int, str]]] = defaultdict(dict)  # random state, input, line

    def on_mesh(self, state: RankState, names: list[str], ranks: Any) -> None:  # noqa: ARG002
        """Record a device mesh of the script, given as nested lists of ranks."""
        sizes, level = [], ranks
        while isinstance(level, list):
            sizes.append(len(level))
            level = level[0]
        numbers = flat(ranks)
        typed(numbers, [int] * len(numbers))
        self._groups = self._groups or groups_of(AXIS, names, sizes, numbers)

    def on_dropout(self, state: RankState, index: int, random_state: int, inputs: int, place: int) -> None:
        self._seen[index][state.rank] = random_state, inputs, state.place(place).line

    def findings(self) -> Iterator[Finding]:
        for ranks in self._groups:
            for index, seen in sorted(self._seen.items()):
                here = [seen[rank] for rank in ranks if rank in seen]
                random_states, inputs = {random_state for random_state, _, _ in here}, {each for _, each, _ in here}
                if len(here) == len(ranks) > 1 and len(inputs) == 1 and len(random_states) > 1:
                    sentence = (
                        f"dropout #{index} at {here[0][2]}: {name_ranks(ranks)} of one tensor-parallel group have the"
                        " same activations but different random states, so they drop different elements: use one seed"
                    )
                    yield Finding(DROPOUT, sentence, tuple(ranks))
                    break


def groups_of(axis: str, names: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Return the groups along an axis of a mesh with `ranks` in order, outermost axis first; none without the axis."""
    if axis not in names or len(names) != len(sizes) or prod(sizes) != len(ranks):
        return []
    position = list(names).index(axis)
    size, inner = sizes[position], prod(sizes[position + 1 :])
    starts = [start for start in range(len(ranks)) if start // inner % size == 0]
    return [[ranks[start + step * inner] for step in range(size)] for start in starts]


def flat(nested: Any) -> list[int]:
    return [number for each in nested for number in flat(each)] if isinstance(nested, list) else [nested]


# Copies that a DTensor declares: ranks along an axis on which it is replicated must have equal bits.
#
# The last step reported by all decides; earlier ones give the first step with a difference, since a script may make
# ranks equal again. Rounding, which differs between machines, is allowed: norms that differ by less than one part in
# 100,000.

Digest = tuple[int, float]  # checksum of a tensor's bits, and its norm
ROUNDING = 1e-5
END = -1  # used as a step number


class Copies(Fault):
    """Replicated parameters, and tensors declared Replicate in `DTensor.from_local`."""

    def __init__(self) -> None:
        self._parameters: Table[str, int, dict[str, Digest]] = Table()
        self._declared: Table[str, Occurrence, Digest] = Table()

    def on_copies(self, state: RankState, step: int, axis: str, ranks: list[int], digests: list[list[Any]]) -> None:
        for each in digests:
            typed(each, [str, int, float])
        self._parameters.put(state, axis, ranks, step, {name: (bits, float(norm)) for name, bits, norm in digests})

    def on_declared(
        self, state: RankState, count: int, axis: str, ranks: list[int], bits: int, norm: float, place: int
    ) -> None:
        self._declared.put(state, axis, ranks, occurrence(state, place, count), (bits, float(norm)))

    def findings(self) -> Iterator[Finding]:
        yield from self._differing_parameters()
        reported: set[str] = set()
        for axis, ranks, reports in self._declared.complete():
            for (line, _, count), seen in reports.items():
                if line not in reported and differ(list(seen.values())):
                    reported.add(line)
                    sentence = (
                        f"{name_ranks(ranks)}, one group along the axis {axis}, have different values at {line} (call"
                        f" #{count} of DTensor.from_local), where the tensor is declared Replicate: give all ranks of"
                        f" the axis {axis} the same samples, or pass run_check=True, which broadcasts the first rank's"
                    )
                    yield Finding(REPLICAS, sentence, ranks)

    def _differing_parameters(self) -> Iterator[Finding]:
        """Yield one sentence per axis, for any number of groups."""
        found: dict[tuple[str, str], list[tuple[int, ...]]] = defaultdict(list)
        for axis, ranks, by_step in self._parameters.complete():
            if not (names := differing_names(by_step[END if END in by_step else max(by_step)])):
                continue
            since = min((step for step in by_step if step > 0 and differing_names(by_step[step])), default=0)
            when = f", since step {since}{' or before' if since > 1 else ''}" if since else ""
            found[axis, f"{and_more(names)}{when}"].append(ranks)
        for (axis, which), groups in sorted(found.items()):
            sentence = (
                f"replicas differ along the axis {axis}: {', '.join(map(name_ranks, sorted(groups)))} have different"
                f" values of {which}; they are declared Replicate along it, and averaging gradients keeps a difference:"
                f" begin with one seed, or one checkpoint, on all ranks of the axis {axis}"
            )
            yield Finding(REPLICAS, sentence, ranks_of(groups))


def differing_names(seen: dict[int, dict[str, Digest]]) -> list[str]:
    """Return the tensors that all ranks have reported with different bits."""
    return [
        name for name in next(iter(seen.values()))
        if all(name in digests for digests in seen.values()) and differ([digests[name] for digests in seen.values()])
    ]  # fmt: skip


def differ(digests: Sequence[Digest]) -> bool:
    """Return whether tensors differ by more than rounding."""
    norms = [norm for _, norm in digests]
    return len({bits for bits, _ in digests}) > 1 and max(norms) - min(norms) > ROUNDING * max(norms)


NEAR = 1e-4  # relative
BY_HAND = (
    "all_reduce the squares of these norms over the group, and scale by the root of their sum"
    " (torch.nn.utils.clip_grads_with_norm_)"
)
SHARDED = {  # the part that a rank has, and the remedy, by what shards the gradients
    "FSDP": ("shard", "call clip_grad_norm_ of the FullyShardedDataParallel module"),
    "reduce_scatter": ("shard", BY_HAND),
    "": ("part", BY_HAND),
}


class ClippedNorms(Fault):
    """The results of clip_grad_norm_ on sharded gradients, and its limit: a rank's own norm is not the norm."""

    def __init__(self) -> None:
        self._norms: Table[str, Occurrence, tuple[float, float, str]] = Table()

    def on_clipped(
        self, state: RankState, count: int, norm: float, limit: float, ranks: list[int], by: str, place: int
    ) -> None:
        if ranks:
            self._norms.put(state, "", ranks, occurrence(state, place, count), (float(norm), float(limit), by))

    def findings(self) -> Iterator[Finding]:
        reported: set[str] = set()
        for _, ranks, reports in self._norms.complete():
            for (line, _, _), seen in reports.items():
                norms = [norm for norm, _, _ in seen.values()]
                scaled = any(norm > limit for norm, limit, _ in seen.values())
                if line in reported or not scaled or max(norms) - min(norms) <= NEAR * max(norms):
                    continue
                reported.add(line)
                listed = ", ".join(f"{each[0]:.4g} on rank {rank}" for rank, each in sorted(seen.items()))
                part, remedy = SHARDED.get(seen[ranks[0]][2], SHARDED[""])
                sentence = (
                    f"clip_grad_norm_ at {line} returns {listed}: each rank has the norm of its own {part}, so {part}s"
                    f" are scaled by different factors; {remedy}"
                )
                yield Finding(REPLICAS, sentence, ranks)


ENOUGH_STEPS = 2


class PartialSums(Fault):
    """Manual tensor parallelism: ranks that sum partial activations must have inputs of one batch. Such a group
    averages no gradients."""

    def __init__(self) -> None:
        self._inputs: Table[str, int, int] = Table()

    def on_entered(self, state: RankState, step: int, group: int, checksum: int, place: int) -> None:
        self._inputs.put(state, "", state.group(group).ranks, step, checksum, place)

    def findings(self) -> Iterator[Finding]:
        for _, ranks, reports in self._inputs.complete():
            if len(reports) >= ENOUGH_STEPS and all(len(set(seen.values())) > 1 for seen in reports.values()):
                sentence = (
                    f"{name_ranks(ranks)} sum their parts of an activation at {self._inputs.lines['', ranks]} (tensor"
                    f" parallelism), but have different samples: the inputs of their first {len(reports)} steps differ;"
                    " give all ranks of that group the same samples, or broadcast those of one"
                )
                yield Finding(REPLICAS, sentence, ranks)


class InitialWeights(Fault):
    """The weights of each rank's model when FSDP took its shard, if nothing was loaded before the first forward."""

    def __init__(self) -> None:
        self._sums: Table[int, int, dict[str, int]] = Table()

    def on_taken(self, state: RankState, number: int, ranks: list[int], sums: list[list[Any]], place: int) -> None:
        self._sums.put(state, number, ranks, 0, {str(name): int(checksum) for name, checksum in sums}, place)

    def questions(self) -> Iterator[str]:
        for number, ranks, reports in self._sums.complete():
            seen = reports[0]
            names = [name for name in seen[ranks[0]] if len({each.get(name) for each in seen.values()}) > 1]
            if names:
                yield (
                    f"{name_ranks(ranks)} have different weights ({and_more(names)}) when FSDP shards them at"
                    f" {self._sums.lines[number, ranks]}; is that intended? Each rank keeps its own part: seed or load"
                    " them equally on all ranks, or send rank 0's to all (sync_module_states=True;"
                    " set_model_state_dict with broadcast_from_rank0)"
                )
                return
