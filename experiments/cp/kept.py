"""Activations by the length of a sequence: what each rank keeps for its backward pass, beside one process.

All but attention works on a rank's own rows, and so keeps what one process keeps for as many. What attention keeps
differs: a ring q, k, v, the result and a number a row, of its own rows alone; ulysses the same of its own heads, and
the result once more as rows; gathered the keys and values of all, and a mask.
"""

from collections.abc import Mapping

import torch

from experiments.cp.predictions import itemsize_of, positions_of
from workers.config import Config
from workers.lab import Lab
from workers.parallel.positions import Positions
from workers.parallel.slices import shares
from workers.passes.kept import most_kept
from workers.passes.outline import saved_bytes
from workers.workload.data import Microbatch
from workers.workload.model import outline

NAME, BY_LENGTH = "activation bytes", "activations by length"
TOLERANCE = 0.01
FORMULAS = {
    "gathered": "one process's of S/c rows + K and V of all + a mask",
    "ring": "one process's of S/c rows",
    "zigzag": "one process's of S/c rows",
    "shift": "one process's of S/c rows",
    "ulysses": "one process's of S/c rows + the result of each layer",
}


def predicted(lab: Lab, variant: str, config: Config, microbatch: Microbatch) -> int:
    """Bytes that this rank keeps for one microbatch, whose samples are LAB_SEQ of `config` long."""
    positions = positions_of(variant, config)
    inputs, targets = (positions.own(side, lab.rank) for side in microbatch[:2])
    alone = saved_bytes(lab, range(len(outline(config).layers)), Microbatch(inputs, targets, microbatch.share))
    index = inputs.shape[1] * torch.long.itemsize  # where its tokens stand
    return alone + index + more(variant, config, positions, len(inputs), lab.rank)


def more(variant: str, config: Config, positions: Positions, samples: int, rank: int) -> int:
    """What attention keeps in all layers, less what one process keeps of this rank's rows."""
    itemsize, whole, rows = itemsize_of(config), positions.length, positions.num_rows[rank]
    row_bytes = samples * config.width * itemsize
    if variant == "gathered" and rows:
        return 2 * config.depth * (whole - rows) * row_bytes + rows * whole * itemsize
    if variant != "ulysses":
        return 0
    heads, sums = shares(config.heads, config.world_size)[rank], max(itemsize, 4)
    head_bytes = samples * (4 * config.width // config.heads * itemsize + sums)  # q, k, v, the result; log-sum-exp
    return config.depth * (whole * heads * head_bytes - rows * config.heads * head_bytes + rows * row_bytes)


def compare_kept(lab: Lab, measured: Mapping[str, int]) -> None:
    """Hold what each variant kept in a step against that, in its largest microbatch."""
    batches = lab.batches(getattr(torch, lab.config.dtype))
    largest = max(lab.dealt(batches, 0), key=lambda microbatch: len(microbatch.inputs))
    for name, nbytes in measured.items():
        wanted = predicted(lab, name, lab.config, largest)
        lab.compare(NAME, wanted, nbytes, "B", TOLERANCE * wanted, name, FORMULAS[name])


def kept_by_length(lab: Lab, variants: list[str]) -> None:
    """A sample of each quarter of LAB_SEQ: hold every length against the same formulas, and draw them."""
    dtype = getattr(torch, lab.config.dtype)
    lengths = sorted({max(1, lab.config.seq * quarter // 4) for quarter in (1, 2, 3, 4)})
    inputs, targets, share = lab.dealt(lab.batches(dtype), 0)[0]
    samples = [Microbatch(inputs[:1, :length], targets[:1, :length], share) for length in lengths]
    configs = [lab.config.model_copy(update={"seq": length}) for length in lengths]
    builds = {each.name: each.build for each in lab.mode.variants if each.name in variants}
    layers = range(len(outline(lab.config).layers))
    kept = {"one process": [saved_bytes(lab, layers, sample) for sample in samples]}
    for name, build in builds.items():
        assert build is not None
        lab.at(0, f"activations of {name}")
        kept[name] = [
            most_kept(build(lab.model(dtype), lab.mesh, config), [sample])
            for config, sample in zip(configs, samples, strict=True)
        ]
        wanted = [predicted(lab, name, config, sample) for config, sample in zip(configs, samples, strict=True)]
        off = [abs(found - value) / value for found, value in zip(kept[name], wanted, strict=True)]
        detail = f"the largest of {len(lengths)} lengths, as a share of the formula"
        lab.check(BY_LENGTH, max(off), TOLERANCE, name, detail, control="LAB_BUG=kept_blocks")
    title = "Activations that rank 0 keeps of one sample"
    drawn = {name: [list(map(float, lengths)), [float(value) for value in values]] for name, values in kept.items()}
    lab.chart(title, "positions of a sample", "bytes", drawn)
    rows = [[length, *(f"{values[at] / 1e6:.3g}" for values in kept.values())] for at, length in enumerate(lengths)]
    lab.table(f"{title}, MB", ["positions", *kept], rows)
