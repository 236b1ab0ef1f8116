"""What tensor parallelism cannot run: sizes that it cannot slice, and those that PyTorch's own cannot."""

from workers.config import Config
from workers.contract import untrainable
from workers.workload.model import VOCABULARY
from workers.workload.own import is_own


def parts(config: Config) -> dict[str, int]:
    """What is shared out among the ranks, in whole units, and how many there are."""
    hidden = {f"4 x LAB_WIDTH={config.width}": 4 * config.width}
    if config.model == "gpt":
        return {f"LAB_HEADS={config.heads}": config.heads} | hidden | {f"the vocabulary of {VOCABULARY}": VOCABULARY}
    return hidden


def refuse(config: Config) -> list[str]:
    """Fewer units than ranks; and what makes no batch for all of them."""
    if config.model == "line":
        return ["LAB_MODEL=line has nothing that could be split, allowed: mlp, gpt"]
    if is_own(config.model):
        return [
            f"LAB_MODEL={config.model!r}: tp cuts the lab's own attention and MLP, allowed: mlp, gpt; how yours is cut"
            " is yours to write, and `ranklab prove` holds it against one process"
        ]
    ranks = config.world_size
    small = [
        f"{name} cannot be split over WORLD_SIZE={ranks}: every rank needs a part, allowed: up to {count} ranks"
        for name, count in parts(config).items()
        if count < ranks
    ]
    return small + untrainable(config, 1)


def cannot(config: Config) -> dict[str, str]:
    """`dtensor`, where the ranks' slices are not alike."""
    ranks = config.world_size
    uneven = [name for name, count in parts(config).items() if count % ranks]
    return (
        {"dtensor": f"{uneven[0]} is not a multiple of WORLD_SIZE={ranks}, and its plan splits evenly"}
        if uneven
        else {}
    )
