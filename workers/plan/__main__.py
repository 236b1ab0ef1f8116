"""Pick and predict: `python -m workers.plan --params 7B --gpus 64 --gpu-memory 80GB [--link 400Gbit]`.

Prints what is assumed, a table of strategies, and the one to take with its reason. Of 16 kinds those are shown that say
something (Plan.shown). Exit codes: 0 an answer, also if the answer is that nothing fits (a calculator has not failed
then), 2 refused, a sentence for each fault.
"""

import sys
from collections.abc import Sequence

from workers.config import ConfigError
from workers.measure.formulas.seconds import training_flops
from workers.measure.formulas.sharding import rest_bytes
from workers.plan.advice import Plan, plan, reason, remedies
from workers.plan.arguments import asks_to_see, read
from workers.plan.costs import Cost
from workers.plan.job import Job, Link
from workers.plan.shown import command
from workers.plan.sizes import shown_count
from workers.plan.tools import framework
from workers.report.text import aligned
from workers.report.units import human_bytes, three_digits

COLUMNS = [
    "strategy", "weights", "gradients", "optimizer", "gathered", "activations", "total", "fits", "sends a step", "bubble",
    "compute s", "exposed s", "step s",
]  # fmt: skip


def lines(job: Job, told: Sequence[str], chosen: Plan) -> list[str]:
    """The whole answer."""
    said = [f"{heading:<11}{text}" for heading, text in assumed(job, told)]
    said += ["", *aligned(COLUMNS, [row(each) for each in chosen.shown]), ""]
    reasons = dict.fromkeys(chosen.left_out.values())
    said += [
        f"left out   {', '.join(name for name in chosen.left_out if chosen.left_out[name] == why)}: {why}"
        for why in reasons
    ]
    if chosen.pick is None:
        least = min(chosen.costs.values(), key=lambda each: each.held_bytes)
        nothing = (
            f"nothing: {least.layout.name} holds least, {human_bytes(least.held_bytes)} of"
            f" {human_bytes(job.usable_bytes)} usable"
        )
        return [*said, f"take       {nothing}", *(f"would fit  {remedy}" for remedy in remedies(job))]
    tool, shown = framework(chosen.pick.layout)
    said += [f"take       {chosen.pick.layout.name}: {reason(chosen, job)}", f"with       {tool}"]
    return [*said, *(f"see it     {command}" for command in shown)]


def assumed(job: Job, told: Sequence[str]) -> list[tuple[str, str]]:
    """Every number that was given, guessed or measured, by heading."""
    shape, tokens = job.shape, job.global_samples * job.seq
    held = sum(rest_bytes(0, 1, 1, itemsize=job.itemsize, moments=job.moments, masters=job.masters).values())
    model = (
        f"{shown_count(job.num_parameters)} parameters: {shape.layers} layers, width {shape.width}, {shape.heads}"
        f" heads, {job.seq} tokens a sample (12·L·h² = {shown_count(shape.num_parameters)})"
    )
    rest = f"{held:g} bytes a parameter, {human_bytes(held * job.num_parameters)} in all before the first activation"
    if job.masters:
        rest += f"; {held + 4 - job.itemsize:g} in tp, where Megatron-LM sums gradients in float32"
    machine = (
        f"{job.gpus} GPUs of {human_bytes(job.gpu_memory_bytes)}, {job.reserve:.0%} of it kept free,"
        f" {job.gpus_per_node} in a node; link {link(job.link)}, in a node {link(job.node_link)}"
    )
    step = (
        f"{job.global_samples} samples, {shown_count(tokens)} tokens: microbatches of {job.samples},"
        f" {job.global_samples / job.samples:g}/d a replica of d"
    )
    headings = [("model", model), ("at rest", rest), ("machine", machine), *(("measured", text) for text in told)]
    return [*headings, ("step", step), ("compute", compute(job)), ("messages", MESSAGES)]


MESSAGES = (
    "T = rounds·α + bytes/B, rings, one collective a layer; sums hide under the backward pass, ZeRO-3's gathers but a"
    " pass's first under compute; all else is exposed"
)


def compute(job: Job) -> str:
    """How operations and activations are counted."""
    kept = "kept" if job.recompute == "none" else f"recomputed: {job.recompute}"
    norms = ", norms cut too in tp (sequence parallel)" if job.sequence_parallel else ""
    flops, peak = training_flops(1, 1, job.recompute), f"{job.flops / 1e12:.3g} TFLOP/s ({job.flops_from})"
    return f"{flops:g}·P FLOP a token at {job.utilisation:.0%} of {peak}; activations {kept}{norms}"


def link(of: Link) -> str:
    """A rate and a latency."""
    return f"{human_bytes(of.bytes_per_s)}/s and {of.latency_s * 1e6:.3g} us"


def row(each: Cost) -> list[object]:
    """One strategy's line."""
    memory = [human_bytes(each.memory[name]) if each.memory[name] else "-" for name in each.memory]
    return [
        each.layout.name, *memory, human_bytes(each.held_bytes), "yes" if each.fits else "no", human_bytes(each.sent_bytes),
        f"{each.bubble:.0%}" if each.bubble else "-", three_digits(each.compute_s), three_digits(each.exposed_s),
        three_digits(each.step_s),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer; returns the exit code."""
    try:
        job, told = read(arguments)
    except ConfigError as error:
        print("\n".join(f"refused    {fault}" for fault in error.faults))
        return 2
    chosen = plan(job)
    if not chosen.costs:
        batch = f"--global-batch={job.global_samples} in microbatches of {job.samples}"
        print(f"refused    {batch} cannot be dealt equally to any number of replicas that {job.gpus} GPUs make")
        return 2
    print("\n".join(lines(job, told, chosen)))
    if chosen.pick is not None and asks_to_see(arguments):
        print(f"together   {command(chosen.pick.layout, job)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
