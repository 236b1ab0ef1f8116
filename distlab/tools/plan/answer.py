"""The planner's answer, as lines for a terminal and as JSON with all its numbers."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from distlab.lab.report.table import aligned
from distlab.lab.report.units import human_bytes, three_digits
from distlab.tools.plan.advice import Plan, framework, loses, reason, remedies
from distlab.tools.plan.costs import EXPOSED, Cost
from distlab.tools.plan.gpu import band
from distlab.tools.plan.job import Job, Link, shown_count
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.memory import ADAPTER_BYTES, adapter_parameters, microbatches
from distlab.tools.plan.model import active
from distlab.tools.plan.step_time import whole_messages

COLUMNS = ["strategy", "holds", "fits", "sends", "waits s", "step s", "MFU"]  # the page and --json have all
MESSAGES = (
    "T = rounds·α + bytes/B, rings, one collective a layer; sums hide under the backward pass, ZeRO-3's gathers but a"
    " pass's first under compute; all else is exposed"
)
SHARED_CORES = (
    "T = rounds·α + bytes/B, rings, one collective a layer; the cores that compute move the bytes too, so nothing hides"
)
DAY_S = 86400.0


def answer_lines(job: Job, told: Sequence[str], chosen: Plan, tokens: float | None = None) -> list[str]:
    """Return the whole answer if the planner chooses the layout."""
    said = [*heading(job, told), "", *aligned(COLUMNS, [strategy_line(job, each) for each in chosen.shown]), ""]
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
    said += [f"take       {chosen.pick.layout.name}: {reason(chosen, job)}"]
    said += [f"why not    {each.layout.name}: {why}" for each in chosen.shown if (why := loses(each, chosen.pick, job))]
    said += [
        f"step       {step_line(chosen.pick)}",
        *band_lines(job, chosen.pick),
        *hidden_lines(job, chosen.pick),
        f"rate       {rate_line(job, chosen.pick)}",
    ]
    said += [f"training   {training_line(job, chosen.pick, tokens)}"] if tokens else []
    return [*said, f"with       {tool}", *(f"see it     {command}" for command in shown)]


def layout_lines(job: Job, told: Sequence[str], given: Cost, chosen: Plan, tokens: float | None = None) -> list[str]:
    """Return the whole answer for a given layout."""
    said = [*heading(job, told), ""]
    held, usable = human_bytes(given.held_bytes), human_bytes(job.usable_bytes)
    classes = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in given.memory.items() if nbytes)
    said += [
        f"layout     {given.layout.name}: {microbatches(job, given.layout)} microbatches of {job.samples} a replica",
        f"memory     {held} of {usable} usable: {classes}; the largest is {given.largest}",
        f"fits       {fit_words(job, given)}",
        f"step       {step_line(given)}",
        *band_lines(job, given),
        *hidden_lines(job, given),
        f"rate       {rate_line(job, given)}",
    ]
    said += [f"training   {training_line(job, given, tokens)}"] if tokens else []
    pick = chosen.pick
    if pick is None:
        return [*said, "would fit  no other layout of these GPUs", *(f"would fit  {each}" for each in remedies(job))]
    if pick.layout == given.layout:
        return [*said, f"beside it  nothing better: {reason(chosen, job)}"]
    others = [each for each in sorted(chosen.fitting, key=lambda each: each.step_s)[:5] if each is not pick]
    return [
        *said,
        *(f"beside it  {each.layout.name}: {beside(each, given)}" for each in [pick, *others]),
    ]


def fit_words(job: Job, each: Cost) -> str:
    """Return whether it fits, or may fit: planned bytes are only as exact as their band."""
    over = each.held_bytes - job.usable_bytes
    plain = f"no, by {human_bytes(over)}" if over > 0 else "yes"
    may = f"may or may not: planned memory is known to x/÷ {band('memory'):.2f} (as planned: {plain})"
    return may if each.fit(job.usable_bytes) == "may" else plain


def band_lines(job: Job, each: Cost) -> list[str]:
    """Return the step's range by published runs of that kind; empty if this machine was measured."""
    if job.gpu.name == "measured":
        return []
    factor = band(kind := job.shape.kind(fp8=job.fp8))
    return [
        f"band       {three_digits(each.step_s / factor)} to {three_digits(each.step_s * factor)} s, x/÷ {factor:.2f}: nine of"
        f" ten published steps of {kind} lie so near, of sources that are in no fit; memory x/÷ {band('memory'):.2f}"
    ]


def beside(each: Cost, given: Cost) -> str:
    """Describe another layout by its memory and time."""
    ratio = each.step_s / given.step_s - 1
    speed = f"{abs(ratio):.0%} {'slower' if ratio > 0 else 'faster'}"
    return f"{human_bytes(each.held_bytes)}, {three_digits(each.step_s)} s a step, {speed}, MFU {each.mfu:.0%}"


