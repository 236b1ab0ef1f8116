"""What a sweep draws: held-out samples that no step has seen, and another draw for each seed.

A loss on samples that were trained on is low for the wrong reason, and three seeds that draw alike have no spread; both
look like a finding. They are held to what was dealt, by content.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor

from experiments.largebatch.lockstep import Trainee
from experiments.largebatch.samples import Stream
from workers.lab import Lab
from workers.workload import text
from workers.workload.own import reads_text

FEW = 8  # samples, whose order two seeds share by chance in one of 40 000
CONTROLS = "tests/experiments/test_largebatch.py::{}"


def check_held_out(lab: Lab, stream: Stream) -> None:
    """No sample to judge by is among those that are dealt. Bytes that a text has twice tell nothing, nor do points in
    16 bits, of which some are alike by chance."""
    if stream.dtype.itemsize < 4 and not reads_text(stream.config.model):
        return
    trained, held = rows(stream.inputs, stream.targets), rows(*stream.held_out[:2])
    once = held
    if reads_text(stream.config.model):
        given, seq = text.read(stream.config), stream.config.seq
        starts = range(0, len(given) - seq, seq)
        windows = Counter(given[start : start + seq + 1] for start in starts)
        once = {row for row in held if windows[bytes([*row[:seq], row[-1]])] == 1}
    seen = len(once & trained)
    lab.check(
        "held out", seen, 0, variant=stream.config.model, detail=f"of {len(once)} samples to judge by trained on",
        control=CONTROLS.format("test_a_sweep_that_draws_wrong_fails_the_run"),
    )  # fmt: skip


def rows(inputs: Tensor, targets: Tensor) -> set[bytes]:
    """Each sample by its content: bytes of a text, else numbers."""
    pairs = torch.cat([inputs, targets], 1)
    if not pairs.is_floating_point():
        return {bytes(row) for row in pairs.tolist()}
    return {row.numpy().tobytes() for row in pairs.float().cpu()}


def check_seeds(lab: Lab, runs: Mapping[tuple[str, int], Trainee], model: str) -> None:
    """Of one recipe no two trainings that begin now have the same weights, or see the same samples."""
    alike = sum(
        torch.equal(flat(one), flat(other)) or torch.equal(one.stream.inputs, other.stream.inputs)
        for ((name, _), one), ((same, _), other) in combinations(runs.items(), 2)
        if name == same and len(one.stream.inputs) >= FEW
    )
    control = CONTROLS.format("test_a_sweep_that_draws_wrong_fails_the_run")
    lab.check("seeds", alike, 0, variant=model, detail="pairs of seeds that draw alike", control=control)


def flat(trainee: Trainee) -> Tensor:
    """All its weights."""
    return torch.cat([parameter.detach().flatten() for parameter in trainee.model.parameters()])
