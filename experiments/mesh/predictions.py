"""Predictions of a mesh, per rank: messages (traffic.py), stored bytes and the bubble."""

from collections.abc import Mapping

from distlab.contract import ruled_out, untrainable
from distlab.lab.config import Config
from distlab.lab.measure.prediction import Prediction, of_a_step
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.model import VOCABULARY
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.costs import total_cost
from distlab.techniques.pipeline_parallel.costs import bubble
from distlab.techniques.sharded.costs import FULLY_SHARD_CRASHES, rest_bytes

from .placement import HOW, Rank, misfit, sizes_of
from .traffic import by_axis, owned, zero_stage

# What a mesh cannot run: settings that are no grid, and sizes that an axis does not support.

NO_POSITIONS = "PyTorch's context_parallel cannot run on a CPU (RUN_MODE=cp shows why): set cp1 in LAB_MESH"


def refuse(config: Config, mesh: str) -> list[str]:
    """Return errors for an invalid grid, a model that cannot be cut or is too small, and invalid batches."""
    if config.model not in ("gpt", "mlp"):
        hint = "; pp cuts it between layers, dp and fsdp do not cut it, and `distlab prove` checks your own cut"
        where = hint if is_own(config.model) else ""
        return [f"LAB_MODEL={config.model!r} cannot be cut along three axes, allowed: gpt, mlp{where}"]
    wrong = misfit(mesh, config.world_size)
    if wrong:
        return wrong
    sizes = sizes_of(mesh, config.world_size)
    if config.gloo_on_gpus and sizes["cp"] > 1:
        why = "LAB_BACKEND=gloo cannot send keys from a GPU"
        return [f"{why}: set cp1 in LAB_MESH, or LAB_BACKEND=nccl, or leave LAB_DEVICE=cpu"]
    if config.model != "gpt" and sizes["cp"] > 1:
        return [f"LAB_MODEL={config.model} has no positions to split over cp {sizes['cp']}: set LAB_MODEL=gpt"]
    return too_small(config, sizes) + untrainable(config, sizes["dp"])


def too_small(config: Config, sizes: dict[str, int]) -> list[str]:
    """Return errors if there are fewer heads, units or layers than ranks along an axis."""
    sliced = {f"LAB_HEADS={config.heads}": config.heads, f"the vocabulary of {VOCABULARY}": VOCABULARY}
    counts = (sliced if config.model == "gpt" else {}) | {f"4 x LAB_WIDTH={config.width}": 4 * config.width}
    found = [
        f"{name} cannot be sliced over tp {sizes['tp']}: every rank needs a part, allowed: up to tp{count}"
        for name, count in counts.items()
        if count < sizes["tp"]
    ]
    if config.seq < sizes["cp"]:
        found.append(f"LAB_SEQ={config.seq} positions are fewer than cp {sizes['cp']} ranks: every rank needs one")
    if config.depth < sizes["pp"]:
        found.append(f"LAB_DEPTH={config.depth} layers are fewer than pp {sizes['pp']} stages: every stage needs one")
    return found


def cannot(config: Config, sizes: dict[str, int]) -> dict[str, str]:
    """Return the variants that cannot run these sizes, with the reason; PyTorch's own have several."""
    rows = "its rows are positions of a text, which mlp does not have: set LAB_MODEL=gpt"
    needs_cp = "without cp every rank has all positions: give LAB_MESH a cp of 2 or more"
    pytorchs = {
        "dtensor_fsdp2": slices_over_shards(config, sizes),
        "pipelining_fsdp2": stages_over_shards(config, sizes),
    }
    return ruled_out(
        (("sequence",), config.model != "gpt", rows),
        (("sequence",), sizes["tp"] == 1, "it splits rows over tp: give LAB_MESH a tp of 2 or more"),
        (("ulysses",), sizes["cp"] == 1, needs_cp),
        (("plain",), sizes["cp"] > 1, "the lesson does not split positions: set cp1 in LAB_MESH"),
        (("plain",), getattr(config.options, "dropout", 0), "the lesson drops nothing: leave LAB_DROPOUT unset"),
        (("plain",), config.dtype == "bfloat16", "LAB_DTYPE=bfloat16: the lesson has no float32 master weights"),
        (("plain",), config.gloo_on_gpus, "gloo cannot send GPU tensors"),
        (("plain",), config.backend == "nccl" and sizes["pp"] > 1, "NCCL's sends wait for their receives"),
        *(((name,), applies, why) for name, reasons in pytorchs.items() for applies, why in reasons),
        (pytorchs, config.gloo_on_gpus, FULLY_SHARD_CRASHES),
    )


