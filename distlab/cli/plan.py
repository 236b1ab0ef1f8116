"""Plan a job: `distlab plan --model llama3-70b --gpus 64 --gpu h100`, or `--params 7B --gpus 64 --gpu-memory 80GB`.

Prints the assumptions, a table of strategies, and the recommended one with its reason; with --layout the memory and
time of a given layout. Plan.shown picks its rows. Exit codes: 0 an answer, also if the answer
is that nothing fits (a calculator has not failed then), 2 refused, a sentence for each fault.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from distlab.cli import prints_refusals, sizes
from distlab.lab.config import ConfigError
from distlab.lab.config.settings import suggest
from distlab.lab.report.reading import BrokenRecord
from distlab.lab.report.table import log_line, on_terminal
from distlab.tools.plan import score
from distlab.tools.plan.advice import NF4_BYTES, plan
from distlab.tools.plan.answer import answer_lines, as_json, layout_lines
from distlab.tools.plan.calibration import Measured, calibrate, measured_card
from distlab.tools.plan.costs import cost
from distlab.tools.plan.gpu import LINK_SHARE, NODE_LINK_SHARE, SOFTWARE, Gpu, gpu_named, gpu_names, loss_of
from distlab.tools.plan.job import Job, Link, Savings, Weights
from distlab.tools.plan.layout import Layout, given_layout, sharing
from distlab.tools.plan.memory import LOGIT_BYTES
from distlab.tools.plan.model import Shape, from_config, guessed, named, table
from distlab.tools.plan.rows import published, read_rows
from distlab.tools.plan.step_time import AGAIN

# The command line of the planner: options, defaults, and all faults at once.


class Precision(NamedTuple):
    """Bytes of a weight or gradient, and whether there are float32 master weights."""

    itemsize: int
    masters: bool


PRECISIONS = {"mixed": Precision(2, True), "bf16": Precision(2, False), "fp32": Precision(4, False)}
# Optimizer numbers per parameter, and the bytes of one: those of the updated weights, or 1.
OPTIMIZERS = {"adam": (2, None), "adamw": (2, None), "adamw8bit": (2, 1), "paged-adamw8bit": (2, 1), "sgd": (0, None)}
PAGED = "paged-adamw8bit"  # bitsandbytes' in paged host memory
DISPATCHERS = ("deepep", "alltoall")
DTYPES = ("bf16", "fp8")
BASES = {"bf16": 2.0, "nf4": NF4_BYTES}
STAGES = ("0", "1", "2", "3")
ASSUMED_GPU = "a100-80gb"
REMOVED_OPTIONS = {
    "--page": " any more: --json has every number of the answer",
    "--fit": " any more: python -m benchmarks.plan_fit writes gpus.json in a checkout",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose own errors are faults like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


# Name, parser or allowed words, default, help. A default is text too, so that it can be printed as it
# would be typed; "" depends on other options, as its help says.
OPTIONS: tuple[tuple[str, Callable[[str], Any] | Sequence[str], str | None, str], ...] = (
    ("params", sizes.count, "", "parameters of the model, such as 7B, 350M or 1.3B (or --model, or --config)"),
    ("gpus", sizes.whole_number, None, "number of GPUs, or of ranks (needed)"),
    ("gpu-memory", sizes.nbytes, "", "memory of one, such as 80GB or 900MB [that of --gpu]"),
    ("link", sizes.rate, "", "rate of one GPU's link to other nodes, one way [that of --gpu; 400Gbit]"),
    ("latency", sizes.seconds, "10us", "latency of a message between nodes"),
    ("gpus-per-node", sizes.whole_number, "", "GPUs that share a node [as --gpu is sold; 8]"),
    ("node-link", sizes.rate, "", "rate of one GPU's link inside its node, one way [that of --gpu]"),
    ("node-latency", sizes.seconds, "5us", "latency of a message inside a node"),
    ("flops", sizes.count, "", "peak of one GPU in FLOP/s, dense, in 16 bits [that of --gpu]"),
    ("utilisation", sizes.share, "", "share of the peak that large products reach [fitted to published runs]"),
    ("layers", sizes.whole_number, "", "layers of the model [guessed from --params]"),
    ("width", sizes.whole_number, "", "width of the model [guessed from --params]"),
    ("heads", sizes.whole_number, "", "attention heads [guessed from --params]"),
    ("vocabulary", sizes.whole_number, "", "size of the vocabulary [GPT-2's 50304, in small models smaller]"),
    ("seq", sizes.whole_number, "2048", "tokens in a sample"),
    ("batch", sizes.whole_number, "1", "samples in one microbatch of a GPU; --microbatch is the same"),
    ("microbatches", sizes.whole_number, "", "microbatches of a GPU in a step of dp [4]; the global batch is the same for all"),
    ("global-batch", sizes.whole_number, "", "samples in a step, over all GPUs [batch x microbatches x gpus]"),
    ("reserve", sizes.share, "10%", "share of the memory reserved for CUDA, NCCL and fragmentation"),
    ("interleave", sizes.whole_number, "1", "stages of each rank of a pipeline"),
    ("lora", sizes.whole_number, "", "rank of LoRA's adapters, which are trained in place of the weights"),
    ("tokens", sizes.count, "", "tokens of the whole training, for days and GPU-hours, such as 1T or 1e12"),
    ("precision", list(PRECISIONS), "mixed", "of weights and gradients; mixed keeps masters in float32, bf16 does not"),
    ("dtype", DTYPES, "bf16", "of layers' products: bf16 or fp8"),
    ("optimizer", list(OPTIMIZERS), "adam", "adam (adamw) stores two numbers per parameter, adamw8bit two bytes, paged-adamw8bit"
     " keeps them in the host's memory, sgd none"),
    ("software", list(SOFTWARE), "", "the framework whose kernels run, where published runs distinguish it [all of this chip]"),
    ("loss", list(LOGIT_BYTES), "", "how scores over the vocabulary are stored: fp32 copies, fused (compiled), chunked"
     " [chunked with --lora or --step-in-backward, fused with --software torchtitan --dtype fp8, else fp32]"),
    ("dispatcher", DISPATCHERS, "deepep", "deepep sends a token to another node once, alltoall once for each expert there"),
    ("recompute", list(AGAIN), "none", "full (also without a value): keep only each layer's input; half: recompute every second"
     " product; selective: keep no attention scores"),
    ("attention", ("flash", "scores"), "flash", "flash keeps no scores of s x s, scores does"),
    ("base", list(BASES), "bf16", "how --lora stores the weights that it does not train"),
    ("zero", STAGES, "", "stage of ZeRO: of --layout [0], or the only one that is compared"),
)  # fmt: skip


def parser() -> Parser:
    """Return the parser; every option is text here, and parsed by `sizes`."""
    parser_ = Parser(
        prog="distlab plan", allow_abbrev=False,
        description="Compute memory, bytes and time of every strategy for a model, by the formulas that the lab's modes are checked "
        "against, and recommend one; with --layout only for one layout. Prints its assumptions. --score compares it with "
        "published runs. Exit codes: 0 an answer, also if nothing fits; 2 refused.",
    )  # fmt: skip
    parser_.add_argument("--model", metavar="NAME", help=f"a published shape: {', '.join(table())}")
    parser_.add_argument(
        "--config", "--from-config", type=Path, metavar="FILE", help="a transformers config.json of any other decoder"
    )
    parser_.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(gpu_names())} [{ASSUMED_GPU}]")
    for name, read, default, words in OPTIONS:
        more: dict[str, Any] = {"nargs": "?", "const": "full"} if name == "recompute" else {}
        parser_.add_argument(
            f"--{name}", *(["--microbatch"] if name == "batch" else []), metavar="SIZE" if callable(read) else "|".join(read),
            help=(words + (f" [{default}]" if default else "")).replace("%", "%%"), **more,
        )  # fmt: skip
    parser_.add_argument(
        "--layout",
        metavar="tp8,pp16,dp64,cp1,ep1,etp1",
        help="memory and time of this layout only; experts are distributed over tp x dp x cp, and each is cut over etp",
    )
    for name, words in SWITCHES:
        parser_.add_argument(f"--{name}", action="store_true", help=words)
    parser_.add_argument(
        "--calibrate", nargs="+", type=Path, default=[], metavar="RUN",
        help="use measurements in place of data sheets: link and latency of a comm run, FLOP/s of a dp or fsdp run, or of this"
        " model's products by the gpu.json of benchmarks.gpu",
    )  # fmt: skip
    parser_.add_argument(
        "--score", nargs="?", type=Path, const=Path(), metavar="ROWS.json",
        help="compare the planner with published runs, its own or those of a file, each source predicted without its own rows:"
        " predicted, published, error, worst first; only --json may be added",
    )  # fmt: skip
    return parser_


SWITCHES = (
    ("no-sequence-parallel", "keep norms and dropouts whole on each tensor-parallel rank"),
    ("overlap-tp", "tensor parallelism's sums overlap with products, as with Megatron-LM's tp_comm_overlap"),
    ("overlap-ep", "tokens travel to experts and back during another microbatch's compute"),
    ("balanced", "the stages with embedding and output layer have fewer layers"),
    ("offload", "the optimizer's state in the host's memory; with ZeRO-3 weights and gradients too"),
    ("no-sync", "ZeRO-3 sums gradients once per step: weights and gradients stay whole from microbatch to microbatch"),
    ("step-in-backward", "the optimizer steps a layer as soon as its gradients are there, which are then dropped"),
    ("see", "also print a command that runs the recommended layout in this lab"),
    ("json", "print everything as JSON"),
)


class Question(NamedTuple):
    """The question: the job, its numbers' sources in words, a given layout, ZeRO stages, and tokens."""

    job: Job
    sources: list[str]
    layout: Layout | None
    stages: Sequence[int]
    tokens: float | None


