"""The proof: a few steps in float64 with plain SGD, against the dense single process, whatever the timed pass uses.

Only rank 0 computes the single process, while the others wait with a timeout. Losses, gradients and updated weights are
compared at every step, since each alone hides some errors: Adam cancels an error of scale, and a loss is right for one
step whatever the gradients are. With adamw or LAB_CLIP two more steps compare clipped gradients, the optimizer's state
and the resulting weights.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.contract import Build, Strategy
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import Worst, hash_of, largest_difference
from distlab.lab.workload import reference
from distlab.lab.workload.data import Batches
from distlab.lab.workload.reference import Snapshot, plain
from distlab.lab.workload.user_model import is_own

# Buffers of a user's model in the proof: those that one process does not change must not change on any rank.
#
# Buffers that a forward pass changes, such as a count or a running mean, depend on the rank's samples, and so differ by
# design. They are reported but not compared; `distlab prove` compares them with one process on the rank's own samples.

BUFFERS = "buffers"
BUFFERS_CONTROL = "tests/lab/workload/test_user_model.py::test_a_buffer_that_a_step_writes_fails_by_name"

Hashes = dict[str, int]


def buffer_hashes(model: nn.Module) -> Hashes:
    return {name: hash_of(buffer) for name, buffer in model.named_buffers()}


def changed(before: Hashes, after: Hashes) -> set[str]:
    return {name for name, value in after.items() if before.get(name) != value}


class WrittenBuffers:
    """The buffers that one process changes, known on all ranks; `start` has the initial ones of LAB_SEED."""

    def __init__(self, lab: Lab, dense: nn.Module | None) -> None:
        """Called on all ranks, after one process has trained `dense`, which rank 0 has."""
        self.lab = lab
        self.start = buffer_hashes(lab.model(torch.float64)) if is_own(lab.config.model) else {}
        self.written = set[str]()
        if self.start:
            mine = sorted(changed(self.start, buffer_hashes(dense))) if dense is not None else []
            self.written.update(lab.exchange.everyone("buffers that one process writes", mine)[0])
        for name in sorted(self.written):
            lab.say(
                f"each rank's steps change {name} by its own samples, so it differs between ranks by design;"
                " `distlab prove` compares it",
                BUFFERS,
            )

    def check(self, name: str, model: nn.Module) -> None:
        """Check, after a variant's steps on `model`, the buffers that one process does not change."""
        if not self.start:
            return
        moved = sorted(changed(self.start, buffer_hashes(model)) - self.written)
        kept = len(self.start) - len(self.written)
        detail = ", ".join(moved) if moved else f"{kept} of {len(self.start)}, which one process does not change"
        self.lab.check(BUFFERS, len(moved), 0, variant=name, detail=detail, control=BUFFERS_CONTROL)


if TYPE_CHECKING:
    from distlab.lab.checkpoint.resume import Checkpoints

TOLERANCE = 1e-12
TUNED_STEPS, AFTER_TWO = 2, "weights after two steps"
PLAIN = ("losses", "gradients", "weights")
TUNED = {"clipped gradients": "gradients", "optimizer state": "optimizer", AFTER_TWO: "weights"}  # kinds of a Snapshot
# AdamW's updates are as large as the rate, whatever the gradient, so rounding errors grow with the rate. At the default
# rate five steps differ by 8e-15.
RATE_OF_ADAMW = 0.001
PROOF_CONTROLS = {
    AFTER_TWO: "tests/lab/verify/test_proof.py::test_weights_under_adamw_are_compared",
    "proof steps": "tests/lab/verify/test_proof.py::test_a_proof_that_leaves_a_step_out_is_seen",
}

AlsoCheck = Callable[[str, Strategy], None]
PROOF_CONTROL = "tests/lab/verify/test_proof.py::test_a_wrong_variant_fails_by_name"


