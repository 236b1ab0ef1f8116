"""Choose a layout from costs: the best one of each kind, the recommended one with its reason, and remedies if
nothing fits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from distlab.lab.report.units import human_bytes, three_digits
from distlab.tools.plan.costs import EXPOSED, Cost, cost
from distlab.tools.plan.job import Job, Savings, Weights
from distlab.tools.plan.layout import KINDS, Layout, impossible, layouts
from distlab.tools.plan.memory import held_bytes

# A simpler layout may be slower by this: the estimate is no more exact, and people's time counts too.
SLACK = 1.10
NOTABLE = 0.01  # of a step: smaller differences are not mentioned
MOST_GPUS = 1 << 17


@dataclass(frozen=True)
class Plan:
    """The best layout of each kind, the impossible kinds with their reasons, and the recommended layout."""

    costs: dict[str, Cost]
    left_out: dict[str, str]
    pick: Cost | None

    @property
    def fitting(self) -> list[Cost]:
        """Layouts that fit into a GPU's memory."""
        return [each for each in self.costs.values() if each.fits]

    @property
    def shown(self) -> list[Cost]:
        """Rows of the table: layouts that only shard; per product the simplest and fastest that fit; the chosen one.

        If none of a product fits, its smallest one. All layouts that cut samples count as one product.
        """
        rows = [self.pick] if self.pick else []
        for axes, group in groupby(self.costs.values(), key=lambda each: family_of(each.layout)):
            family = list(group)
            fitting = [each for each in family if each.fits]
            if axes == ALONE:
                rows += family
            elif fitting:
                rows += [fitting[0], min(fitting, key=lambda each: each.step_s)]
            else:
                rows.append(min(family, key=lambda each: each.held_bytes))
        return [each for each in self.costs.values() if each in rows]


ALONE = (False, False, False)  # neither samples nor the model are cut


def family_of(layout: Layout) -> tuple[bool, bool, bool]:
    """Return whether samples are cut, and otherwise which model axes are."""
    return (True, False, False) if layout.context > 1 else (False, *layout.axes)


def plan(job: Job, stages: Sequence[int] = range(4)) -> Plan:
    """Compare every kind with these ZeRO stages; include layouts that cut samples only if none fits."""
    costs, left_out = best_of_kinds(job, stages)
    if not any(each.fits for each in costs.values()):
        costs |= best_of_kinds(job, stages, context=True)[0]
    fitting = [each for each in costs.values() if each.fits]
    fastest = min((each.step_s for each in fitting), default=0.0)
    near = [each for each in fitting if each.step_s <= SLACK * fastest]
    return Plan(costs, left_out, min(near, key=lambda each: each.layout.effort, default=None))


def best_of_kinds(job: Job, stages: Sequence[int], *, context: bool = False) -> tuple[dict[str, Cost], dict[str, str]]:
    """Return per kind the fastest that fits, or else the smallest, and the reasons for missing kinds; with `context` of
    layouts that cut samples."""
    costs, left_out = {}, {}
    for kind, tensor, pipeline, stage in (each for each in KINDS if each[3] in stages):
        name = f"cp x {kind}" if context else kind
        candidates = [(held_bytes(job, each), each) for each in layouts(job, tensor, pipeline, stage, context)]
        if fitting := [layout for nbytes, layout in candidates if nbytes <= job.usable_bytes]:
            costs[name] = min((cost(job, layout) for layout in fitting), key=lambda each: each.step_s)
        elif candidates:  # time does not matter if nothing fits
            costs[name] = cost(job, min(candidates, key=lambda each: each[0])[1])
        else:
            left_out[name] = impossible(job, tensor, pipeline, stage)
    return costs, left_out


def reason(chosen: Plan, job: Job) -> str:
    """Return a sentence that gives the reason for the choice."""
    pick = chosen.pick
    assert pick is not None
    fastest = min(chosen.fitting, key=lambda each: each.step_s)
    gain = 1 - fastest.step_s / pick.step_s
    simpler = {name: each for name, each in chosen.costs.items() if each.layout.effort < pick.layout.effort}
    cut = pick.layout.context > 1
    too_large = [name for name, each in simpler.items() if not each.fits and (each.layout.context > 1) == cut]
    slower = [each for each in chosen.shown if each in simpler.values() and each.fits]
    reasons = [f"it needs {human_bytes(pick.held_bytes)} of {human_bytes(job.usable_bytes)} usable"]
    if cut:
        reasons.append("nothing that keeps samples whole fits")
    if too_large:
        reasons.append(f"{', '.join(too_large)} do{'es' * (len(too_large) == 1)} not fit")
    if slower:
        ratios = [f"{each.layout.name} {each.step_s / pick.step_s:.2f}x" for each in slower]
        reasons.append(f"{', '.join(ratios)} as long")
    if gain >= NOTABLE:
        reasons.append(f"{fastest.layout.name} would be {gain:.0%} faster, but changes the model more")
    elif len(chosen.fitting) > 1 and not slower:
        reasons.append("nothing that fits is faster and as simple")
    return "; ".join(reasons)


