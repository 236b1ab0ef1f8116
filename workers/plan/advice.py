"""From prices to a choice: the cheapest way of each kind, the one to take with its reason, and what would fit if nothing does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from workers.plan.costs import Cost, cost
from workers.plan.job import Job
from workers.plan.layouts import KINDS, Layout, impossible, layouts
from workers.report.units import human_bytes

# What is simpler may take so much longer: the estimate is no better than that, and people's time counts too.
SLACK = 1.10
MOST_GPUS = 1 << 17


@dataclass(frozen=True)
class Plan:
    """The best layout of each kind, the kinds that these sizes do not allow with the reason, and the one to take."""

    costs: dict[str, Cost]
    left_out: dict[str, str]
    pick: Cost | None

    @property
    def fitting(self) -> list[Cost]:
        """Those that a GPU's memory holds."""
        return [each for each in self.costs.values() if each.fits]


def plan(job: Job) -> Plan:
    """Weigh every kind; of a kind the fastest that fits counts, or else the one that holds least."""
    costs, left_out = {}, {}
    for name, tensor, pipeline, stage in KINDS:
        priced = [cost(job, layout) for layout in layouts(job, tensor, pipeline, stage)]
        if priced:
            costs[name] = min(priced, key=lambda each: (not each.fits, each.step_s if each.fits else each.held_bytes))
        else:
            left_out[name] = impossible(job, tensor, pipeline, stage)
    fitting = [each for each in costs.values() if each.fits]
    fastest = min((each.step_s for each in fitting), default=0.0)
    near = [each for each in fitting if each.step_s <= SLACK * fastest]
    return Plan(costs, left_out, min(near, key=lambda each: each.layout.effort, default=None))


def reason(chosen: Plan, job: Job) -> str:
    """Why the pick is the pick, in a sentence."""
    pick = chosen.pick
    assert pick is not None
    others = [each for each in chosen.fitting if each.layout != pick.layout]
    fastest = min(chosen.fitting, key=lambda each: each.step_s)
    simpler = [each for each in chosen.costs.values() if each.layout.effort < pick.layout.effort and not each.fits]
    slower = [each for each in others if each.layout.effort < pick.layout.effort]
    told = [f"it holds {human_bytes(pick.held_bytes)} of {human_bytes(job.usable_bytes)} usable"]
    if simpler:
        told.append(f"{', '.join(each.layout.name for each in simpler)} do{'es' * (len(simpler) == 1)} not fit")
    if slower:
        ratios = [f"{each.layout.name} {each.step_s / pick.step_s:.2f}x" for each in slower]
        told.append(f"{', '.join(ratios)} as long")
    if fastest is not pick:
        told.append(
            f"{fastest.layout.name} would be {1 - fastest.step_s / pick.step_s:.0%} faster, for more change to the model"
        )
    elif others and not slower:
        told.append("nothing that fits is faster and as simple")
    return "; ".join(told)


def framework(layout: Layout) -> tuple[str, list[str]]:
    """What people take for it, and the modes of this lab that show how it works."""
    sharded = f"RUN_MODE=fsdp LAB_VARIANT=zero{layout.stage} make run"
    if layout.tensor > 1 and layout.pipeline > 1:
        shown = ["RUN_MODE=tp make run", "RUN_MODE=pp make run", *[sharded] * (layout.stage > 0)]
        return "Megatron-LM, with its distributed optimizer or DeepSpeed's ZeRO-1", shown
    if layout.tensor > 1:
        return "Megatron-LM, or PyTorch's parallelize_module with DTensor", ["RUN_MODE=tp make run"]
    if layout.pipeline > 1:
        return "torch.distributed.pipelining, DeepSpeed's PipelineModule or Megatron-LM", ["RUN_MODE=pp make run"]
    return {
        0: ("PyTorch DDP (Horovod's ring all_reduce does the same, and is older)", ["RUN_MODE=dp make run"]),
        1: ("DeepSpeed ZeRO-1, or PyTorch DDP with ZeroRedundancyOptimizer", [sharded]),
        2: ("DeepSpeed ZeRO-2, or PyTorch FSDP's SHARD_GRAD_OP", [sharded]),
        3: ("PyTorch FSDP (fully_shard), or DeepSpeed ZeRO-3, which is the same idea", [sharded]),
    }[layout.stage]


def remedies(job: Job) -> Iterator[str]:
    """What would make something fit: less to keep, more GPUs, the host's memory, larger GPUs."""
    changes: list[tuple[str, Callable[[Job], Job]]] = [
        ("--recompute", lambda given: replace(given, recompute="full")),
        ("--batch 1", lambda given: replace(given, samples=1, microbatches=given.samples * given.microbatches)),
    ]
    useful, leanest = [change for change in changes if change[1](job) != job], job
    for name, change in useful:
        leanest = change(leanest)
        if (pick := plan(change(job)).pick) is not None:
            yield f"{name}: then {fitted(pick)}"
    all_changes = "".join(f" {name}" for name, _ in useful)
    yield from more_gpus(job, leanest, all_changes)
    weighed = plan(leanest).costs
    least = min(weighed.values(), key=lambda each: each.held_bytes)
    beside = f", with{all_changes}" if useful else ""
    yield from offload(job, weighed["zero3"], beside)
    yield f"GPUs of {human_bytes(least.held_bytes / (1 - job.reserve))}{beside}: {least.layout.name} holds least"


def fitted(pick: Cost) -> str:
    """Which, and how."""
    return f"{pick.layout.name} fits, with {human_bytes(pick.held_bytes)} a GPU"


def more_gpus(job: Job, leanest: Job, all_changes: str) -> Iterator[str]:
    """The first doubling of the GPUs that fits, as it is or with all that saves memory."""
    gpus = job.gpus * 2
    while gpus <= MOST_GPUS:
        for given, words in ((job, ""), (leanest, all_changes)):
            if (pick := plan(replace(given, gpus=gpus)).pick) is not None:
                yield f"--gpus {gpus}{words}: then {fitted(pick)}"
                return
        gpus *= 2


def offload(job: Job, sharded: Cost, beside: str) -> Iterator[str]:
    """The optimizer's state in the host's memory, where the rest fits."""
    left = sharded.held_bytes - sharded.memory["optimizer"]
    if left <= job.usable_bytes and sharded.memory["optimizer"]:
        host = sharded.memory["optimizer"] * min(job.gpus, job.gpus_per_node)
        yield (
            f"offload (DeepSpeed ZeRO-Offload, FSDP's CPU offload){beside}: the optimizer's state in {human_bytes(host)} of each "
            f"node's host memory leaves {human_bytes(left)} a GPU with {sharded.layout.name}, for slower steps"
        )