def read_question(arguments: Sequence[str] | None) -> Question:
    """Return the whole question; raises ConfigError with all faults at once."""
    parser_ = parser()
    options, unknown = parser_.parse_known_args(arguments)
    if options.score:
        raise ConfigError(
            ["--score takes no other option than --json: it compares published runs, not a model of yours"]
        )
    known = [name for action in parser_._actions for name in action.option_strings if name.startswith("--")]
    faults = [
        f"{word} is not an option{REMOVED_OPTIONS.get(word.split('=')[0]) or suggest(word.split('=')[0], known)}"
        for word in unknown
    ]
    values = _values(options, faults)
    model = _model(options, values, faults)
    gpu = _gpu(options, faults, values.get("software", ""))
    measured = _measured(options.calibrate, faults)
    if not faults:
        faults += _contradictions(options, values)
    if faults:
        raise ConfigError(faults)
    assert model is not None
    made_job, sources = _job(options, values, model, gpu, measured)
    if values["dtype"] == "fp8" and not made_job.gpu.fp8_flops:
        raise ConfigError(
            [f"--dtype='fp8' needs a GPU with products in 8 bits, which --gpu={gpu.name!r} does not have: use bf16"]
        )
    layout = None
    if options.layout is not None:
        layout, faults = given_layout(options.layout, made_job, int(values["zero"] or 0))
        if faults:
            raise ConfigError(faults)
    stages = [int(values["zero"])] if values["zero"] and layout is None else range(4)
    return Question(made_job, sources, layout, stages, values.get("tokens"))