def loses(each: Cost, pick: Cost | None, job: Job) -> str:
    """Return why a layout was not chosen: what it needs more of."""
    if not each.fits:
        largest = human_bytes(each.memory[each.largest])
        return f"{human_bytes(each.held_bytes)} are more than {human_bytes(job.usable_bytes)}: {largest} are {each.largest}"
    if pick is None or each is pick:
        return ""
    more = {name: each.parts[name] - pick.parts[name] for name in each.parts}
    worst = max(more, key=lambda name: more[name])
    more_s = three_digits(more[worst])
    ratio = each.step_s / pick.step_s - 1
    if ratio < NOTABLE:
        return f"{-ratio:.0%} faster, but changes the model more" if ratio <= -NOTABLE else "as fast, but less simple"
    why = f"{more_s} s more waiting for {worst} messages" if worst in EXPOSED else f"{more_s} s more {worst}"
    return f"{ratio:.0%} slower: {why}"


# Remedies: less memory per rank, more GPUs, the host's memory, larger GPUs, another training.

BF16 = Weights(2, masters=False, moment_bytes=2)
LEANER: tuple[tuple[str, Callable[[Job], Job]], ...] = (
    ("--precision bf16 --optimizer adamw8bit", lambda job: replace(job, weights=BF16)),
    ("--precision bf16 --optimizer adamw8bit --step-in-backward --loss chunked", lambda job: replace(job, weights=BF16, savings=Savings(step_in_backward=True), loss="chunked")),
    ("--precision bf16 --optimizer paged-adamw8bit --step-in-backward --loss chunked", lambda job: replace(job, weights=BF16, savings=Savings(True, True), loss="chunked")),
    ("--lora 16 --loss chunked", lambda job: replace(job, savings=Savings(lora=16), loss="chunked")),
    ("--lora 16 --base nf4 --loss chunked", lambda job: replace(job, savings=Savings(lora=16, base_itemsize=NF4_BYTES), loss="chunked")),
)  # fmt: skip
NF4_BYTES = (
    0.5 + 0.127 / 8
)  # 4 bits and, with the constants of its blocks quantized too, 0.127 more (Dettmers et al. 2023)


def remedies(job: Job) -> Iterator[str]:
    """Yield changes that would make it fit."""
    changes: list[tuple[str, Callable[[Job], Job]]] = [
        ("--recompute", lambda changed: replace(changed, recompute="full")),
        ("--batch 1", lambda changed: replace(changed, samples=1)),
    ]
    useful, leanest = [change for change in changes if change[1](job) != job], job
    for name, change in useful:
        leanest = change(leanest)
        if (pick := plan(change(job)).pick) is not None:
            yield f"{name}: then {fitted(pick)}"
    all_changes = "".join(f" {name}" for name, _ in useful)
    if plan(leanest).pick is not None:  # this is enough: the other remedies keep the step as it is
        leanest, all_changes = job, ""
    yield from more_gpus(job, leanest, all_changes)
    costs, with_changes = plan(leanest).costs, f", with{all_changes}" if all_changes else ""
    least = min(costs.values(), key=lambda each: each.held_bytes)
    yield from offload(leanest, costs.get("zero3", least), all_changes)
    yield f"GPUs of {human_bytes(least.held_bytes / (1 - job.reserve))}{with_changes}: {least.layout.name} needs least"
    yield from other_trainings(job, leanest, all_changes)


def other_trainings(job: Job, leanest: Job, all_changes: str) -> Iterator[str]:
    """Yield other trainings of these parameters that fit: all weights in 16 bits, or adapters with frozen
    weights. Each with the first of --recompute and --batch 1 that it needs."""
    if job.gpus > job.gpus_per_node:
        return
    for name, change in LEANER:
        for changed, changes_text in ((job, ""), (leanest, all_changes)):
            if (pick := plan(change(changed)).pick) is not None:
                yield f"{name}{changes_text}: a different training; then {fitted(pick)}"
                break


