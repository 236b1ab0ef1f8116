"""Whether a run fits into this machine's memory and into an hour, from its settings alone, before ranks join.

    P            12·h² + 13·h a layer of gpt (four matrices of h x h, two of h x 4h, biases, norms), 8·h² + 7·h of mlp,
                 and (2·256 + S + 2)·h around them
    the proof    in float64: on rank 0 model and gradients of one process and copies of both after each of 3 steps, on
                 every rank a variant's weights, gradients and what it gathers
    training     in LAB_DTYPE, all variants side by side: weights, gradients, moments; beside them one process on rank 0
    activations  of a rank's samples, on rank 0 of the whole batch in float64 (Korthikanti et al. 2022, see
                 measure/formulas/activations.py)
    time         6·P FLOP a token (Kaplan et al. 2020), and what a call costs however small it is

A dp run of 14.4 million parameters on 2 ranks (LAB_WIDTH=384, flat and ddp) held 2.91 GB, where this says 2.88 GB. It
is a factor of 1.5 from other modes and sizes, so a run is refused where it needs more than 1.5 times what is there.
Beyond an hour a run is told how long it may take, and goes on. No list of anything is made here: it answers in a
millisecond for any number of layers, before anything is that has to make them.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from workers.config import Config
from workers.contract import Mode
from workers.measure.cgroup import ContainerMemory
from workers.measure.formulas.activations import layer_activation_bytes
from workers.measure.formulas.seconds import training_flops
from workers.report.units import human_bytes
from workers.workload.model import outline, refusals
from workers.workload.own import is_own

UNSURE = 1.5
HOUR_S = 3600.0
VOCABULARY = 256
ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2}
BASE_BYTES = 200e6  # Python, torch and its buffers
LAYER_BYTES = 30e3  # of a copy of a layer, however narrow: modules, tensors, their hooks
STEP_BYTES = 1e3  # of a variant's step: its seconds, losses, spans
SAMPLE_BYTES = 64  # of a sample's number, in lists and tensors
POINT_BYTES = 128  # of a drawn number of mlp and line: a pair in a list, and as a tensor
MLP_BATCHES = 8  # that an epoch of mlp draws at once
PROOF_STEPS = 3
FLOPS_A_CORE = 1e11  # float32, assumed; half of it in float64, a fifth in 16 bits, which most CPUs convert
CALL_S = 15e-6  # of one of a layer's operators, forward, backward and update
CALLS_A_LAYER = 20
MESSAGE_S = 2e-3  # what the ranks of a step wait for each other
MEMINFO = Path("/proc/meminfo")


# What is lowered by whom: for a sentence, by what holds most.
LOWER = {
    "the ranks themselves": "WORLD_SIZE",
    "the model": "LAB_WIDTH, LAB_DEPTH or the number of variants",
    "activations": "LAB_BATCH, LAB_SEQ, LAB_WIDTH or LAB_DEPTH",
    "samples": "LAB_BATCH or LAB_SEQ",
    "steps": "LAB_STEPS",
}


@dataclass(frozen=True)
class Estimate:
    """Bytes of all ranks that share this machine's memory, by what holds them, and seconds of the run."""

    held: dict[str, float]
    seconds: float

    @property
    def nbytes(self) -> float:
        """All classes."""
        return sum(self.held.values())


def too_large(config: Config, mode: Mode) -> list[str]:
    """A sentence if the run needs more memory than is there, by more than this estimate is unsure of."""
    for here, there in rooms(config):
        needed = estimate(config, mode, here)
        if needed.nbytes > UNSURE * there:
            most = max(needed.held, key=lambda name: needed.held[name])
            ranks = "1 rank" if here == 1 else f"{here} ranks"
            return [
                f"{ranks} of these settings need about {human_bytes(needed.nbytes)} of memory here, {most} of it"
                f" {human_bytes(needed.held[most])}, and {human_bytes(there)} are free: lower {LOWER[most]}"
            ]
    return []


def too_long(config: Config, mode: Mode) -> list[str]:
    """A line if the run may take more than an hour."""
    seconds = estimate(config, mode, ranks_here(config)).seconds
    if seconds <= HOUR_S:
        return []
    hours = f"{seconds / HOUR_S:,.0f}" if seconds >= 10 * HOUR_S else f"{seconds / HOUR_S:.1f}"
    return [f"these settings may take about {hours} h here: lower LAB_STEPS, LAB_BATCH or the model's sizes"]


def num_parameters(config: Config) -> float:
    """P: numbers that are trained; of line two."""
    h, layers = float(config.width), float(config.depth)
    if config.model == "line":
        return 2.0
    if is_own(config.model):  # one that cannot be made is refused by its mode
        return 0.0 if refusals(config) else float(outline(config).num_parameters())
    if config.model == "mlp":
        return layers * (8 * h * h + 7 * h)
    around = (VOCABULARY * (1 if config.tie else 2) + config.seq + 2) * h
    return layers * (12 * h * h + 13 * h) + around


