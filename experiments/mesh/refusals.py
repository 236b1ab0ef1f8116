"""What a mesh cannot run: settings that are no grid, and sizes that an axis cannot take."""

from experiments.mesh.layout import misfit, sizes_of
from workers.config import Config
from workers.contract import untrainable
from workers.workload.model import VOCABULARY


def refuse(config: Config, mesh: str) -> list[str]:
    """No grid of these ranks, a model that cannot be cut, too little of it for an axis; and what makes no batch."""
    if config.model not in ("gpt", "mlp"):
        return [f"LAB_MODEL={config.model!r} cannot be cut along three axes, allowed: gpt, mlp"]
    wrong = misfit(mesh, config.world_size)
    if wrong:
        return wrong
    sizes = sizes_of(mesh, config.world_size)
    return too_small(config, sizes) + untrainable(config, sizes["dp"])


def too_small(config: Config, sizes: dict[str, int]) -> list[str]:
    """Fewer heads, units or layers than ranks along an axis."""
    sliced = {f"LAB_HEADS={config.heads}": config.heads, f"the vocabulary of {VOCABULARY}": VOCABULARY}
    counts = (sliced if config.model == "gpt" else {}) | {f"4 x LAB_WIDTH={config.width}": 4 * config.width}
    found = [
        f"{name} cannot be sliced over tp {sizes['tp']}: every rank needs a part, allowed: up to tp{count}"
        for name, count in counts.items()
        if count < sizes["tp"]
    ]
    if config.depth < sizes["pp"]:
        found.append(f"LAB_DEPTH={config.depth} layers are fewer than pp {sizes['pp']} stages: every stage needs one")
    return found


def cannot(config: Config, sizes: dict[str, int], chunks: int) -> dict[str, str]:
    """The variants that cannot take these sizes, each with the reason."""
    reasons = {}
    stages = sizes["pp"] * chunks
    if sizes["pp"] == 1:
        reasons["interleaved"] = "one stage is cut into no thinner ones: give LAB_MESH a pp of 2 or more"
    elif stages > config.depth:
        reasons["interleaved"] = (
            f"LAB_CHUNKS={chunks} on pp {sizes['pp']} makes {stages} stages of {config.depth} layers"
        )
    if config.model != "gpt":
        reasons["sequence"] = "the rows that it cuts are positions of a text, and mlp has none: set LAB_MODEL=gpt"
    elif sizes["tp"] == 1:
        reasons["sequence"] = "it cuts rows among the ranks of a slice: give LAB_MESH a tp of 2 or more"
    return reasons
