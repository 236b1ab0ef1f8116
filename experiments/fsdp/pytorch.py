"""PyTorch's own: `fully_shard`, one wrap unit a block and one for what is left, the embedding and the output layer.

It is ZeRO-3: every parameter a DTensor, sharded along its first dim. As in zero3 all units are freed after their
forward pass (left to itself PyTorch keeps the outermost one). gloo's reduce_scatter is an all_reduce and a slice, so on
gloo it sends 4(N-1)/N·S where zero3 sends 3(N-1)/N·S.
"""

from typing import Any

import torch
import torch.distributed as dist

from distlab.config import Config
from distlab.contract import Strategy
from distlab.sharded.strategy import FullySharded
from distlab.workload.model import Model


def fully_sharded(model: Model, group: dist.ProcessGroup, config: Config, *, reshard: bool, offload: bool) -> Strategy:
    """`model`, sharded in place."""
    # Not at the top: it takes a rank half a second, and no other variant needs it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = DeviceMesh.from_group(group, "cuda" if config.device == "cuda" else "cpu")
    policies: dict[str, Any] = {
        "mesh": mesh, "reshard_after_forward": reshard,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }  # fmt: skip
    if config.dtype == "bfloat16" and next(model.parameters()).dtype == torch.bfloat16:  # and not in the proof
        model.float()  # float32 masters, as ours
        policies["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    blocks = model.layers[1:-1] if model.name == "gpt" else model.layers
    for block in blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    return FullySharded(model, group, config)
