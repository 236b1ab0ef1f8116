"""One model on a grid of axes: slices of its layers, in stages, on replicas; a step, and the way back to dense tensors.

The mechanisms stack because each works on what the one below it left: tensor parallelism replaces layers, a pipeline
takes runs of what stands there then, data parallelism sums whatever parameters a stage has. What belongs to no single
axis is here: which gradients are summed over which ranks once the pipeline is through, the norm in which each element
counts once, and where each part stands in the dense model.

  over dp   every stage's gradients, in its last backward pass (parallel/reducing.py); and over cp with them, since
            ranks with other positions are replicas like those with other samples
  over tp   what sequence parallelism keeps whole and uses on its rows (kept.py)
  over pp   a weight that two stages share, after the sums over dp: its shards lie opposite each other
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from workers.config import Config
from workers.parallel.assembly import assembled
from workers.parallel.clip import clip_gradients
from workers.parallel.mesh import Mesh
from workers.parallel.peers import Peers
from workers.parallel.piece import Piece
from workers.parallel.slices import Slice
from workers.parallel.stages import Parts, sum_shared
from workers.strategies.engines import Engine
from workers.strategies.kept import Entry, Kept
from workers.strategies.sharded import as_many_as_all
from workers.workload.data import Microbatch
from workers.workload.optimizer import make_optimizer, prime, tensors_of

# (those that count on this rank, all of this rank, bound, mesh): scales all in place
Clip: TypeAlias = Callable[[list[Tensor], list[Tensor], float, Mesh], Tensor]


def clip_over_all(once: list[Tensor], every: list[Tensor], bound: float, mesh: Mesh) -> Tensor:
    """Clip by the norm of the whole model's gradient, one number summed along each axis in turn."""
    return clip_gradients(once, every, bound, *(group for group in mesh.groups.values() if group.size() > 1))


class Held(NamedTuple):
    """A part of a dense tensor on this rank."""

    label: str
    name: str  # of the parameter that it belongs to
    piece: Piece
    everywhere: bool  # whether every replica holds the same


