"""What a rank of the mesh holds between two steps: the formulas of ZeRO, with what other axes leave of the model."""

from experiments.mesh.held import Rank
from experiments.mesh.sent import owned, stage_of
from workers.measure.formulas.sharding import rest_bytes


def at_rest(rank: Rank) -> float:
    """Weights, gradients and optimizer state; ZeRO's units and chunks have their padding too."""
    config, adam = rank.config, rank.config.optimizer == "adamw"
    masters = config.dtype == "bfloat16"
    held = 0.0
    for unit in [unit for stage in rank.stages for unit in rank.units(stage)]:
        numel, zero = sum(local.numel for local in unit), stage_of(rank, unit)
        own, chunk = owned(rank, unit) if zero else numel, -(-numel // rank.replicas)
        tensors = adam * (1 if zero else len(unit))
        kept = rest_bytes(
            zero, numel, own, itemsize=rank.itemsize, moments=2 * adam, masters=masters, num_tensors=tensors
        )
        if zero:
            padded = rest_bytes(zero, rank.replicas * chunk, chunk, itemsize=rank.itemsize, moments=0)
            kept |= {"parameters": padded["parameters"]} | ({"gradients": padded["gradients"]} if zero == 1 else {})
        held += sum(kept.values())
    return held
