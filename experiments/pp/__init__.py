"""Pipeline parallelism: the layers of one model in stages, a stage a rank, and microbatches on their way through them.

A model that is cut between its layers needs little communication, an activation at each cut, and a rank holds a p-th of
it. But a rank can work only on what the rank before it is done with. With the batch in one piece all ranks but one
wait at any time; in m microbatches they fill the pipe, and the waiting shrinks to its filling and draining, the bubble.

  predicted   bubble: (p-1)/(m+p-1) of all ranks' time; (p-1)/(v·m+p-1) with v chunks a rank (Narayanan et al. 2021,
              "Megatron-LM", section 2.2). Bytes: A = B·S·D elements a cut and direction, so 2A a rank, A for the first and the
              last one; 2v·A with chunks, less A at the model's two ends. In flight: m microbatches in gpipe, min(m, p-r) in 1f1b
  shapes      inputs [B, S] on every rank; between stages [b, S, D], b samples of a microbatch (mlp: [b, D])

The variants do the same arithmetic, in another order:

  naive         the whole batch as one microbatch: the model is split, the work is not
  gpipe         all microbatches forward, then all backward: every rank holds the activations of all m
  1f1b          a backward as soon as there can be one: the same bubble, and rank r holds at most p - r of them
  interleaved   1f1b with LAB_CHUNKS stages a rank: the pipe fills v times as fast, for v times the messages
  torch_gpipe   torch.distributed.pipelining's ScheduleGPipe
  torch_1f1b    and its Schedule1F1B

Ranks that share cores show no bubble, since one computes while another waits: LAB_SLEEP_MS pretends compute that takes no core.
"""

import torch.distributed as dist

from experiments.pp.claims import cannot, cut_bytes, predict, refuse, title
from experiments.pp.faults import BUGS, boundaries_of
from workers.config import Config
from workers.lab import Lab, Strategy
from workers.measure.formulas.pipelines import bubble, in_flight
from workers.parallel import schedules
from workers.parallel.boundaries import Boundaries
from workers.parallel.pipeline import Pipeline
from workers.strategies.engines import ByHand
from workers.strategies.pipelined import Pipelined, parts_of, runs_of
from workers.workload.model import Model, outline

VARIANTS = ("naive", "gpipe", "1f1b", "interleaved", "torch_gpipe", "torch_1f1b")
__all__ = ["BUGS", "VARIANTS", "cannot", "predict", "refuse", "run", "title"]


def run(lab: Lab) -> None:
    """Predict, prove, measure."""
    config, ranks, microbatches = lab.config, lab.world_size, lab.config.num_microbatches
    share = bubble(ranks, microbatches)
    lab.say(
        f"all ranks idle for (p-1)/(m+p-1) = {share:.0%} of a step with p={ranks}, m={microbatches}, and a cut passes "
        f"{cut_bytes(config) / 1e6:.3g} MB each way",
        "predict",
    )
    lab.say(holds(config, lab.rank), all_ranks=True)
    measured = lab.measure(
        naive, gpipe, one_forward_one_backward, interleaved, torch_gpipe, torch_1f1b,
        also=lambda name, strategy: check_in_flight(lab, name, strategy), shards=1, cannot=cannot(config),
    )  # fmt: skip
    predictions = [prediction for prediction in predict(config) if prediction.variant in measured]
    lab.compare_traffic(predictions, measured)
    for prediction in predictions:
        name, predicted, formula = prediction.variant, prediction.value[lab.rank], prediction.formula
        seen = measured[name]
        if prediction.name == "calls":
            lab.compare("calls", predicted, seen.traffic.calls, "calls", variant=name, formula=formula)
        if prediction.name == "bubble" and seen.bubble is not None:
            lab.compare("bubble", predicted, seen.bubble, "", 0.03, name, formula, decides=False)


def holds(config: Config, rank: int) -> str:
    """The layers of a rank's stage, for its own log."""
    num_layers = len(outline(config).layers)
    run = runs_of(config.model, num_layers, config.world_size)[rank]
    return f"holds      with one stage a rank {len(run)} of {num_layers} layers: {', '.join(map(str, run))}"


def check_in_flight(lab: Lab, name: str, strategy: Strategy) -> None:
    """No rank holds more microbatches for their backward pass than its schedule says."""
    if not isinstance(strategy, Pipelined) or not isinstance(strategy.engine, ByHand):
        return
    held, microbatches = strategy.engine.pipeline.most_in_flight, lab.config.num_microbatches
    if name == "interleaved":
        schedule = schedules.interleaved(lab.world_size, microbatches, lab.config.chunks)
        allowed = schedules.most_in_flight(schedule[lab.rank])
    else:
        allowed = in_flight(name, lab.world_size, microbatches, lab.rank)
    lab.check("in flight", max(0, held - allowed), 0, name, f"{held} microbatches held at most, {allowed} allowed")


# --- the variants, in reading order ---


def naive(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """The whole batch goes from rank to rank and back."""
    return by_hand(model, group, config, schedules.naive(group.size()), whole=True)


def gpipe(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """All microbatches forward, then all backward."""
    schedule = schedules.gpipe(group.size(), config.num_microbatches)
    return by_hand(model, group, config, schedule, boundaries=boundaries_of(config))


def one_forward_one_backward(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Each rank runs ahead by as many microbatches as there are ranks behind it, then takes turns."""
    schedule = schedules.one_forward_one_backward(group.size(), config.num_microbatches)
    return by_hand(model, group, config, schedule, boundaries=boundaries_of(config))


one_forward_one_backward.__name__ = "1f1b"  # a variant goes by its function's name


def interleaved(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """The same, with LAB_CHUNKS thinner stages a rank."""
    schedule = schedules.interleaved(group.size(), config.num_microbatches, config.chunks)
    return by_hand(model, group, config, schedule, chunks=config.chunks)


def by_hand(
    model: Model, group: dist.ProcessGroup, config: Config, schedule: schedules.Schedule, *,
    chunks: int = 1, whole: bool = False, boundaries: type[Boundaries] = Boundaries,
) -> Strategy:  # fmt: skip
    """Our pipeline does this rank's part of `schedule` on its stages."""
    parts = parts_of(model, group, config, chunks)
    pipeline = Pipeline(parts.stages, schedule[group.rank()], group, boundaries)
    return Pipelined(parts, ByHand(pipeline, model.loss, config, whole=whole), group, config)


def torch_gpipe(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """PyTorch's gpipe."""
    return by_torch("torch_gpipe", model, group, config)


def torch_1f1b(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """PyTorch's 1f1b: it sends and receives in one call, and waits for both."""
    return by_torch("torch_1f1b", model, group, config)


def by_torch(name: str, model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """A schedule of PyTorch's on the same stages."""
    from experiments.pp.torch_schedules import ByTorch  # most of a second, for these two alone

    parts = parts_of(model, group, config)
    return Pipelined(parts, ByTorch(name, parts, model.loss, group, config), group, config)
