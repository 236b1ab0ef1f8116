"""The sweep: every recipe, with every seed, on batches of every multiple of the base, over the same samples."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from experiments.largebatch.audit import Audit
from experiments.largebatch.draws import check_held_out, check_seeds
from experiments.largebatch.lockstep import Lockstep, Trainee
from experiments.largebatch.recipes import Recipe, distinct, standing_for
from experiments.largebatch.samples import Stream
from workers.config import Config
from workers.contract import Counted
from workers.lab import Lab
from workers.measure.order import Order
from workers.passes.corruption import Corruption
from workers.workload.model import build_model

MODELS = ("mlp", "gpt")
DEPTHS = {"mlp": 2, "gpt": 1}  # unless set
MULTIPLES = (1, 2, 4, 8, 16, 32)
SEEDS = 3
CONTROLS = "tests/experiments/test_largebatch.py::{}"


def models(config: Config) -> tuple[str, ...]:
    """LAB_MODEL, or both where it is not set."""
    return (config.model,) if "model" in config.model_fields_set else MODELS


def sized(config: Config, model: str) -> Config:
    """The settings for one model, with the depth that the mode gives it where none was set."""
    depth = config.depth if "depth" in config.model_fields_set else DEPTHS.get(model, 1)
    return config.model_copy(update={"model": model, "depth": depth})


def multiples(config: Config) -> list[int]:
    """The k that divide the steps: all of them then see the same samples."""
    return [k for k in MULTIPLES if config.steps % k == 0]


def num_runs(recipes: Mapping[str, Recipe], k: int) -> int:
    """How many trainings step together at k."""
    return SEEDS * len(distinct(recipes, k))


@dataclass(frozen=True)
class Found:
    """What a sweep came to."""

    losses: dict[str, dict[int, list[float]]]  # held-out, by recipe and k, a value a seed
    untrained: float  # the mean held-out loss before the first step
    runs: dict[int, int]  # how many stepped together at k
    seconds: dict[int, float]  # of all steps at k, this rank's
    counted: Counted  # of one step at the largest k


def sweep(lab: Lab, config: Config, recipes: Mapping[str, Recipe]) -> Found:
    """Train by all `recipes`; k after k, and all that share a k in lockstep."""
    seeds, dtype = range(config.seed, config.seed + SEEDS), getattr(torch, config.dtype)
    streams = {seed: Stream(config, seed, config.steps, lab.device, dtype) for seed in seeds}
    losses: dict[str, dict[int, list[float]]] = {name: {} for name in recipes}
    num, seconds = {}, {}
    total = sum(config.steps // k * num_runs(recipes, k) for k in multiples(config))
    if config.proof and lab.rank == 0:
        for stream in streams.values():
            check_held_out(lab, stream)
    with lab.work.of(total, f"steps of all {config.model} runs"):
        for k in multiples(config):
            check_samples(lab, streams[config.seed], k)
            runs = trainees(lab, config, recipes, streams, k)
            if config.proof and lab.rank == 0:
                check_seeds(lab, runs, config.model)
            num[k], lockstep = len(runs), in_lockstep(lab, runs)
            audit = Audit(lab, config.model, runs, config.steps // k)
            name = f"batches of {k} times the base of {config.model}"
            corruption = Corruption(lab, {name: lockstep}, lab.config.audited_every)
            steps = partial(train, lab, name, lockstep, config.steps // k, audit, corruption)
            seconds[k] = lab.seconds(steps) - audit.seconds - corruption.seconds[name]
            corruption.decide()
            check_replicas(lab, lockstep, config.model)
            for name, ran in standing_for(recipes, k).items():
                losses[name][k] = [runs[ran, seed].held_out_loss() for seed in seeds]
    counted = count(lab, config, recipes, streams)
    return Found(losses, untrained(lab, config, streams), num, seconds, counted)


def trainees(
    lab: Lab, config: Config, recipes: Mapping[str, Recipe], streams: dict[int, Stream], k: int
) -> dict[tuple[str, int], Trainee]:
    """A training for each recipe that differs at k, and each seed."""
    dtype, steps = getattr(torch, config.dtype), config.steps // k
    return {
        (name, seed): Trainee(build_model(config, seed).to(lab.device, dtype), stream, recipe, k, steps, config)
        for name, recipe in distinct(recipes, k).items()
        for seed, stream in streams.items()
    }


def in_lockstep(lab: Lab, runs: Mapping[tuple[str, int], Trainee]) -> Lockstep:
    """The trainings of one k, each named by recipe and seed."""
    return Lockstep({f"{name} {seed}": trainee for (name, seed), trainee in runs.items()}, lab.group)


def train(lab: Lab, name: str, lockstep: Lockstep, steps: int, audit: Audit, corruption: Corruption) -> None:
    """Forward, backward and update of all, step by step; audits look at some."""
    shared = corruption.shared(name)
    for step in range(steps):
        lab.begin_step(step, name)
        lockstep.backward(step)
        lab.on_tensors("gradients", name, lockstep, step, shared)
        corruption.hash("gradients", name, lockstep, step)
        lockstep.update(step)
        lab.on_tensors("weights", name, lockstep, step, shared)
        corruption.hash("weights", name, lockstep, step)
        lab.stepped(len(lockstep.trainees))
        corruption.compare(name, step)
        audit.hold(step, lab.world_size)


def count(lab: Lab, config: Config, recipes: Mapping[str, Recipe], streams: dict[int, Stream]) -> Counted:
    """What one step at the largest k sends."""
    runs = trainees(lab, config, recipes, streams, multiples(config)[-1])
    lockstep = in_lockstep(lab, runs)
    with lab.count() as traffic:
        lockstep.backward(0)
        lockstep.update(0)
    return Counted(traffic, 0, {}, {}, Order({}))


def untrained(lab: Lab, config: Config, streams: dict[int, Stream]) -> float:
    """What no step at all would give, in the mean over the seeds."""
    total = 0.0
    for seed, stream in streams.items():
        inputs, targets, share = stream.held_out
        with torch.no_grad():
            total += (build_model(config, seed).to(lab.device)(inputs, targets) * share).item()
    return total / len(streams)


def check_samples(lab: Lab, stream: Stream, k: int) -> None:
    """All ranks together take k times the base batch in the first step, each sample once."""
    mine = list(stream.places(k, 0, lab.rank, lab.world_size))
    everyone = lab.exchange.gather("samples", mine)
    if everyone is not None:
        times = Counter(sample for of_rank in everyone for sample in of_rank)
        wrong = sum(abs(times[sample] - 1) for sample in {*times, *range(k * stream.config.batch)})
        lab.check(
            "effective batch",
            wrong,
            0,
            detail="samples of a step that do not count exactly once",
            control=CONTROLS.format("test_samples_of_another_step_fail_the_run"),
        )


def check_replicas(lab: Lab, lockstep: Lockstep, model: str) -> None:
    """All ranks hold the same weights, to the bit; a training that left the range of numbers is not a number on all."""
    mine = lockstep.weights()
    first = mine.clone()
    dist.broadcast(first, group=lab.group, group_src=0)
    same = torch.equal(mine.isnan(), first.isnan())
    differs = (mine.nan_to_num() - first.nan_to_num()).abs().max().item() if same else math.inf
    lab.check("replicas", differs, 0.0, variant=model, control=CONTROLS.format("test_a_sweep_that_parts_fails_the_run"))
