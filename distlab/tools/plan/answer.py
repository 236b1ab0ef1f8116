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
from distlab.tools.plan.step_time import messages_without_overlap

COLUMNS = ["strategy", "holds", "fits", "sends", "waits s", "step s", "MFU"]  # the page and --json have all
MESSAGES = (
    "T = rounds·α + bytes/B, rings, one collective per layer; sums overlap with the backward pass, ZeRO-3's gathers with"
    " compute, except the first of a pass; all else is exposed"
)
SHARED_CORES = "T = rounds·α + bytes/B, rings, one collective per layer; the same cores compute and move bytes, so nothing overlaps"
DAY_S = 86400.0


def answer_lines(job: Job, sources: Sequence[str], chosen: Plan, tokens: float | None = None) -> list[str]:
    """Return the whole answer if the planner chooses the layout."""
    lines = [*heading(job, sources), "", *aligned(COLUMNS, [strategy_line(job, each) for each in chosen.shown]), ""]
    reasons = dict.fromkeys(chosen.left_out.values())
    lines += [
        f"left out   {', '.join(name for name in chosen.left_out if chosen.left_out[name] == why)}: {why}"
        for why in reasons
    ]
    if chosen.pick is None:
        least = min(chosen.costs.values(), key=lambda each: each.held_bytes)
        nothing = (
            f"nothing: {least.layout.name} needs least, {human_bytes(least.held_bytes)} of"
            f" {human_bytes(job.usable_bytes)} usable"
        )
        return [*lines, f"take       {nothing}", *(f"would fit  {remedy}" for remedy in remedies(job))]
    tool, shown = framework(chosen.pick.layout)
    lines += [f"take       {chosen.pick.layout.name}: {reason(chosen, job)}"]
    lines += [
        f"why not    {each.layout.name}: {why}" for each in chosen.shown if (why := loses(each, chosen.pick, job))
    ]
    lines += [
        f"step       {step_line(chosen.pick)}",
        *band_lines(job, chosen.pick),
        *hidden_lines(job, chosen.pick),
        f"rate       {rate_line(job, chosen.pick)}",
    ]
    lines += [f"training   {training_line(job, chosen.pick, tokens)}"] if tokens else []
    return [*lines, f"with       {tool}", *(f"see it     {command}" for command in shown)]


def layout_lines(
    job: Job, sources: Sequence[str], cost_of_layout: Cost, chosen: Plan, tokens: float | None = None
) -> list[str]:
    """Return the whole answer for a given layout."""
    lines = [*heading(job, sources), ""]
    stored, usable = human_bytes(cost_of_layout.held_bytes), human_bytes(job.usable_bytes)
    classes = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in cost_of_layout.memory.items() if nbytes)
    lines += [
        f"layout     {cost_of_layout.layout.name}: {microbatches(job, cost_of_layout.layout)} microbatches of {job.samples} per replica",
        f"memory     {stored} of {usable} usable: {classes}; the largest is {cost_of_layout.largest}",
        f"fits       {fit_text(job, cost_of_layout)}",
        f"step       {step_line(cost_of_layout)}",
        *band_lines(job, cost_of_layout),
        *hidden_lines(job, cost_of_layout),
        f"rate       {rate_line(job, cost_of_layout)}",
    ]
    lines += [f"training   {training_line(job, cost_of_layout, tokens)}"] if tokens else []
    pick = chosen.pick
    if pick is None:
        return [*lines, "would fit  no other layout of these GPUs", *(f"would fit  {each}" for each in remedies(job))]
    if pick.layout == cost_of_layout.layout:
        return [*lines, f"beside it  nothing better: {reason(chosen, job)}"]
    others = [each for each in sorted(chosen.fitting, key=lambda each: each.step_s)[:5] if each is not pick]
    return [
        *lines,
        *(f"beside it  {each.layout.name}: {compared_with(each, cost_of_layout)}" for each in [pick, *others]),
    ]


def fit_text(job: Job, each: Cost) -> str:
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
        f" ten published steps of {kind} are within it, each predicted without its own source; memory x/÷ {band('memory'):.2f}"
    ]


def compared_with(each: Cost, cost_of_layout: Cost) -> str:
    """Describe another layout by its memory and time."""
    ratio = each.step_s / cost_of_layout.step_s - 1
    speed = f"{abs(ratio):.0%} {'slower' if ratio > 0 else 'faster'}"
    return f"{human_bytes(each.held_bytes)}, {three_digits(each.step_s)} s per step, {speed}, MFU {each.mfu:.0%}"


def step_line(each: Cost) -> str:
    """Return the line of the step's parts."""
    parts = ", ".join(f"{name} {three_digits(seconds)}" for name, seconds in each.parts.items() if seconds >= 5e-4 * each.step_s)  # fmt: skip
    waits = [name for name in EXPOSED if each.parts[name] >= 5e-4 * each.step_s]
    exposed = (
        f" ({', '.join(waits)} {'are' if len(waits) > 1 else 'is'} messages that compute does not overlap)"
        if waits
        else ""
    )
    return f"{three_digits(each.step_s)} s: {parts}{exposed}"


