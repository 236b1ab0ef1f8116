"""What data parallelism predicts before it runs: bytes sent and held, and calls."""

import torch

from workers.config import Config
from workers.measure.formulas import PYTORCHS, Prediction
from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.messages import all_reduce_messages, gloo_all_reduce_messages
from workers.measure.formulas.sharding import rest_bytes
from workers.parallel.buckets import layout
from workers.workload.model import outline

LINE_ONLY = ("means", "coordinator")


def cannot(config: Config) -> dict[str, str]:
    """The first lesson's own variants, with any other model than its line."""
    return (
        {} if config.model == "line" else dict.fromkeys(LINE_ONLY, "it belongs to the first lesson: set LAB_MODEL=line")
    )


def gradient_bytes(config: Config) -> int:
    """S: the bytes of all gradients."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    return outline(config).num_parameters() * itemsize


def in_unit(nbytes: int) -> tuple[float, str]:
    """Bytes as a number and a unit that a sentence can go on with."""
    return (nbytes / 1e6, "MB") if nbytes >= 1e5 else (nbytes, "B")


def bucket_sizes(config: Config) -> list[int]:
    """Numbers in each bucket."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    itemsize: int = getattr(torch, config.dtype).itemsize
    nbytes = [size * itemsize for size in sizes]
    return [sum(sizes[index] for index in bucket) for bucket in layout(nbytes, config.bucket_mib * 2**20)]


def predict(config: Config) -> list[Prediction]:
    """Bytes and calls of one step of each variant, and what stands in memory between two steps, a value a rank."""
    ranks, itemsize = config.world_size, getattr(torch, config.dtype).itemsize
    sizes = [parameter.numel() * itemsize for parameter in outline(config).parameters()]
    buckets = [size * itemsize for size in bucket_sizes(config)]
    total = all_reduce_bytes("gloo", ranks, sum(sizes))
    own = tuple(sum(all_reduce_bytes("ring", ranks, size, rank, itemsize) for size in buckets) for rank in range(ranks))
    passed_on = sum(all_reduce_messages("ring", ranks, size, itemsize=itemsize) for size in buckets)

    def summed(variant: str, tensors: list[int]) -> Prediction:
        messages = sum(gloo_all_reduce_messages(ranks, size) for size in tensors)
        return prediction(variant, len(tensors), (messages,) * ranks)

    def prediction(
        variant: str,
        calls: int,
        messages: tuple[int, ...],
        value: tuple[float, ...] = (total,) * ranks,
        *,
        shown: str = "",
    ) -> Prediction:
        return Prediction(variant, "wire bytes", "B", "2(N-1)/N x S", value, calls, shown, messages)

    return [
        summed("naive", sizes),
        summed("flat", [sum(sizes)]),
        summed("bucketed", buckets),
        prediction("ring", 2 * (ranks - 1) * len(buckets), (passed_on,) * ranks, own),
        prediction("ddp", len(buckets) + 1, (), shown=PYTORCHS),  # its first bucket is of 1 MiB
        *at_rest(config),
    ]


def at_rest(config: Config) -> list[Prediction]:
    """Weights, gradients and optimizer state: all of them on every rank."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    itemsize: int = getattr(torch, config.dtype).itemsize
    adam = config.optimizer == "adamw"
    held = rest_bytes(0, sum(sizes), sum(sizes), itemsize=itemsize, moments=2 * adam, num_tensors=adam * len(sizes))
    formula = f"{(4 if adam else 2) * itemsize} x P"
    value = (float(sum(held.values())),) * config.world_size
    return [
        Prediction(name, "rest bytes", "B", formula, value, 0, shown=PYTORCHS if name == "ddp" else "")
        for name in ("naive", "flat", "bucketed", "ring", "ddp")
    ]
