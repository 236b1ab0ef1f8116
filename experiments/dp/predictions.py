"""Predictions of data parallelism: bytes sent and stored, and calls."""

from collections.abc import Mapping
from functools import partial

from distlab.contract import Measured
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.verify.counted import predicted_peaks
from distlab.lab.workload.model import outline
from distlab.techniques.collectives.costs import (
    Cost,
    all_reduce_bytes,
    all_reduce_cost,
    all_reduce_messages,
    total_cost,
)
from distlab.techniques.data_parallel.costs import bucket_bytes
from distlab.techniques.data_parallel.slow_link import swaps_buckets
from distlab.techniques.sharded.costs import (
    Happening,
    Replicated,
    adamw_scratch_bytes,
    at_rest,
    pass_peak,
    whole_rest,
    whole_rest_bytes,
)


def gradient_bytes(config: Config) -> int:
    """Return S, the bytes of all gradients."""
    return outline(config).num_parameters() * config.itemsize


VARIANTS = ("per_parameter", "flat", "bucketed", "ring", "ddp")


def in_unit(nbytes: int) -> tuple[float, str]:
    """Return bytes as a number and a unit, for a sentence."""
    return (nbytes / 1e6, "MB") if nbytes >= 1e5 else (nbytes, "B")


def bucket_sizes(config: Config) -> list[int]:
    """Return the numbers in each bucket."""
    return [nbytes // config.itemsize for nbytes in bucket_bytes(config)]


def predict(config: Config) -> list[Prediction]:
    """Return bytes and calls of a step and the bytes stored between steps, per variant and rank."""
    ranks, itemsize, formula = config.world_size, config.itemsize, "2(N-1)/N x S"
    sizes, buckets = [size * itemsize for size in outline(config).sizes], bucket_bytes(config)

    def summed(tensors: list[int]) -> list[Cost]:
        return [total_cost(*(all_reduce_cost(ranks, size) for size in tensors))] * ranks

    passed_on = sum(all_reduce_messages("ring", ranks, size, itemsize=itemsize) for size in buckets)
    own = [sum(all_reduce_bytes("ring", ranks, size, rank, itemsize) for size in buckets) for rank in range(ranks)]
    theirs = len(buckets) + 1  # its first bucket has 1 MiB
    whole, each = whole_rest(config)
    return [
        *of_a_step("per_parameter", formula, summed(sizes), of_calls="1 a parameter"),
        *of_a_step("flat", formula, summed([sum(sizes)]), of_calls="1"),
        *of_a_step("bucketed", formula, summed(buckets), of_calls="1 a bucket"),
        *of_a_step("ring", formula, [Cost(sent, 2 * (ranks - 1) * len(buckets), passed_on) for sent in own]),
        *of_a_step("ddp", formula, [Cost(sent.nbytes, theirs) for sent in summed(buckets)], PYTORCHS),
        *(at_rest(name, config, f"{each} x P", [whole], PYTORCHS * (name == "ddp")) for name in VARIANTS),
    ]


# The predicted peak of a step: the whole model, its gradients, and the passes of one process.


def peak_bytes(config: Config, name: str, passes: list[Happening], *, swapped: bool = False) -> float:
    """Return the stored bytes plus the highest of the passes; or, if it is larger, the update."""
    sizes = outline(config).sizes
    held, adam = whole_rest_bytes(sizes, config), config.optimizer == "adamw"
    constant = held["parameters"] + held["optimizer"] + message_bytes(name, config, swapped=swapped)
    holding = Replicated(constant, held["gradients"], config.itemsize, in_buckets=name != "per_parameter")
    update = constant + held["gradients"] + adam * adamw_scratch_bytes(sizes, config.itemsize)
    return max(pass_peak(passes, holding), update)


def message_bytes(name: str, config: Config, *, swapped: bool) -> float:
    """Return the bytes of receive buffers: two chunks per bucket in the ring, since all buckets run concurrently; the
    whole bucket in an exchange; the backend's own buffers are not counted."""
    sizes, ranks = bucket_sizes(config), config.world_size
    if name == "ring" and ranks > 1:
        return float(sum(2 * -(-size // ranks) for size in sizes) * config.itemsize)
    return float(sum(sizes) * config.itemsize) if name == "bucketed" and swapped else 0.0


def predict_peaks(lab: Lab, measured: Mapping[str, Measured]) -> list[Prediction]:
    """Return the peak bytes of each of our variants."""
    swapped = swaps_buckets(lab.group, lab.config)

    def formula_of(name: str) -> str:
        return f"weights + optimizer + {'gradients as they come' if name == 'per_parameter' else 'gradients'}"

    return predicted_peaks(lab, measured, partial(peak_bytes, lab.config, swapped=swapped), formula_of)