def step_line(each: Cost) -> str:
    """Return the line of the step's parts."""
    parts = ", ".join(f"{name} {three_digits(seconds)}" for name, seconds in each.parts.items() if seconds >= 5e-4 * each.step_s)  # fmt: skip
    waits = [name for name in EXPOSED if each.parts[name] >= 5e-4 * each.step_s]
    exposed = f" ({', '.join(waits)} {'are' if len(waits) > 1 else 'is'} messages that nothing hides)" if waits else ""
    return f"{three_digits(each.step_s)} s: {parts}{exposed}"


def hidden_lines(job: Job, each: Cost) -> list[str]:
    """Return how much of each axis' messages overlaps with compute; empty without messages."""
    whole = whole_messages(job, each.layout)
    told = [
        f"{name} {three_digits(seconds)} s, {1 - each.parts[name] / seconds:.0%} of it under compute"
        for name, seconds in whole.items()
        if seconds
    ]
    return [f"hidden     {'; '.join(told)}"] if told else []


def rate_line(job: Job, each: Cost) -> str:
    return (
        f"{shown_count(each.tokens_per_s)} tokens/s, {shown_count(each.tokens_per_s / job.gpus)} a GPU; MFU {each.mfu:.1%}"
        f" of {job.gpu.flops / 1e12:.4g} TFLOP/s"
    )


def training(job: Job, each: Cost, tokens: float) -> dict[str, float]:
    """Return days and GPU-hours to train on this many tokens without a pause."""
    seconds = tokens / each.tokens_per_s
    return {"tokens": tokens, "steps": tokens / job.step_tokens, "days": seconds / DAY_S, "gpu_hours": seconds / 3600 * job.gpus}  # fmt: skip


def training_line(job: Job, each: Cost, tokens: float) -> str:
    found = training(job, each, tokens)
    return (
        f"{shown_count(tokens)} tokens: {shown_count(found['steps'])} steps, {three_digits(found['days'])} days,"
        f" {shown_count(found['gpu_hours'])} GPU-hours, without a pause"
    )


def heading(job: Job, told: Sequence[str]) -> list[str]:
    return [f"{name:<11}{text}" for name, text in assumed(job, told)]


def assumed(job: Job, told: Sequence[str]) -> list[tuple[str, str]]:
    """Return every given, guessed or measured number, by heading."""
    shape = job.shape
    keys = f", {shape.kv_heads} of keys and values" if shape.kv_heads != shape.heads else ""
    experts = (
        f", {shape.experts} experts in {shape.moe_layers} layers of which a token takes {shape.experts_a_token}"
        f" ({shown_count(active(shape, job.num_parameters))} parameters)"
        if shape.experts
        else ""
    )
    model = (
        f"{shown_count(job.num_parameters)} parameters: {shape.layers} layers, width {shape.width}, {shape.heads} heads{keys},"
        f" {shape.vocabulary} tokens to choose from{experts}; {job.seq} tokens a sample"
    )
    machine = (
        f"{job.gpus} GPUs of {human_bytes(job.gpu_memory_bytes)}, {job.reserve:.0%} of it kept free,"
        f" {job.gpus_per_node} in a node; link {link(job.link)}, in a node {link(job.node_link)}"
    )
    step = (
        f"{job.global_samples} samples, {shown_count(job.step_tokens)} tokens: microbatches of {job.samples},"
        f" {job.global_samples / job.samples:g}/d a replica of d"
    )
    headings = [("model", model), ("at rest", rest(job)), ("machine", machine), ("GPU", job.gpu.told)]
    headings += [("source", text) for text in told]
    return [*headings, ("step", step), ("compute", compute(job)), ("messages", MESSAGES if job.hides else SHARED_CORES)]


def rest(job: Job) -> str:
    """Return the bytes per parameter before the first activation."""
    if job.savings.lora:
        trained = adapter_parameters(job)
        return (
            f"{job.savings.base_itemsize:.3g} bytes a parameter, and {ADAPTER_BYTES} of each of"
            f" {shown_count(trained)} trained numbers of LoRA, rank {job.savings.lora}"
        )
    weights = job.weights
    of_each = 2 * weights.itemsize + weights.moment_bytes + (4 if weights.masters else 0)
    said = (
        f"{of_each:g} bytes a parameter, {human_bytes(of_each * job.num_parameters)} in all before the first activation"
    )
    if weights.masters:
        said += f"; {of_each + 4 - weights.itemsize:g} in tp, pp and cp, where Megatron-LM sums gradients in float32"
    if job.savings.offload:
        said += "; the optimizer's state is in the host's memory"
    return said


