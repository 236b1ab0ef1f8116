"""The most that a replica holds in a step, predicted: all of the model, its gradients, and one process's passes."""

from collections.abc import Mapping

import torch

from experiments.dp.predictions import bucket_sizes
from experiments.dp.summing import swaps
from workers.config import Config
from workers.contract import Measured
from workers.lab import Lab
from workers.measure.formulas.peaks import Happening, Replicated, adamw_scratch_bytes, pass_peak, shown_on
from workers.measure.formulas.sharding import rest_bytes
from workers.passes.outline import check_recomputed, checks_recomputed, most_of_a_layer, outlined
from workers.workload.model import outline


def peak_bytes(name: str, config: Config, passes: list[Happening], *, swapped: bool = False) -> float:
    """Weights, optimizer state, gradients and messages of variant `name`, and the highest of the passes; or, if it
    holds more, the update."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    adam, total = config.optimizer == "adamw", sum(sizes)
    held = rest_bytes(0, total, total, itemsize=itemsize, moments=2 * adam, num_tensors=adam * len(sizes))
    constant = held["parameters"] + held["optimizer"] + message_bytes(name, config, swapped=swapped)
    holding = Replicated(constant, held["gradients"], itemsize, in_buckets=name != "naive")
    update = constant + held["gradients"] + adam * adamw_scratch_bytes(sizes, itemsize)
    return max(pass_peak(passes, holding), update)


def message_bytes(name: str, config: Config, *, swapped: bool) -> float:
    """What comes from other ranks: of a ring two chunks for each bucket, since all buckets are under way at once; of a
    swap the bucket; the backend's own all_reduce keeps what it needs to itself."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    sizes, ranks = bucket_sizes(config), config.world_size
    if name == "ring" and ranks > 1:
        return float(sum(2 * -(-size // ranks) for size in sizes) * itemsize)
    return float(sum(sizes) * itemsize) if name == "bucketed" and swapped else 0.0


def compare_peak(lab: Lab, measured: Mapping[str, Measured]) -> None:
    """Hold the most that each variant of ours held against the formula, within 5 %."""
    passes, recomputes = outlined(lab), checks_recomputed(lab)
    again = outlined(lab, again=True, recompute=False) if recomputes else []
    layer_bytes = most_of_a_layer(lab) if recomputes else 0
    for name in [name for name in measured if name not in lab.mode.by_torch]:
        swapped, held = swaps(lab.group, lab.config), sum(measured[name].peak.values())
        predicted = peak_bytes(name, lab.config, passes, swapped=swapped)
        gradients = "gradients as they come" if name == "naive" else "gradients"
        lab.compare(
            "peak bytes", predicted, held, tolerance=0.05 * predicted, variant=name,
            formula=f"weights + optimizer + {gradients} + one process's passes", shown=shown_on(lab.config.device),
            control="tests/experiments/test_orders.py::test_dp_graphs_that_are_kept_show_in_the_peak",
        )  # fmt: skip
        if recomputes:
            check_recomputed(lab, name, held, peak_bytes(name, lab.config, again, swapped=swapped), layer_bytes)
