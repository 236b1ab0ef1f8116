"""Predictions of a pipeline: bytes, calls, the bubble, and the bytes that a rank stores of a user's model."""

import torch

from distlab.contract import ruled_out, untrainable
from distlab.lab.config import Config
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.workload import model, user_model
from distlab.lab.workload.model import outline
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.costs import Cost, norm_cost, total_cost
from distlab.techniques.pipeline_parallel import schedules
from distlab.techniques.pipeline_parallel.costs import FOLDED, idle_share, pipeline_ends
from distlab.techniques.pipeline_parallel.strategy import runs_of
from distlab.techniques.sharded.costs import whole_rest

# What a pipeline cannot run: models with too few layers, and sizes that some schedules do not support.


def depth(config: Config) -> int:
    """Return the number of layers to divide; gpt's embedding and head go with the first and the last one."""
    if user_model.is_own(config.model):
        return len(outline(config).layers)
    return 1 if config.model == "line" else config.depth


def refuse(config: Config) -> list[str]:
    """Return errors for too few layers, and for batches that cannot be split."""
    broken = untrainable(config, 1)
    if user_model.is_own(config.model) and broken:
        return broken
    layers, ranks, small = depth(config), config.world_size, []
    if ranks > layers:
        named = f"the {layers} layers of LAB_MODEL={config.model!r}" if user_model.is_own(config.model) else ""
        what = "LAB_MODEL=line is one layer" if config.model == "line" else named or f"LAB_DEPTH={layers} layers"
        verb = ", less than" if config.model == "line" else " are fewer than"
        small = [f"{what}{verb} WORLD_SIZE={ranks}: every stage needs one, allowed: 1 to {layers} ranks"]
    return small + misshapen(config) + broken


def misshapen(config: Config) -> list[str]:
    """Return an error if a layer of the user's model does not return [LAB_SEQ, LAB_WIDTH] per sample."""
    if not user_model.is_own(config.model):
        return []
    shapes = user_model.passed_shapes(config.model, config.seed, config.seq)
    misfits = [index for index, shape in enumerate(shapes) if shape != (config.seq, config.width)]
    if not misfits:
        return []
    return [
        f"LAB_MODEL={config.model!r}: stages pass on [B, LAB_SEQ={config.seq}, LAB_WIDTH={config.width}], but layer"
        f" {misfits[0]} returns [B, {', '.join(map(str, shapes[misfits[0]]))}]: set both to what all layers return"
    ]