def hidden_lines(job: Job, each: Cost) -> list[str]:
    """Return how much of each axis' messages overlaps with compute; empty without messages."""
    messages_s = messages_without_overlap(job, each.layout)
    hidden = [
        f"{name} {three_digits(seconds)} s, {1 - each.parts[name] / seconds:.0%} of it overlapped by compute"
        for name, seconds in messages_s.items()
        if seconds
    ]
    return [f"hidden     {'; '.join(hidden)}"] if hidden else []


def rate_line(job: Job, each: Cost) -> str:
    return (
        f"{shown_count(each.tokens_per_s)} tokens/s, {shown_count(each.tokens_per_s / job.gpus)} per GPU; MFU {each.mfu:.1%}"
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


def heading(job: Job, sources: Sequence[str]) -> list[str]:
    return [f"{name:<11}{text}" for name, text in assumed(job, sources)]


def assumed(job: Job, sources: Sequence[str]) -> list[tuple[str, str]]:
    """Return every given, guessed or measured number, by heading."""
    shape = job.shape
    keys = f", {shape.kv_heads} of keys and values" if shape.kv_heads != shape.heads else ""
    experts = (
        f", {shape.experts} experts in {shape.moe_layers} layers, of which a token uses {shape.experts_a_token}"
        f" ({shown_count(active(shape, job.num_parameters))} parameters)"
        if shape.experts
        else ""
    )
    model = (
        f"{shown_count(job.num_parameters)} parameters: {shape.layers} layers, width {shape.width}, {shape.heads} heads{keys},"
        f" a vocabulary of {shape.vocabulary}{experts}; {job.seq} tokens per sample"
    )
    machine = (
        f"{job.gpus} GPUs of {human_bytes(job.gpu_memory_bytes)}, {job.reserve:.0%} of it kept free,"
        f" {job.gpus_per_node} per node; link {link(job.link)}, inside a node {link(job.node_link)}"
    )
    step = (
        f"{job.global_samples} samples, {shown_count(job.step_tokens)} tokens: microbatches of {job.samples},"
        f" {job.global_samples / job.samples:g}/d per replica, for d replicas"
    )
    headings = [("model", model), ("at rest", rest(job)), ("machine", machine), ("GPU", job.gpu.told)]
    headings += [("source", text) for text in sources]
    return [*headings, ("step", step), ("compute", compute(job)), ("messages", MESSAGES if job.hides else SHARED_CORES)]


def rest(job: Job) -> str:
    """Return the bytes per parameter before the first activation."""
    if job.savings.lora:
        trained = adapter_parameters(job)
        return (
            f"{job.savings.base_itemsize:.3g} bytes per parameter, and {ADAPTER_BYTES} for each of"
            f" {shown_count(trained)} trained numbers of LoRA, rank {job.savings.lora}"
        )
    weights = job.weights
    bytes_per_parameter = 2 * weights.itemsize + weights.moment_bytes + (4 if weights.masters else 0)
    text = f"{bytes_per_parameter:g} bytes per parameter, {human_bytes(bytes_per_parameter * job.num_parameters)} in all before the first activation"
    if weights.masters:
        text += f"; {bytes_per_parameter + 4 - weights.itemsize:g} in tp, pp and cp, where Megatron-LM sums gradients in float32"
    if job.savings.offload:
        text += "; the optimizer's state is in the host's memory"
    return text


def compute(job: Job) -> str:
    """Return how operations and activations are counted."""
    activations = {
        "none": "kept", "selective": "kept except scores", "half": "half recomputed", "full": "recomputed",
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
        f" {activations}{scores}{norms}"
    )


def link(each: Link) -> str:
    """Describe a link: its rate, the ring's share of it, and its latency."""
    reached = f" ({each.share:.0%} of it)" if each.share != 1 else ""
    return f"{human_bytes(each.bytes_per_s)}/s{reached} and {each.latency_s * 1e6:.3g} us"


def strategy_line(job: Job, each: Cost) -> list[object]:
    """Return the table row of one strategy."""
    return [
        each.layout.name, human_bytes(each.held_bytes), each.fit(job.usable_bytes), human_bytes(each.sent_bytes),
        three_digits(each.exposed_s), three_digits(each.step_s), f"{each.mfu:.0%}",
    ]  # fmt: skip


# As JSON.


def as_json(
    job: Job, sources: Sequence[str], chosen: Plan, cost_of_layout: Cost | None = None, tokens: float | None = None
) -> dict[str, Any]:
    """Return the content of the lines, with numbers in bytes and seconds."""
    trained, kind = cost_of_layout or chosen.pick, job.shape.kind(fp8=job.fp8)
    return {
        "assumed": dict(assumed(job, sources)),
        "job": job_as_json(job),
        "usable_bytes": job.usable_bytes,
        "band": {"kind": kind, "step": band(kind), "memory": band("memory")} if job.gpu.name != "measured" else None,
        "layout": None if cost_of_layout is None else layout_as_json(cost_of_layout, cost_of_layout, job),
        "take": None if chosen.pick is None else chosen.pick.layout.name,
        "reason": None if chosen.pick is None else reason(chosen, job),
        "layouts": [layout_as_json(each, chosen.pick, job) for each in ranked(chosen)],
        "left_out": chosen.left_out,
        "would_fit": list(remedies(job)) if chosen.pick is None else [],
        "training": training(job, trained, tokens) if trained and tokens else None,
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


def layout_as_json(each: Cost, pick: Cost | None, job: Job) -> dict[str, Any]:
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
        "messages_s": messages_without_overlap(job, each.layout),
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