class Stacked:
    """A Strategy on a mesh with the axes dp, cp, tp and pp.

    Args:
        parts: this rank's stages, of layers that are sliced already.
        slices: which parameters are slices, by dense name.
        kept: what keeps the parameters of each of the stages.
        engine: what sends microbatches through them.
    """

    def __init__(
        self, parts: Parts, slices: Mapping[str, Slice], kept: Mapping[int, Sequence[Kept]], engine: Engine, mesh: Mesh,
        config: Config, clip: Clip = clip_over_all,
    ) -> None:  # fmt: skip
        self.parts, self.slices, self.engine, self.mesh, self.config = parts, slices, engine, mesh, config
        self.clip = clip
        self.kept = [each for of_stage in kept.values() for each in of_stage]
        self.stages, self.ranks = Peers(mesh["pp"]), Peers(mesh.world)
        self.optimizer = make_optimizer([entry.stepped for entry in self.entries()], config)
        self.norm: Tensor | None = None  # of the last clipped gradient

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """All microbatches of this replica through its pipeline, then what is left to sum."""
        for each in self.kept:
            each.begin()
        loss = self.engine.step(as_many_as_all(microbatches, self.config))
        for each in self.kept:
            each.finish()
        self.sum_over_stages()
        return loss if self.mesh.index("tp") == 0 else None  # the ranks of a slice have the same one

    def sum_over_stages(self) -> None:
        """The gradient of a tied weight is that of both its copies, or of the shards of both."""
        shared = set(self.parts.shared)
        if shared:
            summed = {name: entry.summed for entry in self.entries() for name in shared.intersection(entry.names)}
            sum_shared(replace(self.parts, parameters=summed), self.stages)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers, by number in the model."""
        return self.parts.layers

    def update(self) -> None:
        """Clip by the one norm, step what is kept here, and give the others what is new."""
        if self.config.clip is not None:
            once = [box for held in filter(self.in_norm, self.held("gradients")) for _, box in held.piece.boxes]
            every = [entry.summed.grad for entry in self.entries() if entry.summed.grad is not None]
            self.norm = self.clip(once, every, self.config.clip, self.mesh)
        for each in self.kept:
            each.deliver()
        self.optimizer.step()
        for each in self.kept:
            each.publish()

    # --- where everything stands in the dense model ---

    def entries(self) -> list[Entry]:
        """All that this rank steps."""
        return [entry for each in self.kept for entry in each.entries()]

    def held(self, kind: str) -> Iterator[Held]:
        """This rank's "gradients", "weights" or "optimizer" state."""
        for each in self.kept:
            for entry in each.entries():
                for key, tensor in tensors_of(kind, self.optimizer, entry.stepped, entry.summed).items():
                    parts = entry.pieces(tensor) if tensor.dim() else scalars(entry.names, tensor)
                    for name, part in parts:
                        yield Held(f"{key}.{name}" if key else name, name, self.placed(name, part), each.everywhere)

    def placed(self, name: str, part: Piece) -> Piece:
        """A part of this rank's slice, as a part of the dense tensor."""
        cut = self.slices.get(name)
        return part if cut is None or not part.shape else cut.placed(part, self.mesh.index("tp"))

    def counts(self, held: Held) -> bool:
        """Whether it counts here: of all ranks that hold the same, on the first."""
        return self.first_slice(held) and self.first_replica(held) and self.first_stage(held)

    def first_slice(self, held: Held) -> bool:
        """Of the ranks of a slice; a number, AdamW's count of steps, all of them have."""
        return (held.name in self.slices and bool(held.piece.shape)) or self.mesh.index("tp") == 0

    def first_replica(self, held: Held) -> bool:
        """Of the replicas."""
        sharded = not held.everywhere and bool(held.piece.shape)
        return sharded or self.mesh.index("dp") == self.mesh.index("cp") == 0

    def first_stage(self, held: Held) -> bool:
        """Of the stages that share a weight."""
        return self.parts.holders[held.name][0] == self.mesh.index("pp")

    def in_norm(self, held: Held) -> bool:
        """Whether its elements are in this rank's part of the norm."""
        return self.counts(held)

    def once(self, kind: str) -> Iterator[Held]:
        """What counts on this rank: over all ranks each element of the dense model once."""
        return filter(self.counts, self.held(kind))

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Dense tensors on rank 0, in the model's order; nothing elsewhere."""
        dense = dict(assembled([(held.label, held.piece) for held in self.once(kind)], self.ranks))
        order = {name: place for place, name in enumerate(self.parts.holders)}
        for label in sorted(dense, key=lambda label: order[label if kind != "optimizer" else label.split(".", 1)[1]]):
            yield label, dense[label]

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """What all replicas hold: along dp, and what is no slice along tp too; shards are of one rank each."""
        for held in self.held(kind):
            if held.everywhere:
                own = f" slice {self.mesh.index('tp')}" if held.name in self.slices else ""
                ((_, whole),) = held.piece.boxes
                yield f"{held.label}{own}", whole

    def state_dict(self) -> dict[str, Any]:
        """Of a parameter that this rank holds whole the tensor, of any other its piece."""
        prime(self.optimizer)
        state: dict[str, Any] = {}
        for kind in ("weights", "optimizer"):
            for held in self.held(kind):
                whole = held.everywhere and all(box.shape == held.piece.shape for _, box in held.piece.boxes)
                state[f"{kind}.{held.label}"] = held.piece.boxes[0][1] if whole else held.piece
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002  it was filled in place
        """What is kept is loaded: what computes gets it."""
        for each in self.kept:
            each.publish()


def scalars(names: Sequence[str], value: Tensor) -> list[tuple[str, Piece]]:
    """One number for all of these parameters."""
    return [(name, Piece(value.shape, [((), value)])) for name in names]