def cannot(config: Config, chunks: int) -> dict[str, str]:
    """Return the variants that cannot run these sizes, each with the reason; `chunks` are stages per rank."""
    ranks, microbatches, batch, layers = config.world_size, config.num_microbatches, config.batch, depth(config)
    setting, rounds = f"LAB_MICROBATCHES={microbatches}", max(1, microbatches // ranks)
    on_ranks, too_many = f"on {ranks} ranks makes", f"stages, more than the {layers} layers"
    circle = "NCCL runs messages in launch order, and ranks with several stages would wait in a circle"
    unequal = f"torch needs equal microbatches, and LAB_BATCH={batch} is not a multiple of {setting}"
    chunked, folded = ("interleaved", "torch_interleaved_zb"), ("zbv", "dualpipev", "torch_zbv", "torch_dualpipev")
    return ruled_out(
        (("plain",), config.gloo_on_gpus, "gloo sends no GPU tensors"),
        (
            ("plain",),
            config.backend == "nccl" and ranks > 1,
            "NCCL's sends wait for their receives, and two neighbours would wait for each other",
        ),
        (TORCHS, batch % microbatches, unequal),
        (TORCHS, config.gloo_on_gpus, "it passes GPU tensors to gloo, which gloo does not send"),
        (chunked, ranks * chunks > layers, f"{chunks} stages per rank {on_ranks} {ranks * chunks} {too_many}"),
        (folded, ranks * 2 > layers, f"two stages per rank {on_ranks} {ranks * 2} {too_many}"),
        ((chunked[0], *folded[:2]), config.backend == "nccl" and ranks > 1, circle),
        (
            folded[1::2],
            microbatches < 2 * ranks,
            f"{setting} is fewer than 2p = {2 * ranks}, which both directions need",
        ),
        (TORCHS[:1], microbatches < ranks, f"{setting} is fewer than its {ranks} stages, which torch refuses"),
        (chunked[1:], microbatches % rounds, f"{setting} is not a multiple of its {rounds} rounds of {ranks}"),
    )


def passed_bytes(config: Config) -> int:
    """Return A: the bytes of a whole batch between two stages."""
    seq = config.seq if config.model == "gpt" or is_own(config.model) else 1
    return config.batch * seq * config.width * config.itemsize


OURS = ("one_microbatch", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev")
TORCHS = ("torch_1f1b", "torch_interleaved_zb", "torch_zbv", "torch_dualpipev")


def bubble_formula(name: str, ranks: int, microbatches: int) -> str:
    """Return the formula of a step's idle share for p ranks, m microbatches and v chunks; empty where no paper has one,
    as for PyTorch's interleaved zero bubble, whose order is found by a search."""
    few = {
        "interleaved": "1-m/(p+(m-1)/v)" if microbatches < ranks else "",
        "zb_h1": "(2p-m-1)/(3m+2p-m-1)" if microbatches < ranks else "",
        "zbv": "(4p-2m-2)/(6m+4p-2m-2)" if 2 * microbatches < 3 * ranks - 1 else "",
    }
    many = {
        "one_microbatch": "(p-1)/p",
        "gpipe": "(p-1)/(m+p-1)",
        "1f1b": "(p-1)/(m+p-1)",
        "interleaved": "(p-1)/(vm+p-1)",
        "zb_h1": "(p-1)/(3m+p-1)",
        "zbv": "(p-1)/(6m+p-1)",
        "dualpipev": "(p-1)/(6m+p-1)",
        "torch_interleaved_zb": "",
    }
    plain = name if name in many else name.removeprefix("torch_")
    return few.get(plain, "") or many[plain]


def predict(config: Config, chunks: int) -> list[Prediction]:
    """Return bytes, calls and bubble of a step, per variant that can run and per rank, with `chunks` stages each."""
    ranks, microbatches = config.world_size, config.num_microbatches
    excluded = cannot(config, chunks)
    predictions: list[Prediction] = []
    for name in [name for name in (*OURS, *TORCHS) if name not in excluded]:
        ours, plain, idle = name in OURS, name.removeprefix("torch_"), bubble_formula(name, ranks, microbatches)
        number, stages = 1 if name == "one_microbatch" else microbatches, chunks if "interleaved" in name else 1
        ends = [pipeline_ends(ranks, stages, rank, folded=plain in FOLDED) for rank in range(ranks)]
        passed = [Cost(end * passed_bytes(config), end * number, end * number) for end in ends]
        costs = list(map(total_cost, passed, tied_weight_traffic(config, folded=plain in FOLDED)))
        most = max(cost.calls for cost in costs)
        of_chunks = "v·" if stages > 1 else "2·" if plain in FOLDED else ""
        formula, shown = f"2{of_chunks}A, A less on the first and last rank", "" if ours else PYTORCHS
        of_calls = f"2{of_chunks}m, m less on the first and last rank" if ours else ""
        predictions += of_a_step(name, formula, costs, shown, of_calls)
        stored = tuple(stored_bytes(config, owners_of(name, ranks, chunks), rank) for rank in range(ranks))
        stages_of = "weights, gradients, moments and buffers of its stages"
        predictions.append(Prediction(name, "rest bytes", "B", stages_of, stored, 0, shown))
        if idle:
            share = idle_share(plain, ranks, number, stages)
            predictions.append(Prediction(name, "bubble", "", idle, (share,) * ranks, most, "a time"))
    return predictions


def owners_of(name: str, ranks: int, chunks: int) -> list[int]:
    if name.removeprefix("torch_") in FOLDED:
        return schedules.folded(ranks)
    return [*range(ranks)] * (chunks if "interleaved" in name else 1)


def stored_bytes(config: Config, owners: list[int], rank: int) -> float:
    """Return the bytes that `rank` stores between steps for its stages, of which stage s is on `owners[s]`."""
    layers, dtype = model.outline(config).layers, getattr(torch, config.dtype)
    runs = runs_of(config.model, len(layers), len(owners))
    own = [layers[index] for run, owner in zip(runs, owners, strict=True) if owner == rank for index in run]
    # A tied weight counts once on each of its ranks.
    sizes = [each.numel() for each in dict.fromkeys(each for layer in own for each in layer.parameters())]
    return whole_rest(config, sizes)[0] + sum(model.carried_bytes(layer, dtype) for layer in own)


def tied_weight_traffic(config: Config, *, folded: bool = False) -> list[Cost]:
    """Return each rank's additional messages: a tied gradient, unless `folded`, and the norm."""
    ranks, norm = config.world_size, norm_cost(config.world_size, config.clip)
    tied = ranks > 1 and config.tie and config.model == "gpt" and not folded
    shared = Cost(model.VOCABULARY * config.width * config.itemsize, 1, 1)
    return [total_cost(norm, *[shared] * (tied and rank in (0, ranks - 1))) for rank in range(ranks)]