def compute(job: Job) -> str:
    """Return how operations and activations are counted."""
    kept = {
        "none": "kept", "selective": "kept but for scores", "half": "half recomputed", "full": "recomputed",
    }[job.recompute]  # fmt: skip
    scores = "" if job.flash else ", scores too"
    norms = ", norms cut too in tp (sequence parallel)" if job.sequence_parallel else ""
    shares, peak = job.gpu.shares, f"{job.gpu.flops / 1e12:.4g} TFLOP/s"
    rate = f", memory at {shares.memory:.0%} of {human_bytes(job.gpu.memory_bytes_per_s)}/s" if math.isfinite(job.gpu.memory_bytes_per_s) else ""  # fmt: skip
    fp8 = f", of layers {job.gpu.fp8_flops / 1e12:.4g} in 8 bits" if job.fp8 else ""
    fp8 += f", at {shares.fp8:.0%} of that share" if job.fp8 else ""
    experts = f", experts' at {shares.experts:.0%} of that" if job.shape.experts else ""
    return (
        f"products at {shares.matrix:.0%}{experts} and attention at {shares.attention:.0%} of {peak}{fp8}{rate}; activations"
        f" {kept}{scores}{norms}"
    )


def link(of: Link) -> str:
    """Describe a link: its rate, the ring's share of it, and its latency."""
    got = f" ({of.share:.0%} of it)" if of.share != 1 else ""
    return f"{human_bytes(of.bytes_per_s)}/s{got} and {of.latency_s * 1e6:.3g} us"


def strategy_line(job: Job, each: Cost) -> list[object]:
    """Return the table row of one strategy."""
    return [
        each.layout.name, human_bytes(each.held_bytes), each.fit(job.usable_bytes), human_bytes(each.sent_bytes),
        three_digits(each.exposed_s), three_digits(each.step_s), f"{each.mfu:.0%}",
    ]  # fmt: skip


# As JSON.


def as_json(
    job: Job, told: Sequence[str], chosen: Plan, given: Cost | None = None, tokens: float | None = None
) -> dict[str, Any]:
    """Return the content of the lines, with numbers in bytes and seconds."""
    taken, kind = given or chosen.pick, job.shape.kind(fp8=job.fp8)
    return {
        "assumed": dict(assumed(job, told)),
        "job": job_as_json(job),
        "usable_bytes": job.usable_bytes,
        "band": {"kind": kind, "step": band(kind), "memory": band("memory")} if job.gpu.name != "measured" else None,
        "layout": None if given is None else of_layout(given, given, job),
        "take": None if chosen.pick is None else chosen.pick.layout.name,
        "reason": None if chosen.pick is None else reason(chosen, job),
        "layouts": [of_layout(each, chosen.pick, job) for each in ranked(chosen)],
        "left_out": chosen.left_out,
        "would_fit": list(remedies(job)) if chosen.pick is None else [],
        "training": training(job, taken, tokens) if taken and tokens else None,
    }


def job_as_json(job: Job) -> dict[str, Any]:
    """Return the question; a card measured as a whole has no memory rate, and JSON has no infinity."""
    found = asdict(job)
    if math.isinf(job.gpu.memory_bytes_per_s):
        found["gpu"]["memory_bytes_per_s"] = None
    return found


def ranked(chosen: Plan) -> list[Cost]:
    """Return all compared layouts: those that fit, fastest first, then the others, smallest first."""
    return sorted(
        chosen.costs.values(), key=lambda each: (not each.fits, each.step_s if each.fits else each.held_bytes)
    )


def of_layout(each: Cost, pick: Cost | None, job: Job) -> dict[str, Any]:
    return {
        "name": each.layout.name,
        "axes": axes(each.layout),
        "microbatches": microbatches(job, each.layout),
        "memory_bytes": each.memory,
        "held_bytes": each.held_bytes,
        "largest": each.largest,
        "fits": each.fits,
        "fit": each.fit(job.usable_bytes),
        "sent_bytes": each.sent,
        "parts_s": each.parts,
        "messages_s": whole_messages(job, each.layout),
        "compute_s": each.compute_s,
        "exposed_s": each.exposed_s,
        "bubble": each.bubble,
        "step_s": each.step_s,
        "tokens_per_s": each.tokens_per_s,
        "mfu": each.mfu,
        "loses": loses(each, pick, job),
    }


def axes(layout: Layout) -> dict[str, int]:
    return {
        "tp": layout.tensor, "pp": layout.pipeline, "dp": layout.replicas, "cp": layout.context, "ep": layout.expert,
        "etp": layout.expert_tensor,
        "zero": layout.stage, "chunks": layout.chunks,
    }  # fmt: skip