def prove(
    lab: Lab, variants: Mapping[str, Build], also: AlsoCheck | None,
    own_proofs: Mapping[str, Callable[[str, Build], None]], checkpoints: "Checkpoints | None" = None,
) -> None:  # fmt: skip
    """Check each variant against one process, or by its function in `own_proofs`; `also(name, strategy)` adds
    checks."""
    config = lab.config.untimed()
    configs = [plain(config), *[config] * (config.optimizer == "adamw" or config.clip is not None)]
    batches = lab.batches(torch.float64, proof=True)
    steps = batches.proof_steps + TUNED_STEPS * (len(configs) - 1)
    with lab.work.of((1 + len(variants)) * steps, "steps of the proof"):
        dense, buffers = train_reference(lab, configs, batches)
        for name, build in variants.items():
            if name in own_proofs:
                lab.at(0, f"proof of {name}")
                with lab.work.of(0):  # the function counts its own steps
                    own_proofs[name](name, build)
                lab.work.advance(steps)
            else:
                compare(lab, name, build, configs, batches, dense, buffers, also)
                if checkpoints is not None and checkpoints.group is not None:
                    from distlab.lab.checkpoint.resume import prove_resume

                    prove_resume(lab, name, build, configs, checkpoints.group)
            lab.finished("proof", tuple(variants))


def train_reference(lab: Lab, configs: list[Config], batches: Batches) -> tuple[list[list[Snapshot]], WrittenBuffers]:
    """Return one process's snapshots on rank 0, for the steps of each config; nothing elsewhere."""
    lab.at(0, "one process")
    models = [lab.model(torch.float64) for _ in configs] if lab.rank == 0 else []
    dense: list[list[Snapshot]] = [[] for _ in configs]
    for model, config, steps, kept in zip(models, configs, (batches.proof_steps, TUNED_STEPS), dense, strict=False):
        for snapshot in reference.train(model, batches, config, steps):
            kept.append(snapshot)
            lab.work.advance()
    lab.exchange.barrier("one process")
    return dense, WrittenBuffers(lab, models[0] if models else None)


def compare(
    lab: Lab, name: str, build: Build, configs: list[Config], batches: Batches, dense: list[list[Snapshot]],
    buffers: WrittenBuffers, also: AlsoCheck | None,
) -> None:  # fmt: skip
    """Check one variant, with plain SGD and with the chosen optimizer, each against its `dense` run."""
    lab.at(0, f"the construction of {name}")  # PyTorch's variants import modules here, for seconds on busy cores
    model = lab.model(torch.float64)
    strategy = build(model, lab.mesh, configs[0])
    planned = dict.fromkeys(PLAIN, 3)  # the third begins another epoch
    planned |= dict.fromkeys(TUNED, TUNED_STEPS) if configs[1:] else {}
    found = Worst(planned)
    against(lab, strategy, name, batches, dense[0], found)
    buffers.check(name, model)
    for config, wanted in zip(configs[1:], dense[1:], strict=True):
        against(lab, build(lab.model(torch.float64), lab.mesh, config), name, batches, wanted, found, tuned=True)
    if lab.rank == 0:
        write_checks(lab, name, found, planned)
    if also is not None and not is_own(name):  # a lesson's additional checks
        also(name, strategy)


def write_checks(lab: Lab, name: str, found: Worst, planned: Mapping[str, int]) -> None:
    """Write the checks of one variant, and whether each was made as often as `planned`: at every step."""
    for check, off in found.found.items():
        grown = max(1.0, lab.config.learning_rate / RATE_OF_ADAMW) if check == AFTER_TWO else 1.0
        lab.check(
            check, off.value, grown * TOLERANCE, name, off.where, control=PROOF_CONTROLS.get(check, PROOF_CONTROL)
        )
    made = ", ".join(f"{found.times[kind]} of {kind}" for kind in planned)
    missing = sum(abs(count - found.times[kind]) for kind, count in planned.items())
    lab.check(
        "proof steps", missing, 0, variant=name, detail=f"comparisons: {made}", control=PROOF_CONTROLS["proof steps"]
    )


