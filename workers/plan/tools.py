"""What people take for a layout, and the modes of this lab that show how it works."""

from workers.plan.layouts import Layout

# Where samples are cut, by whether ZeRO shards more than the optimizer's state.
OF_POSITIONS = (
    "Megatron-LM with its context parallelism and its distributed optimizer",
    "torchtitan, which stacks PyTorch's context_parallel with fully_shard; in DeepSpeed Ulysses",
)

# By whether there are pipelines and cut layers, then by ZeRO's stage.
TOOLS = {
    (False, False): (
        "PyTorch DDP (Horovod's ring all_reduce does the same, and is older)",
        "DeepSpeed ZeRO-1, or PyTorch DDP with ZeroRedundancyOptimizer",
        "DeepSpeed ZeRO-2, or PyTorch FSDP's SHARD_GRAD_OP",
        "PyTorch FSDP (fully_shard), or DeepSpeed ZeRO-3, which is the same idea",
    ),
    (False, True): (
        "Megatron-LM, or PyTorch's parallelize_module with DTensor",
        "Megatron-LM with its distributed optimizer, or DeepSpeed's ZeRO-1",
        "DeepSpeed ZeRO-2 over Megatron's tensor parallelism, as Megatron-DeepSpeed stacks them",
        (
            "PyTorch's parallelize_module and fully_shard over its DTensors, or DeepSpeed ZeRO-3 over Megatron's tensor"
            " parallelism"
        ),
    ),
    (True, False): (
        "torch.distributed.pipelining, DeepSpeed's PipelineModule or Megatron-LM",
        "DeepSpeed's PipelineModule with ZeRO-1, or Megatron-LM with its distributed optimizer",
        (
            "torch.distributed.pipelining over fully_shard(reshard_after_forward=False); DeepSpeed's pipelines refuse"
            " ZeRO-2"
        ),
        "torch.distributed.pipelining over fully_shard; DeepSpeed's pipelines refuse ZeRO-3",
    ),
    (True, True): (
        "Megatron-LM",
        "Megatron-LM with its distributed optimizer, or DeepSpeed's ZeRO-1",
        (
            "torch.distributed.pipelining over parallelize_module and fully_shard(reshard_after_forward=False), as"
            " torchtitan does"
        ),
        "torch.distributed.pipelining over parallelize_module and fully_shard, as torchtitan does",
    ),
}


def framework(layout: Layout) -> tuple[str, list[str]]:
    """What people take for it, and the modes of this lab that show how it works."""
    modes = ["RUN_MODE=tp"] * (layout.tensor > 1) + ["RUN_MODE=pp"] * (layout.pipeline > 1)
    modes += ["RUN_MODE=cp"] * (layout.context > 1)
    modes += [f"RUN_MODE=fsdp LAB_VARIANT=zero{layout.stage}"] * (layout.stage > 0)
    tool = OF_POSITIONS[layout.stage > 1] if layout.context > 1 else TOOLS[layout.axes][layout.stage]
    return tool, [f"{mode} make run" for mode in modes or ["RUN_MODE=dp"]]
