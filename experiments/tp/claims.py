"""What tensor parallelism claims before it runs: the sizes that it can split, and those that only some variants can."""

from experiments.tp.faults import invisible
from workers.config import Config
from workers.workload import data, model, text
from workers.workload.model import VOCABULARY, outline


def title(config: Config) -> str:
    """What is trained, for headings."""
    return outline(config).describe()


def parts(config: Config) -> dict[str, int]:
    """What is shared out among the ranks, in whole units, and how many there are."""
    hidden = {f"4 x LAB_WIDTH={config.width}": 4 * config.width}
    if config.model == "gpt":
        return {f"LAB_HEADS={config.heads}": config.heads} | hidden | {f"the vocabulary of {VOCABULARY}": VOCABULARY}
    return hidden


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    if config.model == "line":
        return ["LAB_MODEL=line has nothing that could be split, allowed: mlp, gpt"]
    ranks = config.world_size
    small = [
        f"{name} cannot be split over WORLD_SIZE={ranks}: every rank needs a part, allowed: up to {count} ranks"
        for name, count in parts(config).items()
        if count < ranks
    ]
    named = [f"LAB_VARIANT={name} cannot run: {why}" for name, why in cannot(config).items() if name in config.variant]
    faults = model.faults(config) + data.faults(config, 1) + text.faults(config)
    return small + ([] if small else named) + faults + invisible(config)


def cannot(config: Config) -> dict[str, str]:
    """Variants that these sizes rule out, and why."""
    ranks = config.world_size
    uneven = [name for name, count in parts(config).items() if count % ranks]
    return (
        {"dtensor": f"{uneven[0]} is not a multiple of WORLD_SIZE={ranks}, and its plan splits evenly"}
        if uneven
        else {}
    )
