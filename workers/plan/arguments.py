"""The command line of the calculator: what can be said, what is taken if it is not, and every fault at once."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from workers.config import ConfigError
from workers.config.values import suggest
from workers.measure.formulas.activations import RECOMPUTE
from workers.plan import sizes
from workers.plan.calibrate import Measured, calibrate
from workers.plan.job import Job, Link, guessed
from workers.report.lines import BrokenRecord


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
    ("params", sizes.count, None, "parameters of the model, such as 7B, 350M or 1.3B (needed)"),
    ("gpus", sizes.whole, None, "number of GPUs, or of ranks (needed)"),
    ("gpu-memory", sizes.nbytes, None, "memory of one, such as 80GB or 900MB (needed)"),
    ("link", sizes.rate, "400Gbit", "rate of one GPU's link to other nodes, one way"),
    ("latency", sizes.seconds, "10us", "latency of a message between nodes"),
    ("gpus-per-node", sizes.whole, "8", "GPUs that share a node"),
    ("node-link", sizes.rate, "300GB/s", "rate of one GPU's link inside its node, one way: NVLink of an A100"),
    ("node-latency", sizes.seconds, "5us", "latency of a message inside a node"),
    ("flops", sizes.count, "", f"peak of one GPU in FLOP/s [{PEAKS}]"),
    ("utilisation", sizes.share, "40%", "share of the peak that the compute reaches"),
    ("layers", sizes.whole, "", "layers of the model [guessed from --params]"),
    ("width", sizes.whole, "", "width of the model [guessed from --params]"),
    ("heads", sizes.whole, "", "attention heads [guessed from --params]"),
    ("seq", sizes.whole, "2048", "tokens in a sample"),
    ("batch", sizes.whole, "1", "samples in one microbatch of a GPU"),
    ("microbatches", sizes.whole, "", "microbatches of a GPU in a step of dp [4]; the global batch is the same for all"),
    ("global-batch", sizes.whole, "", "samples in a step, over all GPUs [batch x microbatches x gpus]"),
    ("reserve", sizes.share, "10%", "share of the memory left to CUDA, NCCL and fragmentation"),
)  # fmt: skip


def parser() -> Parser:
    """The command line; every option is text here, and read by `job`."""
    made = Parser(
        prog="python -m workers.plan", allow_abbrev=False,
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
        help="finished runs of this lab in place of data sheets: a comm run gives link and latency, a dp or fsdp run FLOP/s",
    )  # fmt: skip
    return made


def read(arguments: Sequence[str] | None) -> tuple[Job, list[str]]:
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
            except sizes.NotASize as error:
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
    flops, flops_from = sizes.count(precision.flops), f"assumed: {precision.flops_from}"
    if "flops" in values:
        flops, flops_from = values["flops"], "given"
    for run in measured:
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
