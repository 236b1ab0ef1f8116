"""Which all_reduce a bucket of `bucketed` takes: the group's own, or on a slow link between two ranks a swap.

gloo's all_reduce sums piece by piece, in two rounds of which one waits for the other, and a slow link idles
meanwhile. Two ranks that send each other everything and both add (distlab/techniques/collectives/direct.py) send the
same bytes in one round: on a link of 500 Mbit/s 64 MiB take gloo's 1221 ms and a swap 1111, of which 1074 are the
link's (LAB_NET_RATE=500mbit RUN_MODE=comm LAB_VARIANT=gloo,direct), and in buckets the pauses add up (`python -m
benchmarks.link dp`). What comes needs room: the gradients once more, as much as DDP takes. On a link without a rate
the two take as long (`python -m benchmarks.collectives 2`), and for more ranks a swap would send more.
"""

from functools import partial

import torch.distributed as dist

from distlab.lab.config import Config
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.data_parallel.buckets import AllReduce


def swaps_buckets(group: dist.ProcessGroup, config: Config) -> bool:
    """Whether two ranks on a link with a rate swap their buckets; NCCL's all_reduce is left to itself."""
    return group.size() == 2 and config.net_rate is not None and dist.get_backend(group) == "gloo"


def all_reduce_of_buckets(group: dist.ProcessGroup, config: Config) -> AllReduce:
    """The all_reduce that begins to sum a bucket."""
    if swaps_buckets(group, config):
        return partial(Collective(group, "direct").all_reduce, async_op=True)
    return partial(dist.all_reduce, group=group, async_op=True)
