"""The sweep: every recipe, with every seed, on batches of every multiple of the base, over the same samples; what it
refuses, sends and claims, and the k at which each recipe breaks down.

Its losses decide nothing, so what they are made of is checked. Of every k the first step, the last and one drawn by the
seed are held against one process, two recipes or more at each, so that each recipe is checked once at every k. No
sample to judge by is trained on, no two seeds draw alike, and the ranks take each sample of a step once and end with
the same weights.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab.collectives.costs import all_reduce_bytes, gloo_all_reduce_messages
from distlab.config import Config
from distlab.contract import WHOLE_RUN, Claims, Counted, Mode, untrainable
from distlab.lab import Lab
from distlab.measure.event_order import Order
from distlab.measure.prediction import Prediction
from distlab.verify.silent_corruption import Corruption
from distlab.workload import data
from distlab.workload.model import build_model, outline
from distlab.workload.user_model import is_own

from .checks import LAYERWISE, STEPS, check_step, state_of
from .training import LAMB_RATE, LARS_RATE, Lockstep, Recipe, Stream, Trainee, base_rate, sgd

MULTIPLES = (1, 2, 4, 8, 16, 32)
SEEDS = 3
SPREADS = 3
FEW = 8  # samples, whose order two seeds share by chance in one of 40 000
CONTROLS = "tests/experiments/test_largebatch.py::{}"

Runs = dict[tuple[str, int], Trainee]  # the trainings of one k, by recipe and seed


def multiples(config: Config) -> list[int]:
    """The k that divide the steps: all of them then see the same samples."""
    return [k for k in MULTIPLES if config.steps % k == 0]


def refuse(config: Config, recipes: Mapping[str, Recipe]) -> list[str]:
    if config.model == "line":
        return ["LAB_MODEL='line' has one batch of 32 points, of which there is no multiple, allowed: mlp, gpt"]
    if is_own(config.model):
        return [f"LAB_MODEL={config.model!r}: largebatch trains the lab's own, at its own sizes, allowed: mlp, gpt"]
    refusals = []
    if config.optimizer != "sgd":
        refusals.append(
            f"LAB_OPTIMIZER={config.optimizer} is no part of largebatch: each recipe has an optimizer of its own"
        )
    if config.clip is not None:
        refusals.append(
            f"LAB_CLIP={config.clip:g} is no part of largebatch: a gradient that is clipped does not grow with the rate"
        )
    if "bucket_mib" in config.model_fields_set:
        refusals.append(
            f"LAB_BUCKET_MIB={config.bucket_mib:g} is no part of largebatch: "
            "the gradients of all its runs are one bucket"
        )
    optimizers = {recipe.optimizer for recipe in recipes.values()}
    if config.lr is not None and optimizers and sgd not in optimizers:
        refusals.append(f"LAB_LR={config.lr:g} is the base rate of SGD, which no recipe of LAB_VARIANT takes")
    if config.model == "gpt" and not data.text_refusals(config) and len(data.Text(config)) == 1:
        refusals.append(
            f"the text holds one sample of LAB_SEQ={config.seq} bytes, and another is needed to judge by: "
            "name a longer one in LAB_TEXT"
        )
    return refusals + untrainable(config)


def predict(config: Config, recipes: Mapping[str, Recipe]) -> list[Prediction]:
    """Bytes of one step of all runs together, a value a rank."""
    runs, ranks = SEEDS * len(recipes), config.world_size
    nbytes = runs * outline(config).num_parameters() * getattr(torch, config.dtype).itemsize
    value = (all_reduce_bytes("gloo", ranks, nbytes),) * ranks
    messages = (gloo_all_reduce_messages(ranks, nbytes),) * ranks
    formula = f"2(N-1)/N x S x {runs} runs"
    return [Prediction(config.model, "wire bytes", "B", formula, value, 1, messages=messages)]


def claims(mode: Mode, config: Config) -> Iterator[Claims]:
    """The proof of each recipe, at every k of the sweep its samples, sampled steps and replicas, and bytes."""
    batches = len(multiples(config))
    yield Claims(("effective batch", "seeds"), WHOLE_RUN, one=True, times=batches)
    yield Claims(("held out",), WHOLE_RUN, one=True)
    yield Claims(("replicas",), WHOLE_RUN, times=batches)
    yield Claims(("called bytes", "wire bytes"), (config.model,))
    if config.proof:
        yield Claims(("layers", "global norms"), LAYERWISE)
        yield Claims(("k steps of η against one of kη",), WHOLE_RUN, one=True)
        yield Claims(("gradients", "weights"), mode.names, one=True, times=STEPS)
        plain = [name for name in mode.names if name not in LAYERWISE]
        yield Claims(("learning rate",), plain, one=True, times=STEPS)
        yield Claims(("trained gradients", "trained weights"), mode.names, one=True, times=batches)


# --- the sweep ---


class SweepResults(NamedTuple):
    losses: dict[str, dict[int, list[float]]]  # held-out, by recipe and k, a value a seed
    untrained: float  # the mean held-out loss before the first step
    counted: Counted  # of one step at the largest k


def note_losses(lab: Lab, k: int, stream: Stream, losses: Mapping[str, list[float]]) -> None:
    """In each rank's own log: its part of the batch at this `k`, and where each recipe came with it."""
    ids = stream.sample_ids(0, lab.rank, lab.world_size)
    ended = ", ".join(f"{name} {sum(of) / len(of):.3g}" for name, of in losses.items())
    number = lab.config.steps // k
    steps = f"{number} step{'s' if number > 1 else ''}"
    lab.note("trains", f"k={k}: {steps}, {len(ids)} of {k * lab.config.batch} samples here; loss {ended}")