def estimate(config: Config, mode: Mode, here: int) -> Estimate:
    """What a run takes, of which `here` ranks share the memory: rank 0, which holds most, is counted as one of them."""
    num_variants = mode.at_once or sum(
        each.build is not None and (not config.variant or each.name in config.variant) for each in mode.variants
    )
    if not num_variants:  # a mode that trains nothing
        return Estimate({"the ranks themselves": here * BASE_BYTES}, 0.0)
    item, parts = ITEMSIZE[config.dtype], config.world_size if mode.shards else 1
    count = num_parameters(config) + mode.more_parameters(config)
    copies = num_variants + 1  # and one process beside them
    state = 4 if config.optimizer == "adamw" else 2  # weights, gradients, two moments
    trained = num_variants * state * item * count / parts + 4 * count
    proven = (3 / parts + 1) * 8 * count if config.proof else 0.0
    alone = (state * item * count + 8 * 2 * (1 + PROOF_STEPS) * count) if config.proof else 0.0
    samples = -(-config.batch // config.world_size)
    kept = activation_bytes(config, -(-samples // config.num_microbatches), item)
    whole = activation_bytes(config, config.batch, 8) if config.proof else 0.0
    modules = LAYER_BYTES * (1 if config.model == "line" else config.depth) * copies
    held = {
        "the ranks themselves": here * BASE_BYTES,
        "the model": here * (max(trained, proven) + modules / parts) + alone,
        "activations": (here - 1) * kept + max(kept, whole),
        "samples": here * sample_bytes(config) * (config.steps if mode.at_once else 1),
        "steps": here * STEP_BYTES * config.steps * num_variants,
    }
    return Estimate(held, seconds(config, num_variants, count, here))


def activation_bytes(config: Config, samples: int, itemsize: int) -> float:
    """What the forward pass of so many samples leaves, with gpt's scores for each byte."""
    if config.model == "line":
        return 0.0
    positions = config.seq if config.model == "gpt" else 1
    layer = layer_activation_bytes(
        positions, samples, config.width, config.heads, itemsize=itemsize,
        recompute="full" if config.recompute else "selective",
    )  # fmt: skip
    scores = 3 * VOCABULARY * itemsize * positions * samples if config.model == "gpt" else 0.0
    return layer * config.depth + scores


def sample_bytes(config: Config) -> float:
    """Of a global batch: its numbers and, where they are drawn, its points."""
    if config.model == "gpt":
        return config.batch * (SAMPLE_BYTES + 16.0 * config.seq / config.world_size)
    numbers, batches = (1, 1) if config.model == "line" else (config.width, MLP_BATCHES)
    return float(config.batch) * batches * (SAMPLE_BYTES + POINT_BYTES * numbers)


def seconds(config: Config, num_variants: int, count: float, here: int) -> float:
    """Of the timed steps of all variants and of one process, on the cores that `here` ranks find."""
    cores = min(here, os.cpu_count() or 1)
    tokens = float(config.batch) * (config.seq if config.model == "gpt" else 1)
    flops = training_flops(count, tokens, "full" if config.recompute else "none")
    rate = FLOPS_A_CORE * {"float32": 1.0, "float64": 0.5, "bfloat16": 0.2}[config.dtype]
    share = here / config.world_size  # of the work, that is done here
    calls = CALL_S * CALLS_A_LAYER * (1 if config.model == "line" else config.depth) * config.num_microbatches
    step_s = share * flops / (rate * cores) + calls * here / cores + MESSAGE_S
    alone_s = (flops / rate + calls) if config.proof else 0.0
    return config.steps * (num_variants * step_s + alone_s)


def rooms(config: Config) -> list[tuple[int, float]]:
    """Ranks that share a memory, and its bytes: the limit of this container, and what is free of the machine, which
    ranks in other containers fill too (RANKS_ON_HOST, from the Compose file)."""
    here, limit, free = ranks_here(config), ContainerMemory().limit_bytes, free_bytes()
    beside = os.environ.get("RANKS_ON_HOST", "")
    on_host = min(int(beside), config.world_size) if beside.isdecimal() else 0
    return [(ranks, there) for ranks, there in ((here, limit), (max(here, on_host), free)) if there is not None]


def free_bytes() -> float | None:
    """Memory of this machine that is free or can be made so; None where nobody says."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def ranks_here(config: Config) -> int:
    """Ranks that share this machine or container: all where the launcher starts them, as many as torchrun's agent
    has, or this one."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if config.rank is None or (config.master_addr or "").startswith(("127.", "localhost", "::1")):
        return config.world_size
    return min(int(local), config.world_size) if local.isdecimal() and int(local) else 1