def fitted(pick: Cost) -> str:
    return f"{pick.layout.name} fits, with {human_bytes(pick.held_bytes)} per GPU"


def more_gpus(job: Job, leanest: Job, all_changes: str) -> Iterator[str]:
    """Yield the first doubled number of GPUs that fits, unchanged or with all memory savings."""
    gpus = full_nodes(job, job.gpus * 2)
    while gpus <= MOST_GPUS:
        for changed, changes_text in ((job, ""), (leanest, all_changes)):
            if (pick := plan(changed.on(gpus)).pick) is not None:
                yield f"--gpus {gpus}{changes_text}: then {fitted(pick)}"
                return
        gpus = full_nodes(job, gpus * 2)


def full_nodes(job: Job, gpus: int) -> int:
    """Round up to full nodes if there are several nodes."""
    return gpus if gpus <= job.gpus_per_node else -(-gpus // job.gpus_per_node) * job.gpus_per_node


def offload(job: Job, sharded: Cost, all_changes: str) -> Iterator[str]:
    """Yield offloading the optimizer's state to the host's memory, if the rest fits."""
    remaining = held_bytes(replace(job, savings=replace(job.savings, offload=True)), sharded.layout)
    if remaining <= job.usable_bytes and sharded.memory["optimizer"]:
        host = sharded.memory["optimizer"] * job.node_gpus
        yield (
            f"--offload{all_changes}: then the optimizer's state is in {human_bytes(host)} of each node's host memory and"
            f" {sharded.layout.name} needs {human_bytes(remaining)} per GPU, with slower steps (DeepSpeed ZeRO-Offload, FSDP's"
            " CPU offload)"
        )


# Frameworks for a layout, and the modes of this lab that show how it works.

# Where samples are cut, by whether ZeRO shards more than the optimizer's state.
OF_POSITIONS = (
    "Megatron-LM with its context parallelism and its distributed optimizer",
    "torchtitan, which stacks PyTorch's context_parallel with fully_shard; in DeepSpeed Ulysses",
)

# By whether there are pipelines and cut layers, then by ZeRO's stage.
TOOLS = {
    (False, False): (
        "PyTorch DDP (Horovod's ring all_reduce does the same, and is older)",
        "DeepSpeed ZeRO-1, or PyTorch DDP with ZeroRedundancyOptimizer",
        "DeepSpeed ZeRO-2, or PyTorch FSDP's SHARD_GRAD_OP",
        "PyTorch FSDP (fully_shard), or DeepSpeed ZeRO-3, which is the same idea",
    ),
    (False, True): (
        "Megatron-LM, or PyTorch's parallelize_module with DTensor",
        "Megatron-LM with its distributed optimizer, or DeepSpeed's ZeRO-1",
        "DeepSpeed ZeRO-2 over Megatron's tensor parallelism, as Megatron-DeepSpeed stacks them",
        "PyTorch's parallelize_module and fully_shard over its DTensors, or DeepSpeed ZeRO-3 over Megatron's tensor parallelism",
    ),
    (True, False): (
        "torch.distributed.pipelining, DeepSpeed's PipelineModule or Megatron-LM",
        "DeepSpeed's PipelineModule with ZeRO-1, or Megatron-LM with its distributed optimizer",
        "torch.distributed.pipelining over fully_shard(reshard_after_forward=False); DeepSpeed's pipelines refuse ZeRO-2",
        "torch.distributed.pipelining over fully_shard; DeepSpeed's pipelines refuse ZeRO-3",
    ),
    (True, True): (
        "Megatron-LM",
        "Megatron-LM with its distributed optimizer, or DeepSpeed's ZeRO-1",
        "torch.distributed.pipelining over parallelize_module and fully_shard(reshard_after_forward=False), as torchtitan does",
        "torch.distributed.pipelining over parallelize_module and fully_shard, as torchtitan does",
    ),
}  # fmt: skip


def framework(layout: Layout) -> tuple[str, list[str]]:
    """Return a framework for the layout, and the modes of this lab that show how it works."""
    modes = ["RUN_MODE=tp"] * (layout.tensor > 1) + ["RUN_MODE=pp"] * (layout.pipeline > 1)
    modes += ["RUN_MODE=cp"] * (layout.context > 1)
    modes += [f"RUN_MODE=fsdp LAB_VARIANT=zero{layout.stage}"] * (layout.stage > 0)
    tool = OF_POSITIONS[layout.stage > 1] if layout.context > 1 else TOOLS[layout.axes][layout.stage]
    return tool, [f"{mode} make run" for mode in modes or ["RUN_MODE=dp"]]