def _values(options: argparse.Namespace, faults: list[str]) -> dict[str, Any]:
    """Return the parsed values of OPTIONS, or their defaults."""
    values: dict[str, Any] = {}
    for name, read, default, words in OPTIONS:
        written = getattr(options, name.replace("-", "_"))
        if written is None and default is None:
            faults.append(f"--{name} is missing: {words.removesuffix(' (needed)')}")
        elif not callable(read):
            values[name] = word = written or default
            if word and word not in read:
                faults.append(f"--{name}={word!r} is not known{suggest(word, list(read))}, allowed: {', '.join(read)}")
        elif written is not None or default:
            try:
                values[name] = read(written or default or "")
            except sizes.NotASize as error:
                faults.append(f"--{name}={written!r} {error}")
    return values


def _model(
    options: argparse.Namespace, values: dict[str, Any], faults: list[str]
) -> tuple[Shape, float, list[str]] | None:
    """Return shape, parameters, and their source in words."""
    given = [name for name in ("model", "config", "params") if getattr(options, name) is not None]
    if len(given) != 1:
        named_ = " and ".join(f"--{name}" for name in given)
        faults.append(f"{named_} each set the model: use only one" if given else "--model, --config or --params is missing: the model")  # fmt: skip
        return None
    if given == ["params"]:
        if "params" not in values:
            return None
        sizes = [values.get(name) for name in ("layers", "width", "heads", "vocabulary")]
        return guessed(values["params"], *sizes), values["params"], []
    for name in ("layers", "width", "heads", "vocabulary"):
        if name in values:
            faults.append(f"--{name} is set by --{given[0]} too: leave it out, or use --params")
    try:
        shape, num_parameters, source = (
            named(options.model) if options.model is not None else from_config(options.config)
        )
    except ConfigError as error:
        faults += error.faults
        return None
    return shape, num_parameters, [f"model from {source}"]


