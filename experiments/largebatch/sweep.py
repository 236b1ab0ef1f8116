"""The sweep: every recipe, with every seed, on batches of every multiple of the base, over the same samples.

Its losses decide nothing, so what they are made of is checked. Of every k the first step, the last and one drawn by the
seed are held against one process, two recipes or more at each, so that each recipe is checked once at every k. No
sample to judge by is trained on, no two seeds draw alike, and the ranks take each sample of a step once and end with
the same weights.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

from distlab.config import Config
from distlab.contract import Counted
from distlab.lab import Lab
from distlab.measure.event_order import Order
from distlab.verify.silent_corruption import Corruption
from distlab.workload.model import build_model

from .checks import State, check_step
from .training import Lockstep, Recipe, Stream, Trainee

MULTIPLES = (1, 2, 4, 8, 16, 32)
SEEDS = 3
FEW = 8  # samples, whose order two seeds share by chance in one of 40 000
CONTROLS = "tests/experiments/test_largebatch.py::{}"

Runs = dict[tuple[str, int], Trainee]  # the trainings of one k, by recipe and seed


def multiples(config: Config) -> list[int]:
    """The k that divide the steps: all of them then see the same samples."""
    return [k for k in MULTIPLES if config.steps % k == 0]


class SweepResults(NamedTuple):
    """The results of a sweep."""

    losses: dict[str, dict[int, list[float]]]  # held-out, by recipe and k, a value a seed
    untrained: float  # the mean held-out loss before the first step
    counted: Counted  # of one step at the largest k


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
            check_samples(lab, streams[config.seed], k)
            runs = trainees(lab, recipes, streams, k)
            if lab.rank == 0:
                check_seeds(lab, runs)
            train(lab, runs, k)
            for name in recipes:
                losses[name][k] = [runs[name, seed].held_out_loss() for seed in seeds]
    counted = count(lab, trainees(lab, recipes, streams, multiples(config)[-1]))
    fresh = trainees(lab, dict(list(recipes.items())[:1]), streams, 1)
    return SweepResults(losses, fmean(each.held_out_loss() for each in fresh.values()), counted)


def trainees(lab: Lab, recipes: Mapping[str, Recipe], streams: Mapping[int, Stream], k: int) -> Runs:
    """A training for each recipe and each seed."""
    config, dtype = lab.config, getattr(torch, lab.config.dtype)
    return {
        (name, seed): Trainee(
            build_model(config, seed).to(lab.device, dtype), stream, recipe, k, config.steps // k, config
        )
        for name, recipe in recipes.items()
        for seed, stream in streams.items()
    }


def in_lockstep(lab: Lab, runs: Runs) -> Lockstep:
    """The trainings of one k, each named by recipe and seed."""
    return Lockstep({f"{name} {seed}": trainee for (name, seed), trainee in runs.items()}, lab.group)


def train(lab: Lab, runs: Runs, k: int) -> None:
    """Take all steps of one k, each forward, backward and update of all its trainings, and check them."""
    config, steps, name = lab.config, lab.config.steps // k, f"batches of {k} times the base"
    lockstep, of_seed = in_lockstep(lab, runs), {each: run for (each, seed), run in runs.items() if seed == config.seed}
    corruption = Corruption(lab, {name: lockstep}, config.audited_every)
    shared = corruption.shared(name)
    due = sampled(config.seed, k, steps, list(of_seed)) if config.proof and lab.rank == 0 else {}
    for step in range(steps):
        before = {recipe: State.of(of_seed[recipe]) for recipe in due.get(step, [])}
        lab.begin_step(step, name)
        lockstep.backward(step)
        lab.on_tensors("gradients", name, lockstep, step, shared)
        corruption.hash("gradients", name, lockstep, step)
        lockstep.update(step)
        lab.on_tensors("weights", name, lockstep, step, shared)
        corruption.hash("weights", name, lockstep, step)
        lab.stepped()
        corruption.compare(name, step)
        for recipe, state in before.items():
            check_step(lab, recipe, of_seed[recipe], state, step, proof=False)
    corruption.decide()
    check_replicas(lab, lockstep)


def count(lab: Lab, runs: Runs) -> Counted:
    """What one step sends."""
    lockstep = in_lockstep(lab, runs)
    with lab.count() as traffic:
        lockstep.backward(0)
        lockstep.update(0)
    return Counted(traffic, 0, {}, {}, Order({}))


# --- what is checked ---


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
    alike = sum(
        all(map(torch.equal, one.model.parameters(), other.model.parameters()))
        or torch.equal(one.stream.inputs, other.stream.inputs)
        for one, other in combinations(first, 2)
        if len(one.stream.inputs) >= FEW
    )
    control = CONTROLS.format("test_a_sweep_that_draws_wrong_fails_the_run")
    lab.check("seeds", alike, 0, detail="pairs of seeds that draw alike", control=control)


def check_samples(lab: Lab, stream: Stream, k: int) -> None:
    """All ranks together take k times the base batch in the first step, each sample once."""
    everyone = lab.exchange.gather("samples", list(stream.places(k, 0, lab.rank, lab.world_size)))
    if everyone is not None:
        times = Counter(sample for of_rank in everyone for sample in of_rank)
        wrong = sum(abs(times[sample] - 1) for sample in {*times, *range(k * stream.config.batch)})
        control = CONTROLS.format("test_samples_of_another_step_fail_the_run")
        detail = "samples of a step that do not count exactly once"
        lab.check("effective batch", wrong, 0, detail=detail, control=control)


def check_replicas(lab: Lab, lockstep: Lockstep) -> None:
    """All ranks hold the same weights, to the bit; a training that left the range of numbers is not a number on all."""
    mine = torch.cat([parameters_to_vector(each.model.parameters()).detach() for each in lockstep.trainees.values()])
    first = mine.clone()
    dist.broadcast(first, group=lab.group, group_src=0)
    same = torch.equal(mine.isnan(), first.isnan())
    differs = (mine.nan_to_num() - first.nan_to_num()).abs().max().item() if same else math.inf
    lab.check("replicas", differs, 0.0, control=CONTROLS.format("test_a_sweep_that_parts_fails_the_run"))
