"""The correct scripts in scripts/right, each with the number of ranks it is written for.

Every one ends with exit code 0 under torchrun on gloo and CPU. elastic.py is not among them: it needs a launcher that
starts it again (`torchrun --max-restarts 1`, two ranks), so it takes a test of its own.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Right:
    """A correct script: name is its file's, without .py."""

    name: str
    world_size: int


RIGHT = (
    Right("buckets_async", 2),
    Right("by_hand", 2),
    Right("coalescing", 2),
    Right("ddp", 2),
    Right("ddp_accumulation", 2),
    Right("ddp_buffers", 2),
    Right("ddp_hook", 2),
    Right("ddp_join", 2),
    Right("ddp_power_sgd", 2),
    Right("ddp_sampler", 2),
    Right("ddp_static_graph", 2),
    Right("ddp_unused", 2),
    Right("exits_0", 2),
    Right("fsdp", 2),
    Right("fsdp1", 2),
    Right("fsdp_save", 2),
    Right("functional", 2),
    Right("local_sgd", 2),
    Right("local_sync_group", 3),
    Right("mesh_2d", 4),
    Right("no_destroy", 2),
    Right("objects", 3),
    Right("pipe_1f1b", 2),
    Right("pipe_gpipe", 2),
    Right("pipe_interleaved", 2),
    Right("post_local_sgd", 4),
    Right("rank_0_saves", 2),
    Right("restart", 2),
    Right("ring", 3),
    Right("send_recv", 4),
    Right("spawned_workers", 2),
    Right("sub_groups", 3),
    Right("tensor_parallel", 2),
    Right("threads", 2),
    Right("uneven_all_to_all", 3),
    Right("uneven_work", 3),
    Right("zero_redundancy", 2),
)
