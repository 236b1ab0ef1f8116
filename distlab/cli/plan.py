"""Pick and predict: `distlab plan --params 7B --gpus 64 --gpu-memory 80GB [--link 400Gbit]`.

Prints what is assumed, a table of strategies, and the one to take with its reason. Of 16 kinds those are shown that say
something (Plan.shown). Exit codes: 0 an answer, also if the answer is that nothing fits (a calculator has not failed
then), 2 refused, a sentence for each fault.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from distlab.collectives.costs import training_flops
from distlab.config import ConfigError
from distlab.config.settings import suggest
from distlab.plan import job
from distlab.plan.advice import Plan, framework, plan, reason, remedies
from distlab.plan.costs import Cost, Layout
from distlab.plan.job import Job, Link, Measured, calibrate, guessed, shown_count
from distlab.report.reading import BrokenRecord
from distlab.report.table import aligned
from distlab.report.units import human_bytes, three_digits
from distlab.sharded.costs import rest_bytes
from distlab.tensor_parallel.costs import RECOMPUTE

# The command line of the calculator: what can be said, what is taken if it is not, and every fault at once.


class Precision(NamedTuple):
    """Bytes of a weight or gradient, whether there are masters in float32, and the peak that is assumed of a GPU, in
    FLOP/s."""

    itemsize: int
    masters: bool
    flops: str
    flops_from: str


# NVIDIA's data sheet of the A100: bf16 and fp16 312 TFLOP/s, TF32 156, and float32 without tensor cores 19.5, which is
# what PyTorch multiplies in unless it is told that TF32 will do.
PRECISIONS = {
    "mixed": Precision(2, True, "312T", "an A100's in bf16 or fp16"),
    "fp32": Precision(4, False, "156T", "an A100's in TF32, where PyTorch is allowed it"),
}
PEAKS = "; ".join(f"with {name} {each.flops}, {each.flops_from}" for name, each in PRECISIONS.items())
OPTIMIZERS = {"adam": 2, "sgd": 0}  # numbers that are remembered of each parameter


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose own complaints are faults like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


# Name, how it is read, default, help. A default is text too, so that it can be printed as it would be typed; "" is one
# that other options decide, as its help says.
SIZES: tuple[tuple[str, Callable[[str], Any], str | None, str], ...] = (
    ("params", job.count, None, "parameters of the model, such as 7B, 350M or 1.3B (needed)"),
    ("gpus", job.whole_number, None, "number of GPUs, or of ranks (needed)"),
    ("gpu-memory", job.nbytes, None, "memory of one, such as 80GB or 900MB (needed)"),
    ("link", job.rate, "400Gbit", "rate of one GPU's link to other nodes, one way"),
    ("latency", job.seconds, "10us", "latency of a message between nodes"),
    ("gpus-per-node", job.whole_number, "8", "GPUs that share a node"),
    ("node-link", job.rate, "300GB/s", "rate of one GPU's link inside its node, one way: NVLink of an A100"),
    ("node-latency", job.seconds, "5us", "latency of a message inside a node"),
    ("flops", job.count, "", f"peak of one GPU in FLOP/s [{PEAKS}]"),
    ("utilisation", job.share, "40%", "share of the peak that the compute reaches"),
    ("layers", job.whole_number, "", "layers of the model [guessed from --params]"),
    ("width", job.whole_number, "", "width of the model [guessed from --params]"),
    ("heads", job.whole_number, "", "attention heads [guessed from --params]"),
    ("seq", job.whole_number, "2048", "tokens in a sample"),
    ("batch", job.whole_number, "1", "samples in one microbatch of a GPU"),
    ("microbatches", job.whole_number, "", "microbatches of a GPU in a step of dp [4]; the global batch is the same for all"),
    ("global-batch", job.whole_number, "", "samples in a step, over all GPUs [batch x microbatches x gpus]"),
    ("reserve", job.share, "10%", "share of the memory left to CUDA, NCCL and fragmentation"),
)  # fmt: skip


def parser() -> Parser:
    """The command line; every option is text here, and read by `job`."""
    made = Parser(
        prog="distlab plan", allow_abbrev=False,
        description="Memory, bytes and time of every strategy for a model on paper, by the formulas that the lab's modes are "
        "checked against, and which one to take. Prints what it assumed. Exit codes: 0 an answer, also if it is that nothing "
        "fits; 2 refused.",
    )  # fmt: skip
    for name, _, default, words in SIZES:
        shown = f" [{default}]" if default else ""
        made.add_argument(f"--{name}", metavar="SIZE", help=words.replace("%", "%%") + shown.replace("%", "%%"))
    made.add_argument(
        "--precision", metavar="|".join(PRECISIONS), help="of weights and gradients; mixed keeps masters [mixed]"
    )
    made.add_argument("--optimizer", metavar="|".join(OPTIMIZERS), help="adam remembers two numbers a parameter [adam]")
    made.add_argument(
        "--recompute", nargs="?", const="full", metavar="|".join(RECOMPUTE),
        help="full (or nothing said): keep a layer's input alone; selective: no attention scores, as flash attention [none]",
    )  # fmt: skip
    made.add_argument(
        "--no-sequence-parallel", action="store_true", help="keep norms and dropouts whole on each tensor-parallel rank"
    )
    made.add_argument(
        "--see", action="store_true", help="end with a run of this lab that shows the layout that is taken"
    )
    made.add_argument(
        "--calibrate", nargs="+", type=Path, default=[], metavar="RUN",
        help="what was measured, in place of data sheets: a comm run gives link and latency, a dp or fsdp run FLOP/s; so does"
        " the gpu.json of benchmarks.gpu, for this model's own products",
    )  # fmt: skip
    return made


def read_job(arguments: Sequence[str] | None) -> tuple[Job, list[str]]:
    """The job, and in words where its guessed and measured numbers are from; raises ConfigError with all faults at
    once."""
    made = parser()
    asked, unknown = made.parse_known_args(arguments)
    known = [name for action in made._actions for name in action.option_strings if name.startswith("--")]
    faults = [f"{word} is not an option{suggest(word.split('=')[0], known)}" for word in unknown]
    values, words = _sizes(asked, faults), {}
    for name, allowed, default in (
        ("precision", PRECISIONS, "mixed"),
        ("optimizer", OPTIMIZERS, "adam"),
        ("recompute", RECOMPUTE, "none"),
    ):
        words[name] = getattr(asked, name) or default
        if words[name] not in allowed:
            faults.append(
                f"--{name}={words[name]!r} is not known{suggest(words[name], list(allowed))}, allowed:"
                f" {', '.join(allowed)}"
            )
    measured = _measured(asked.calibrate, faults)
    if not faults:
        faults += _contradictions(values)
    if faults:
        raise ConfigError(faults)
    return _job(values, words, sequence_parallel=not asked.no_sequence_parallel, measured=measured)


def asks_to_see(arguments: Sequence[str] | None) -> bool:
    """Whether the answer ends with a run that shows what is taken."""
    seen: bool = parser().parse_known_args(arguments)[0].see
    return seen


def _sizes(asked: argparse.Namespace, faults: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, read_size, default, words in SIZES:
        written = getattr(asked, name.replace("-", "_"))
        if written is None and default is None:
            faults.append(f"--{name} is missing: {words.removesuffix(' (needed)')}")
        elif written is not None or default:
            try:
                values[name] = read_size(written or default or "")
            except job.NotASize as error:
                faults.append(f"--{name}={written!r} {error}")
    return values


def _measured(folders: Sequence[Path], faults: list[str]) -> list[Measured]:
    found = []
    for folder in folders:
        try:
            found.append(calibrate(folder))
        except BrokenRecord as error:
            faults.append(f"--calibrate: {error}")
    return found


def _contradictions(values: dict[str, Any]) -> list[str]:
    """What does not go together."""
    faults = []
    if "width" in values and "heads" in values and values["width"] % values["heads"]:
        faults.append(
            f"--width={values['width']} is not a multiple of --heads={values['heads']}: heads share the width equally"
        )
    if values["gpus"] > values["gpus-per-node"] and values["gpus"] % values["gpus-per-node"]:
        faults.append(
            f"--gpus={values['gpus']} does not fill nodes of --gpus-per-node={values['gpus-per-node']}: name a multiple"
        )
    if "global-batch" in values and "microbatches" in values:
        faults.append(
            f"--global-batch={values['global-batch']} and --microbatches={values['microbatches']} both say how much is"
            " trained in a step: name one"
        )
    elif values.get("global-batch", values["batch"]) % values["batch"]:
        faults.append(
            f"--global-batch={values['global-batch']} is no multiple of --batch={values['batch']}, the samples of a"
            " microbatch"
        )
    if values["reserve"] == 1:
        faults.append("--reserve=100% leaves no memory to the model, allowed: less than 1 (100%)")
    return faults


def _job(
    values: dict[str, Any], words: dict[str, str], *, sequence_parallel: bool, measured: list[Measured]
) -> tuple[Job, list[str]]:
    shape = guessed(values["params"], values.get("layers"), values.get("width"), values.get("heads"))
    far, near = Link(values["latency"], values["link"]), Link(values["node-latency"], values["node-link"])
    precision, utilisation, told = PRECISIONS[words["precision"]], values["utilisation"], []
    flops, flops_from = job.count(precision.flops), f"assumed: {precision.flops_from}"
    if "flops" in values:
        flops, flops_from = values["flops"], "given"
    for run in (each.of_shape(shape, values["seq"], values["batch"]) for each in measured):
        told.append(run.told)
        far, near = (run.link, run.link) if run.link else (far, near)
        flops, flops_from, utilisation = (run.flops, "measured", 1.0) if run.flops else (flops, flops_from, utilisation)
    trained = values["batch"] * values.get("microbatches", 4) * values["gpus"]
    made = Job(
        values["params"], values["gpus"], values["gpu-memory"], shape, values["seq"], values["batch"],
        values.get("global-batch", trained), "global-batch" not in values, far, near, values["gpus-per-node"], flops, flops_from, utilisation, precision.itemsize, precision.masters,
        OPTIMIZERS[words["optimizer"]], words["recompute"], sequence_parallel, values["reserve"],
    )  # fmt: skip
    return made, told


# The layout that was taken, as a run of this lab: the same axes on at most 8 ranks, with `--see`.
#
# What a layout is made of shows on few ranks: which axes there are, which are neighbours, and what its replicas
# shard. So each axis is halved, the longest first, until the product is small enough, and none that there is gets
# lost. All four are twice as many ranks as that: then it is one replica, whose shards lie along cp.

MOST_RANKS = 8


def shrunk(layout: Layout) -> dict[str, int]:
    """Ranks along each axis, the outermost first, as layouts are laid out: replicas, stages, samples, slices."""
    sizes = {"dp": layout.replicas, "pp": layout.pipeline, "cp": layout.context, "tp": layout.tensor}
    if min(sizes.values()) > 1:
        sizes["dp"] = 1
    while math.prod(sizes.values()) > MOST_RANKS:
        longest = max(sizes, key=lambda axis: sizes[axis])
        sizes[longest] = max(2, sizes[longest] // 2)
    return sizes


def command(layout: Layout, job: Job) -> str:
    """What runs it, with the formulas of the planner held against what is measured."""
    sizes = shrunk(layout)
    ranks = math.prod(sizes.values())
    mesh = ",".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "dp1"
    plain = "sequence" if job.sequence_parallel and sizes["tp"] > 1 else "1f1b"
    variant = f"zero{layout.stage}" if layout.stage else plain
    again = " LAB_RECOMPUTE=1" if job.recompute == "full" else ""
    return f"RUN_MODE=mesh WORLD_SIZE={ranks} LAB_MESH={mesh} LAB_VARIANT={variant}{again} make run"


COLUMNS = [
    "strategy", "weights", "gradients", "optimizer", "gathered", "activations", "total", "fits", "sends a step", "bubble",
    "compute s", "exposed s", "step s",
]  # fmt: skip


def answer_lines(job: Job, told: Sequence[str], chosen: Plan) -> list[str]:
    """The whole answer."""
    said = [f"{heading:<11}{text}" for heading, text in assumed(job, told)]
    said += ["", *aligned(COLUMNS, [strategy_line(each) for each in chosen.shown]), ""]
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


def strategy_line(each: Cost) -> list[object]:
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
        job, told = read_job(arguments)
    except ConfigError as error:
        print("\n".join(f"refused    {fault}" for fault in error.faults))
        return 2
    chosen = plan(job)
    if not chosen.costs:
        batch = f"--global-batch={job.global_samples} in microbatches of {job.samples}"
        print(f"refused    {batch} cannot be dealt equally to any number of replicas that {job.gpus} GPUs make")
        return 2
    print("\n".join(answer_lines(job, told, chosen)))
    if chosen.pick is not None and asks_to_see(arguments):
        print(f"together   {command(chosen.pick.layout, job)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