def _gpu(options: argparse.Namespace, faults: list[str], software: str = "") -> Gpu:
    try:
        return gpu_named(options.gpu or ASSUMED_GPU, software)
    except ConfigError as error:
        faults += error.faults
        return gpu_named(ASSUMED_GPU)


def _measured(folders: Sequence[Path], faults: list[str]) -> list[Measured]:
    found = []
    for folder in folders:
        try:
            found.append(calibrate(folder))
        except BrokenRecord as error:
            faults.append(f"--calibrate: {error}")
    return found


def _contradictions(options: argparse.Namespace, values: dict[str, Any]) -> Iterator[str]:
    """Yield contradictions between options."""
    gpus, samples, trained = values["gpus"], values["batch"], values.get("global-batch")
    if "gpu-memory" not in values and options.gpu is None:
        yield "--gpu or --gpu-memory is missing: the memory of one GPU, such as 80GB or 900MB"
    if "width" in values and "heads" in values and values["width"] % values["heads"]:
        yield f"--width={values['width']} is not a multiple of --heads={values['heads']}: heads share the width equally"
    in_node = values.get("gpus-per-node") or _gpu(options, []).gpus_per_node
    if gpus > in_node and gpus % in_node:
        yield f"--gpus={gpus} does not fill nodes of --gpus-per-node={in_node}: name a multiple"
    if trained is not None and "microbatches" in values:
        both = f"--global-batch={trained} and --microbatches={values['microbatches']}"
        yield f"{both} both say how much is trained in a step: name one"
    elif trained is not None and trained % samples:
        yield f"--global-batch={trained} is no multiple of --batch={samples}, the samples of a microbatch"
    if values["reserve"] == 1:
        yield "--reserve=100% leaves no memory to the model, allowed: less than 1 (100%)"
    if values["base"] != "bf16" and "lora" not in values:
        yield f"--base={values['base']!r} is how weights are stored beside adapters: --lora RANK is missing"
    if values["dtype"] == "fp8" and values["precision"] == "fp32":
        yield "--dtype='fp8' is of training in mixed precision, and --precision is 'fp32': mixed or bf16"


def _job(
    options: argparse.Namespace, values: dict[str, Any], model: tuple[Shape, float, list[str]], gpu: Gpu,
    measured: list[Measured],
) -> tuple[Job, list[str]]:  # fmt: skip
    shape, num_parameters, sources = model[0], model[1], list(model[2])
    precision = PRECISIONS[values["precision"]]
    numbers, itemsize = OPTIMIZERS[values["optimizer"]]
    moment_bytes = numbers * (itemsize or (4 if precision.masters else precision.itemsize))
    gpu = _card(options, values, gpu, precision)
    far = Link(values["latency"], values.get("link", gpu.link_bytes_per_s), LINK_SHARE)
    near = Link(values["node-latency"], values.get("node-link", gpu.node_link_bytes_per_s), NODE_LINK_SHARE)
    for run in (each.of_shape(shape, values["seq"], values["batch"]) for each in measured):
        sources.append(run.source)
        far, near = (run.link, run.link) if run.link else (far, near)
        gpu = measured_card(gpu, run.flops) if run.flops else gpu
    trained = values["batch"] * values.get("microbatches", 4) * values["gpus"]
    offload = options.offload or values["optimizer"] == PAGED
    chunked = "chunked" if "lora" in values or options.step_in_backward else None
    savings = Savings(offload, options.step_in_backward, values.get("lora", 0), BASES[values["base"]], options.no_sync)
    made = Job(
        num_parameters, values["gpus"], values.get("gpu-memory", gpu.memory_bytes), shape, values["seq"],
        values["batch"], values.get("global-batch", trained), "global-batch" not in values, gpu, far, near,
        values.get("gpus-per-node", gpu.gpus_per_node), Weights(precision.itemsize, precision.masters, moment_bytes),
        values["recompute"], values["attention"] == "flash", not options.no_sequence_parallel, values["reserve"],
        values["dtype"] == "fp8", options.overlap_tp, values["interleave"], savings,
        values["loss"] or chunked or loss_of(values["software"], fp8=values["dtype"] == "fp8"), values["dispatcher"] == "deepep", options.overlap_ep,
        options.balanced,
        hides=not any(run.crowded for run in measured),
    )  # fmt: skip
    return made, sources


