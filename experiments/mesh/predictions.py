"""What a mesh predicts, a value a rank: what it sends (sent.py), what it holds (rest.py) and how long it idles."""

from collections.abc import Mapping

from experiments.mesh.costs import total
from experiments.mesh.held import HOW, Rank
from experiments.mesh.rest import at_rest
from experiments.mesh.sent import by_axis
from workers.config import Config
from workers.measure.formulas import Prediction
from workers.measure.formulas.pipelines import idle_share

# Idle of the time of a step where backward passes are in two, with as many microbatches as ranks or more.
IN_TWO = {"1f1b": "2(p-1)/(3m+2(p-1))", "interleaved": "2(p-1)/(3v·m+2(p-1))", "zb_h1": "(p-1)/(3m+p-1)"}


def predict(config: Config, sizes: Mapping[str, int], chunks: int, excluded: Mapping[str, str]) -> list[Prediction]:
    """Bytes and calls of a step, bytes at rest and the bubble of each variant that can run, a value a rank."""
    found = []
    for name, how in HOW.items():
        if name in excluded:
            continue
        ranks = [Rank(config, sizes, rank, how, chunks) for rank in range(config.world_size)]
        costs = [total(list(by_axis(rank).values())) for rank in ranks]
        nbytes, calls, messages = (tuple(column) for column in zip(*costs, strict=True))
        most = int(max(calls))
        found += [
            Prediction(name, "wire bytes", "B", "of each axis", nbytes, most, messages=messages),
            Prediction(name, "calls", "calls", "of each axis", tuple(map(float, calls)), most),
            Prediction(name, "rest bytes", "B", f"P/(t·p), zero{how.zero}", tuple(map(at_rest, ranks)), 0),
            idle(name, config, ranks),
        ]
    return found


def idle(name: str, config: Config, ranks: list[Rank]) -> Prediction:
    """The bubble of its pipelines; less where the gradients of inputs go ahead of those of weights."""
    how, ranks_along_pp, chunks = ranks[0].how, ranks[0].p, ranks[0].chunks
    in_one = not how.in_two(ranks_along_pp, recompute=config.recompute)
    value = idle_share(how.schedule, ranks_along_pp, config.num_microbatches, chunks, in_one=in_one)
    formula = "(p-1)/(v·m+p-1)" if in_one else IN_TWO[how.schedule]
    return Prediction(name, "bubble", "", formula, (value,) * len(ranks), 0, "a time")