def slices_over_shards(config: Config, sizes: dict[str, int]) -> list[tuple[bool, str]]:
    """Return the reasons that prevent fully_shard on DTensors."""
    t = sizes["tp"]
    parts = {f"LAB_HEADS={config.heads}": config.heads, f"4 x LAB_WIDTH={config.width}": 4 * config.width}
    uneven = [name for name, count in parts.items() if count % t] or [""]
    alone = "DDP over DTensors fails (a gradient has no shape), so fully_shard keeps the replicas"
    return [
        (sizes["pp"] > 1, "its plan has no stages: set pp1 in LAB_MESH"),
        (sizes["cp"] > 1, NO_POSITIONS),
        (1 in (t, sizes["dp"]), f"it combines two axes, and {alone}: give LAB_MESH a dp and a tp of 2 or more"),
        (config.model != "gpt", "its loss over split scores needs a text: set LAB_MODEL=gpt"),
        (bool(uneven[0]), f"{uneven[0]} is not a multiple of tp {t}, and its plan needs equal parts"),
        (
            config.clip is not None,
            "torch's clip_grad_norm_ does not support gradients on two meshes, sliced and replicated",
        ),
    ]


def stages_over_shards(config: Config, sizes: dict[str, int]) -> list[tuple[bool, str]]:
    """Return the reasons that prevent PyTorch's pipelines with fully_shard; its schedules without a bubble hang over
    gloo then, so 1F1B is used."""
    replicas, p, m = sizes["dp"], sizes["pp"], config.num_microbatches
    shards = [*shard_sizes(config.batch, replicas), *shard_sizes(config.batch, replicas, uneven=True)]
    split = f"LAB_BATCH={config.batch} on dp {replicas} gives ranks {min(shards)} to {max(shards)} samples"
    return [
        (sizes["tp"] > 1, "its stages have whole layers: set tp1 in LAB_MESH"),
        (sizes["cp"] > 1, NO_POSITIONS),
        (1 in (p, replicas), "it combines two axes: give LAB_MESH a dp and a pp of 2 or more"),
        (config.tie and config.model == "gpt", "it does not sum the gradient of a weight that two stages share"),
        (config.clip is not None, "torch's clip_grad_norm_ does not support stages (torchtitan issue 596)"),
        (m < p, f"LAB_MICROBATCHES={m} is fewer than its {p} stages, which torch refuses"),
        (any(size % m for size in shards), f"torch needs equal microbatches, and {split} in LAB_MICROBATCHES={m}"),
    ]


# Bytes that a rank of the mesh stores between steps: ZeRO's formulas, for the rank's part of the model.


def at_rest(rank: Rank) -> float:
    """Return the bytes of weights, gradients and optimizer state, with the padding of ZeRO's units and chunks."""
    config, adam = rank.config, rank.config.optimizer == "adamw"
    masters = config.dtype == "bfloat16"
    stored = 0.0
    for unit in rank.units:
        numel, zero = sum(local.numel for local in unit), zero_stage(rank, unit)
        own, chunk = owned(rank, unit) if zero else numel, -(-numel // rank.replicas)
        tensors = adam * (1 if zero else len(unit))
        by_class = rest_bytes(
            zero, numel, own, itemsize=rank.itemsize, moments=2 * adam, masters=masters, num_tensors=tensors
        )
        if zero:
            padded = rest_bytes(zero, rank.replicas * chunk, chunk, itemsize=rank.itemsize, moments=0)
            by_class |= {"parameters": padded["parameters"]} | ({"gradients": padded["gradients"]} if zero == 1 else {})
        stored += sum(by_class.values())
    return stored


def predict(config: Config, sizes: Mapping[str, int], excluded: Mapping[str, str]) -> list[Prediction]:
    """Return bytes and calls of a step, bytes at rest and the bubble, per variant that can run and per rank."""
    found: list[Prediction] = []
    idle = (bubble(sizes["pp"], config.num_microbatches),) * config.world_size
    for name, how in HOW.items():
        if name in excluded:
            continue
        ranks = [Rank(config, sizes, rank, how) for rank in range(config.world_size)]
        costs = [total_cost(*by_axis(rank).values()) for rank in ranks]
        found += [
            *of_a_step(name, "of each axis", costs, of_calls="of each axis"),
            Prediction(name, "rest bytes", "B", f"P/(t·p), zero{how.zero}", tuple(map(at_rest, ranks)), 0),
            Prediction(name, "bubble", "", "(p-1)/(m+p-1)", idle, 0, "a time"),
        ]
    return found
