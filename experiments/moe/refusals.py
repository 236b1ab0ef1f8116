"""What a mixture of experts cannot run."""

from experiments.moe.layout import mesh_of, misfit, off_grid
from workers.config import Config
from workers.contract import untrainable
from workers.strategies.own import is_step
from workers.workload.own import is_own


def refuse(config: Config, experts: int, top_k: int) -> list[str]:
    """Models without an MLP of the lab's, more choices than experts; what makes no batch for all."""
    if config.model == "line" or is_own(config.model):
        more = "; one with experts of its own runs in dp and fsdp, and `ranklab prove` proves how you share them out"
        where = more if is_own(config.model) else ""
        return [f"LAB_MODEL={config.model!r} has no MLP of the lab's for experts to replace, allowed: mlp, gpt{where}"]
    faults = misfit(mesh_of(config), config.world_size)
    if top_k > experts:
        faults.append(f"LAB_TOP_K={top_k} is more than LAB_EXPERTS={experts}, allowed: 1 to {experts}")
    faults += [
        f"LAB_VARIANT={name!r} is the step of a replica, which would route its own tokens as if there were no others:"
        " write a strategy of (model, mesh, config), which begins with distribute() of workers/strategies/experts.py"
        for name in filter(is_own, config.variant)
        if is_step(name)
    ]
    return faults + untrainable(config)


def cannot(config: Config) -> dict[str, str]:
    """The variants that these ranks, or their backend, rule out."""
    reasons = off_grid(config)
    if config.device == "cuda" and config.backend == "gloo" and config.world_size > 1:
        why = "gloo sends no rows that live on a GPU: set LAB_BACKEND=nccl"
        reasons |= dict.fromkeys(("ep", "ep_dp", "ep_tp", "ep_dp_tp", "ep_torch"), why)
    return reasons
