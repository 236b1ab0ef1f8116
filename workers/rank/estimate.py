"""Whether a run will likely fit into this machine's memory and into an hour, by formula: warnings, and no refusal.

    the proof    in float64: on rank 0 model and gradients of one process and copies of both after each of 3 steps, on
                 every rank a variant's weights, gradients and what it gathers
    training     in LAB_DTYPE, all variants side by side: weights, gradients, moments; beside them one process on rank 0
    activations  of a rank's samples, on rank 0 of the whole batch in float64 (Korthikanti et al. 2022, see
                 measure/formulas/activations.py)
    time         6·P FLOP a token (Kaplan et al. 2020), and what a call costs however small it is

A dp run of 14.4 million parameters on 2 ranks (LAB_WIDTH=384, flat and ddp) held 2.91 GB, where this says 2.88 GB. It
is a factor of 1.5 from other modes and sizes.
"""

import os
from pathlib import Path

from workers.config import Config
from workers.contract import Mode
from workers.measure.cgroup import ContainerMemory
from workers.measure.formulas.activations import layer_activation_bytes
from workers.measure.formulas.seconds import training_flops
from workers.report.units import human_bytes
from workers.workload.model import outline

HOUR_S = 3600.0
VOCABULARY = 256
ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2}
BASE_BYTES = 200e6  # Python, torch and its buffers
PROOF_STEPS = 3
FLOPS_A_CORE = 1e11  # float32, assumed; half of it in float64, a fifth in 16 bits, which most CPUs convert
CALL_S = 15e-6  # of one of a layer's operators, forward, backward and update
CALLS_A_LAYER = 20
MESSAGE_S = 2e-3  # what the ranks of a step wait for each other
MEMINFO = Path("/proc/meminfo")


def warnings(config: Config, mode: Mode) -> list[str]:
    """A sentence if the run will likely not fit into memory, and one if it may take more than an hour."""
    told = []
    for here, there in rooms(config):
        needed = needed_bytes(config, mode, here)
        if needed > there:
            told.append(
                f"{here} rank{'s' * (here > 1)} of these settings may need about {human_bytes(needed)} of memory here,"
                f" and {human_bytes(there)} are free: lower LAB_WIDTH, LAB_DEPTH, LAB_BATCH, LAB_SEQ or the number of"
                " variants"
            )
            break
    seconds = run_seconds(config, mode, ranks_here(config))
    if seconds > HOUR_S:
        hours = f"{seconds / HOUR_S:,.0f}" if seconds >= 10 * HOUR_S else f"{seconds / HOUR_S:.1f}"
        told.append(f"these settings may take about {hours} h here: lower LAB_STEPS, LAB_BATCH or the model's sizes")
    return told


def num_trained(config: Config, mode: Mode) -> int:
    """Trainings beside each other: the variants that are run, or what the mode says."""
    return mode.at_once or sum(
        each.build is not None and (not config.variant or each.name in config.variant) for each in mode.variants
    )


def num_parameters(config: Config, mode: Mode) -> float:
    """P: numbers that are trained."""
    return outline(config).num_parameters() + mode.more_parameters(config)


def needed_bytes(config: Config, mode: Mode, here: int) -> float:
    """Memory of `here` ranks that share it, of which rank 0, which holds most, is one."""
    num_variants = num_trained(config, mode)
    if not num_variants:  # a mode that trains nothing
        return here * BASE_BYTES
    item, parts = ITEMSIZE[config.dtype], config.world_size if mode.shards else 1
    count = num_parameters(config, mode)
    state = 4 if config.optimizer == "adamw" else 2  # weights, gradients, two moments
    trained = num_variants * state * item * count / parts + 4 * count
    proven = (3 / parts + 1) * 8 * count if config.proof else 0.0
    alone = (state * item * count + 8 * 2 * (1 + PROOF_STEPS) * count) if config.proof else 0.0
    samples = -(-config.batch // config.world_size)
    kept = activation_bytes(config, -(-samples // config.num_microbatches), item)
    whole = activation_bytes(config, config.batch, 8) if config.proof else 0.0
    return here * (BASE_BYTES + max(trained, proven)) + alone + (here - 1) * kept + max(kept, whole)


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


def run_seconds(config: Config, mode: Mode, here: int) -> float:
    """Seconds of the timed steps of all variants and of one process, on the cores that `here` ranks find."""
    num_variants = num_trained(config, mode)
    if not num_variants:
        return 0.0
    count = num_parameters(config, mode)
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
