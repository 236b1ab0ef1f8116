"""What context parallelism cannot run: models without a sequence, and what PyTorch's own leaves out."""

from workers.config import Config
from workers.contract import untrainable
from workers.workload.own import is_own

NO_PATH = (
    "PyTorch's context_parallel has no path here: of the CPU's flash attention it says that it does not have a sharding"
    " strategy registered, and a GPU's takes 16 bits alone, in which nothing can be proven"
)


def refuse(config: Config) -> list[str]:
    """Models whose sequence nobody can cut, and what makes no batch: all ranks take the same samples."""
    if config.model != "gpt":
        if is_own(config.model):
            return [
                f"LAB_MODEL={config.model} is cut by no rule that the lab knows, allowed: gpt; share out its positions"
                " in a strategy of your own, and prove it by `ranklab prove`"
            ]
        return [f"LAB_MODEL={config.model} has no sequence to share out, allowed: gpt"]
    if config.device == "cuda" and config.backend == "gloo" and config.world_size > 1:
        return ["LAB_BACKEND=gloo sends no keys that live on a GPU: set LAB_BACKEND=nccl, or leave LAB_DEVICE=cpu"]
    return untrainable(config, 1)


def cannot(config: Config) -> dict[str, str]:
    """PyTorch's own, where parts are not alike, and where it has nothing for this device."""
    reasons = {"context_parallel": NO_PATH}
    if config.device != "cpu":
        reasons["torch_ring"] = "it is given the CPU's flash attention, and a GPU's takes 16 bits alone"
    elif config.seq % (2 * config.world_size):
        runs = 2 * config.world_size
        reasons["torch_ring"] = f"LAB_SEQ={config.seq} is not a multiple of {runs}, two equal runs for each rank"
    return reasons
