"""What tensor parallelism cannot run: sizes that it cannot slice, and those that PyTorch's own cannot."""

from experiments.tp.layers import linears
from experiments.tp.plans import faults, planned
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
        return untrainable(config, 1) or faults(config)
    ranks = config.world_size
    small = [
        f"{name} cannot be split over WORLD_SIZE={ranks}: every rank needs a part, allowed: up to {count} ranks"
        for name, count in parts(config).items()
        if count < ranks
    ]
    return small + untrainable(config, 1)


def cannot(config: Config) -> dict[str, str]:
    """`dtensor`, where the ranks' slices are not alike; of one's own model what knows the lab's blocks alone."""
    if is_own(config.model):
        rows = "it slices rows between the lab's own blocks, and a plan names layers alone, not which dim has the rows"
        return {"sequence": rows} | cannot_plan(config)
    return uneven(parts(config), config.world_size)


def cannot_plan(config: Config) -> dict[str, str]:
    """`naive`, where a layer has fewer outputs than ranks; `dtensor`, where the plan's parts are not alike."""
    ranks = config.world_size
    small = [(name, each.outputs) for name, each in linears(config).items() if each.outputs < ranks]
    naive = {"naive": f"{small[0][0]} has {small[0][1]} outputs for {ranks} ranks"} if small else {}
    units = {f"{each.units}, the {each.what} of {name},": each.units for name, each in planned(config).items()}
    return naive | uneven(units, ranks)


def uneven(counts: dict[str, int], ranks: int) -> dict[str, str]:
    """Why `dtensor` cannot share these out."""
    named = [name for name, count in counts.items() if count % ranks]
    return (
        {"dtensor": f"{named[0]} is not a multiple of WORLD_SIZE={ranks}, and its plan splits evenly"} if named else {}
    )