def sweep(lab: Lab, recipes: Mapping[str, Recipe]) -> SweepResults:
    """Train by all `recipes`; k after k, and all that share a k in lockstep."""
    config, dtype = lab.config, getattr(torch, lab.config.dtype)
    seeds = range(config.seed, config.seed + SEEDS)
    streams = {seed: Stream(config, seed, config.steps, lab.device, dtype) for seed in seeds}
    losses: dict[str, dict[int, list[float]]] = {name: {} for name in recipes}
    if lab.rank == 0:
        check_held_out(lab, streams.values())
    with lab.work.of(sum(config.steps // k for k in multiples(config)), "steps of all recipes"):
        for k in multiples(config):
            check_samples(lab, streams[config.seed].times(k))
            runs = trainees(lab, recipes, streams, k)
            if lab.rank == 0:
                check_seeds(lab, runs)
            train(lab, runs, k)
            for name in recipes:
                losses[name][k] = [runs[name, seed].held_out_loss() for seed in seeds]
            note_losses(lab, k, streams[config.seed].times(k), {name: losses[name][k] for name in recipes})
    lockstep = in_lockstep(lab, trainees(lab, recipes, streams, multiples(config)[-1]))
    with lab.count() as traffic:
        lockstep.backward(0)
        lockstep.update(0)
    fresh = trainees(lab, dict(list(recipes.items())[:1]), streams, 1)
    untrained = fmean(each.held_out_loss() for each in fresh.values())
    return SweepResults(losses, untrained, Counted(traffic, 0, {}, {}, Order({})))


def trainees(lab: Lab, recipes: Mapping[str, Recipe], streams: Mapping[int, Stream], k: int) -> Runs:
    config, dtype = lab.config, getattr(torch, lab.config.dtype)
    return {
        (name, seed): Trainee(
            build_model(config, seed).to(lab.device, dtype), stream, recipe, k, config.steps // k, config
        )
        for name, recipe in recipes.items()
        for seed, stream in streams.items()
    }


def in_lockstep(lab: Lab, runs: Runs) -> Lockstep:
    return Lockstep({f"{name} {seed}": trainee for (name, seed), trainee in runs.items()}, lab.group)


def train(lab: Lab, runs: Runs, k: int) -> None:
    """Take all steps of one k, each forward, backward and update of all its trainings, and check them."""
    config, steps, name = lab.config, lab.config.steps // k, f"batches of {k} times the base"
    lockstep, of_seed = in_lockstep(lab, runs), {each: run for (each, seed), run in runs.items() if seed == config.seed}
    corruption = Corruption(lab, {name: lockstep}, config.audited_every)
    shared = corruption.shared(name)
    due = sampled(config.seed, k, steps, list(of_seed)) if config.proof and lab.rank == 0 else {}
    for step in range(steps):
        before = {recipe: state_of(of_seed[recipe]) for recipe in due.get(step, [])}
        lab.begin_step(step, name)
        for kind, part in (("gradients", lockstep.backward), ("weights", lockstep.update)):
            part(step)
            lab.on_tensors(kind, name, lockstep, step, shared)
            corruption.hash(kind, name, lockstep, step)
        lab.stepped()
        corruption.compare(name, step)
        for recipe, state in before.items():
            check_step(lab, recipe, of_seed[recipe], state, step, proof=False)
    corruption.decide()
    check_replicas(lab, lockstep)


def sampled(seed: int, k: int, steps: int, names: list[str]) -> dict[int, list[str]]:
    """The recipes that are checked at each of three steps: the first, the last and a drawn one."""
    draw = random.Random(f"{seed} {k}")
    due = list(dict.fromkeys((0, steps - 1, draw.randrange(steps))))
    order, each = draw.sample(names, len(names)), max(2, -(-len(names) // len(due)))
    return {
        step: list(dict.fromkeys(order[(each * place + index) % len(order)] for index in range(each)))
        for place, step in enumerate(due)
    }


def check_held_out(lab: Lab, streams: Iterable[Stream]) -> None:
    """No sample to judge by is among those that are dealt."""
    control = CONTROLS.format("test_a_sweep_that_draws_wrong_fails_the_run")
    seen = sum(len({*stream.held_out.tolist()} & {*stream.trained.tolist()}) for stream in streams)
    lab.check("held out", seen, 0, detail="samples to judge by that are trained on", control=control)


def check_seeds(lab: Lab, runs: Runs) -> None:
    """Of one recipe no two trainings that begin now have the same weights, or see the same samples."""
    first = [trainee for (name, _), trainee in runs.items() if name == next(iter(runs))[0]]
    inputs = [trainee.stream.samples.take(trainee.stream.trained)[0] for trainee in first]
    alike = sum(
        all(map(torch.equal, one.model.parameters(), other.model.parameters())) or torch.equal(mine, theirs)
        for (one, mine), (other, theirs) in combinations(zip(first, inputs, strict=True), 2)
        if len(mine) >= FEW
    )
    control = CONTROLS.format("test_a_sweep_that_draws_wrong_fails_the_run")
    lab.check("seeds", alike, 0, detail="pairs of seeds that draw alike", control=control)


def check_samples(lab: Lab, stream: Stream) -> None:
    """All ranks together take the whole batch of the first step, each sample once."""
    everyone = lab.exchange.gather("samples", stream.sample_ids(0, lab.rank, lab.world_size))
    if everyone is not None:
        times, wanted = Counter(sample for of_rank in everyone for sample in of_rank), Counter(stream.full_ids(0))
        wrong = sum(abs(times[sample] - wanted[sample]) for sample in times | wanted)
        control = CONTROLS.format("test_samples_of_another_step_fail_the_run")
        detail = "samples of a step that do not count exactly once"
        lab.check("effective batch", wrong, 0, detail=detail, control=control)


def check_replicas(lab: Lab, lockstep: Lockstep) -> None:
    """All ranks hold the same weights, to the bit; a training that left the range of numbers is not a number on all."""
    mine = torch.cat([weight.flatten() for _, weight in lockstep.alike("weights")])
    first = mine.clone()
    dist.broadcast(first, group=lab.group, group_src=0)
    same = torch.equal(mine.isnan(), first.isnan())
    differs = (mine.nan_to_num() - first.nan_to_num()).abs().max().item() if same else math.inf
    lab.check("replicas", differs, 0.0, control=CONTROLS.format("test_a_sweep_that_parts_fails_the_run"))


# --- what is shown of it ---


def show_settings(lab: Lab, recipes: Sequence[str]) -> None:
    config, ks = lab.config, multiples(lab.config)
    total = config.steps * config.batch
    lab.say(f"{outline(config).describe()}: {total} samples for every k, {SEEDS} seeds, {config.dtype}", "model")
    left_out = [str(k) for k in MULTIPLES if k not in ks]
    if left_out:
        lab.say(
            f"k = {', '.join(left_out)}: LAB_STEPS={config.steps} is no multiple, so the samples would differ",
            "left out",
        )
    names = ", ".join(recipes)
    lab.say(f"base rates: SGD {base_rate(config):g}, LARS {LARS_RATE:g}, LAMB {LAMB_RATE:g}; recipes {names}", "rates")
    for k in ks:
        batch = data.effective_batch(config.model_copy(update={"batch": k * config.batch}), lab.world_size)
        lab.say(f"k = {k}: {batch}, {config.steps // k} steps", "batch")


def show_found(lab: Lab, found: SweepResults) -> None:
    """A table and a chart of the losses, and the k at which each recipe breaks down."""
    ks, untrained, spread = multiples(lab.config), found.untrained, widest_spread(found)
    rows = [
        [name, *(cell(losses[k], untrained) for k in ks), broken(losses, spread, untrained)]
        for name, losses in found.losses.items()
    ]
    title = f"loss on held-out samples after {lab.config.steps * lab.config.batch} samples"
    columns = ["recipe", *(f"k = {k}" for k in ks), "breaks down at"]
    lab.table(f"{lab.config.model}: {title}, mean of {SEEDS} seeds (least to most)", columns, rows)
    lab.say(
        f"{untrained:.4g} before the first step. A recipe breaks down at the smallest k whose mean loss is above that, "
        f"or more than {SPREADS} x {100 * spread:.2g} % above its own at k = 1, where seeds lie {100 * spread:.2g} % "
        "apart at the widest",
        "found",
    )
    lab.say(result({row[0]: row[-1] for row in rows}), "result", at="normal")
    drawn = {
        name: [[float(k), fmean(values)] for k, values in losses.items() if learned(values, untrained)]
        for name, losses in found.losses.items()
    }
    series = {name: [list(axis) for axis in zip(*points, strict=True)] for name, points in drawn.items() if points}
    lab.chart(
        f"{lab.config.model}: held-out loss by batch (not drawn above {untrained:.3g}, that of the untrained model)",
        "k", "loss", series, log_x=True,
    )  # fmt: skip


def result(ends: Mapping[str, str]) -> str:
    """At which k each recipe breaks down, in a line, and which do not."""
    breaks = ", ".join(f"{name} {end.removeprefix('k = ')}" for name, end in ends.items() if end.startswith("k"))
    rest = {end: [name for name, other in ends.items() if other == end] for end in ends.values() if end[0] != "k"}
    told = [f"breaks at k: {breaks}"] if breaks else []
    return "; ".join([*told, *(f"{end}: {', '.join(names)}" for end, names in rest.items())])


def learned(losses: list[float], untrained: float) -> bool:
    """Whether the mean over the seeds is no worse than that of a model that never trained, and a number at all."""
    return fmean(losses) <= untrained


def cell(losses: list[float], untrained: float) -> str:
    if not learned(losses, untrained):
        return "diverged"
    return f"{fmean(losses):.3g} ({min(losses):.3g} to {max(losses):.3g})"


def widest_spread(found: SweepResults) -> float:
    """How far apart the seeds are at k = 1, (most - least) / mean: of all recipes that did not diverge there, as three
    may be close by chance."""
    bases = [by_k[1] for by_k in found.losses.values() if learned(by_k[1], found.untrained)]
    return max(((max(base) - min(base)) / fmean(base) for base in bases), default=0.0)


def broken(losses: dict[int, list[float]], spread: float, untrained: float) -> str:
    bound = fmean(losses[1]) * (1 + SPREADS * spread)
    worse = [k for k, values in sorted(losses.items()) if not (learned(values, untrained) and fmean(values) <= bound)]
    return f"k = {worse[0]}" if worse else f"none up to {max(losses)}"
