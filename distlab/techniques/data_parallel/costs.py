"""Bytes and calls of a gradient sum in buckets, with one all_reduce of gloo per bucket."""

from collections.abc import Sequence

from distlab.lab.config import Config
from distlab.lab.workload.model import outline
from distlab.techniques.collectives.costs import Cost, all_reduce_cost, total_cost
from distlab.techniques.data_parallel.buckets import layout


def bucket_bytes(config: Config, sizes: Sequence[int] | None = None, itemsize: int = 0) -> list[int]:
    """Return the bytes of each bucket for gradients of these `sizes`; default: all parameters, in LAB_DTYPE."""
    numels = outline(config).sizes if sizes is None else sizes
    nbytes = [numel * (itemsize or config.itemsize) for numel in numels]
    return [sum(nbytes[index] for index in bucket) for bucket in layout(nbytes, config.bucket_mib * 2**20)]


def gradients_cost(config: Config, itemsize: int = 0) -> Cost:
    """Return the cost of summing all gradients once per step."""
    return total_cost(*(all_reduce_cost(config.world_size, each) for each in bucket_bytes(config, None, itemsize)))
