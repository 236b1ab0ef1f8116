"""The choice of the all_reduce in `bucketed`: gloo's, or for two ranks on a slow link an exchange of whole buckets.

gloo's all_reduce has two rounds, the second of which waits for the first, and a slow link idles meanwhile. Two ranks
that send each other everything and both add (distlab/techniques/collectives/direct.py) send the same bytes in one
round: at 500 Mbit/s 64 MiB take 1221 ms with gloo and 1111 ms with the exchange, 1074 of them on the link
(LAB_NET_RATE=500mbit RUN_MODE=comm LAB_VARIANT=gloo,direct); with several buckets the pauses add up (`python -m
benchmarks.link dp`). It needs a receive buffer as large as the gradients, as DDP does. On a link without a rate both
take equally long (`python -m benchmarks.collectives 2`), and with more ranks an exchange would send more.
"""

from functools import partial

import torch.distributed as dist

from distlab.lab.config import Config
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.data_parallel.buckets import AllReduce


def swaps_buckets(group: dist.ProcessGroup, config: Config) -> bool:
    """Return whether two ranks on a link with a rate exchange whole buckets; NCCL's all_reduce is never replaced."""
    return group.size() == 2 and config.net_rate is not None and dist.get_backend(group) == "gloo"


def all_reduce_of_buckets(group: dist.ProcessGroup, config: Config) -> AllReduce:
    """Return the all_reduce that begins to sum a bucket."""
    if swaps_buckets(group, config):
        return partial(Collective(group, "direct").all_reduce, async_op=True)
    return partial(dist.all_reduce, group=group, async_op=True)