def _card(options: argparse.Namespace, values: dict[str, Any], gpu: Gpu, precision: Precision) -> Gpu:
    """Return the named or assumed card with given values; float32 products run as TF32, half as fast."""
    if precision.itemsize == 4:
        gpu = replace(
            gpu, flops=gpu.flops / 2, told=f"{gpu.told}; in TF32 half of its peak, where PyTorch is allowed it"
        )
    if options.gpu is None:
        gpu = replace(gpu, link_bytes_per_s=sizes.rate("400Gbit"), told=f"assumed ({gpu.told}): name yours with --gpu")
    if "flops" in values:
        # Another card's memory is not known: as fast, beside its products, as that of the card that it is likened to.
        rate = gpu.memory_bytes_per_s * values["flops"] / gpu.flops
        gpu = replace(gpu, flops=values["flops"], memory_bytes_per_s=rate, told=f"peak given; else {gpu.told}")
    if "utilisation" in values:
        gpu = replace(gpu, shares=replace(gpu.shares, matrix=values["utilisation"]))
    return gpu


# The chosen layout as a run of this lab: the same axes on at most 8 ranks, with `--see`.
#
# What a layout is made of shows on few ranks: which axes there are, which are neighbours, and what its replicas
# shard. So each axis is halved, the longest first, until the product is small enough, and none that there is gets
# lost. All four are twice as many ranks as that: then it is one replica, whose shards lie along cp.

MOST_RANKS = 8


def shrunk(layout: Layout) -> dict[str, int]:
    """Return the ranks per axis, outermost first, in the order of layouts: replicas, stages, samples, slices."""
    sizes = {"dp": layout.replicas, "pp": layout.pipeline, "cp": layout.context, "tp": layout.tensor}
    if min(sizes.values()) > 1:
        sizes["dp"] = 1
    while math.prod(sizes.values()) > MOST_RANKS:
        longest = max(sizes, key=lambda axis: sizes[axis])
        sizes[longest] = max(2, sizes[longest] // 2)
    return sizes


def command(layout: Layout, job: Job) -> str:
    """Return the command that runs it and compares the planner's formulas with measurements."""
    sizes = shrunk(layout)
    ranks = math.prod(sizes.values())
    mesh = ",".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "dp1"
    plain = "sequence" if job.sequence_parallel and sizes["tp"] > 1 else "1f1b"
    variant = f"zero{layout.stage}" if layout.stage else plain
    again = " LAB_RECOMPUTE=1" if job.recompute == "full" else ""
    return f"RUN_MODE=mesh WORLD_SIZE={ranks} LAB_MESH={mesh} LAB_VARIANT={variant}{again} make run"


@prints_refusals
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {word.split("=")[0] for word in given if word.startswith("--")} <= {"--score", "--json"}:
        scored = parser().parse_args(given)
        if scored.score is not None:
            print("\n".join(_score(scored.score, as_json=scored.json)))
            return 0
    question = read_question(given)
    switches = parser().parse_known_args(given)[0]
    chosen = plan(question.job, question.stages)
    if not chosen.costs:
        raise ConfigError([_no_layout(question)])
    priced = None if question.layout is None else cost(question.job, question.layout)
    if switches.json:
        print(
            json.dumps(
                as_json(question.job, question.sources, chosen, priced, question.tokens), indent=1, allow_nan=False
            )
        )
        return 0
    if priced is not None:
        print("\n".join(on_terminal(layout_lines(question.job, question.sources, priced, chosen, question.tokens))))
    else:
        print("\n".join(on_terminal(answer_lines(question.job, question.sources, chosen, question.tokens))))
    shown = question.layout or (chosen.pick.layout if chosen.pick else None)
    if shown is not None and switches.see:
        print(log_line("together", f"{command(shown, question.job)}"))
    return 0


def _score(path: Path, *, as_json: bool) -> list[str]:
    """Return the score of the planner's own rows, or of a file's."""
    rows, asks = (published(), []) if path == Path() else read_rows(path)
    if as_json:
        return [json.dumps(score.score_json(rows, asks), indent=1, allow_nan=False)]
    return on_terminal(score.score_lines(rows, asks))


def _no_layout(question: Question) -> str:
    made = question.job
    of_stage = f" with {sharing(question.stages[0])}" if len(question.stages) == 1 else ""
    batch = f"--global-batch={made.global_samples} in microbatches of {made.samples}"
    return f"{batch} cannot be split equally over any number of replicas of {made.gpus} GPUs{of_stage}"


if __name__ == "__main__":
    sys.exit(main())