def against(
    lab: Lab, strategy: Strategy, name: str, batches: Batches, dense: list[Snapshot], found: Worst, *,
    tuned: bool = False,
) -> None:  # fmt: skip
    """Compare each step on rank 0: losses, gradients and weights; `tuned` steps use the chosen optimizer and compare
    TUNED's kinds, the second from the first one's state."""
    loss_parts: list[float | None] = []

    def compare_kinds(step: int, kinds: Mapping[str, str]) -> None:
        for check, kind in kinds.items():
            wanted = getattr(dense[step], kind) if lab.rank == 0 else None
            found.compare(check, strategy.full(kind), wanted, where=f"step {step}")

    for step in range(TUNED_STEPS if tuned else batches.proof_steps):
        lab.at(step + tuned * batches.proof_steps, f"proof of {name}")
        loss_part = strategy.backward(lab.microbatches(batches, step))
        loss_parts.append(None if loss_part is None else float(loss_part))
        compare_kinds(step, {} if tuned else {"gradients": "gradients"})
        strategy.update()
        lab.stepped()
        compare_kinds(step, TUNED if tuned else {"weights": "weights"})
    losses = [] if tuned else summed_losses(lab, loss_parts)
    for step, (loss, snapshot) in enumerate(zip(losses, dense, strict=not tuned)):
        found.note("losses", abs(loss - snapshot.loss), where=f"step {step}")


def summed_losses(lab: Lab, loss_parts: list[float | None]) -> list[float]:
    """Return the global batch's mean loss at each step, from all ranks' parts, on rank 0; nothing elsewhere.

    There is one exchange for all steps: one per step took a fifth of the 201 steps of a line's table.
    """
    everyone = lab.exchange.gather("losses", loss_parts) or []
    present = [of_rank for of_rank in everyone if of_rank is not None]  # a rank may have left an elastic run
    return [math.fsum(value for value in of_step if value is not None) for of_step in zip(*present, strict=True)]


# More checks of data parallelism: every sample once per step, and replicas that stay equal to the bit.

REPLICA_CONTROLS = "tests/lab/verify/test_proof.py::{}"


def check_samples(lab: Lab) -> None:
    """Check that each sample of the global batch is used exactly once per step."""
    batches = lab.batches(torch.float64, proof=True)
    steps = min(3, batches.proof_steps)
    mine = [batches.sample_ids(step, lab.rank, lab.world_size) for step in range(steps)]
    everyone = lab.exchange.gather("samples", mine)
    if everyone is None:
        return
    off = 0
    for step in range(steps):
        times = Counter(sample for of_rank in everyone for sample in of_rank[step])
        wanted = Counter(batches.full_ids(step))
        off = max(off, *(abs(times[sample] - wanted[sample]) for sample in times | wanted))
    sizes = ", ".join(str(len(of_rank[0])) for of_rank in everyone)
    lab.check(
        "samples",
        off,
        0,
        detail=f"shards of {sizes} samples; the difference counts how often one sample is missing or repeated",
        control=REPLICA_CONTROLS.format("test_a_sample_dealt_twice_is_seen"),
    )


def check_replicas(lab: Lab, name: str, strategy: Strategy) -> None:
    check_same(lab, name, [weight for _, weight in strategy.full("weights")])


def check_same(lab: Lab, name: str, weights: Sequence[Tensor]) -> None:
    """Check that these are equal on all ranks, to the bit."""
    mine = torch.cat([weight.flatten() for weight in weights])
    first = mine.clone()
    dist.broadcast(first, group=lab.group, group_src=0)
    differs = 0.0 if torch.equal(mine, first) else largest_difference(mine, first)
    lab.check(
        "replicas", differs, 0.0, variant=name, control=REPLICA_CONTROLS.format("test_a_replica_of_its_own_is_seen")
    )
