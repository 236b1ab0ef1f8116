"""What a pipeline predicts before it runs: bytes, calls and the bubble, and what a rank keeps of one's own model."""

import torch

from experiments.pp.refusals import cannot
from workers.config import Config
from workers.measure.formulas import PYTORCHS, Prediction
from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.messages import gloo_all_reduce_messages
from workers.measure.formulas.pipelines import FOLDED, idle_share, pipeline_ends
from workers.measure.formulas.sharding import rest_bytes
from workers.parallel import zero_bubble
from workers.strategies.pipelined import runs_of
from workers.workload import model
from workers.workload.own import is_own

NORM_BYTES = 8  # clipping sums one number over all ranks


def passed_bytes(config: Config) -> int:
    """A: the bytes of a whole batch between two stages."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    seq = config.seq if config.model == "gpt" or is_own(config.model) else 1
    return config.batch * seq * config.width * itemsize


OURS = ("naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev")
TORCHS = ("torch_gpipe", "torch_1f1b", "torch_interleaved_zb", "torch_zbv", "torch_dualpipev")


def bubble_formula(name: str, ranks: int, microbatches: int) -> str:
    """Idle of the time of a step, of p ranks, m microbatches and v chunks; empty where no paper sums it up, as of
    PyTorch's interleaved zero bubble, whose order is the end of a search."""
    few = {
        "interleaved": "idle/(3vm+idle), idle = 2(p-1)+(v-1)((p-m)+max(0,p-2m))" if microbatches < ranks else "",
        "zb_h1": "(2p-m-1)/(3m+2p-m-1)" if microbatches < ranks else "",
        "zbv": "(4p-2m-2)/(6m+4p-2m-2)" if 2 * microbatches < 3 * ranks - 1 else "",
    }
    many = {
        "naive": "(p-1)/p",
        "gpipe": "(p-1)/(m+p-1)",
        "1f1b": "2(p-1)/(3m+2(p-1))",
        "interleaved": "2(p-1)/(3vm+2(p-1))",
        "zb_h1": "(p-1)/(3m+p-1)",
        "zbv": "(p-1)/(6m+p-1)",
        "dualpipev": "(p-1)/(6m+p-1)",
        "torch_1f1b": "(p-1)/(m+p-1)",
        "torch_interleaved_zb": "",
    }
    plain = name if name in many else name.removeprefix("torch_")
    return few.get(plain, "") or many[plain]


def predict(config: Config, chunks: int) -> list[Prediction]:
    """Bytes, calls and bubble of one step of each variant that can run, a value a rank; `chunks` is LAB_CHUNKS."""
    ranks, microbatches = config.world_size, config.num_microbatches
    excluded = cannot(config, chunks)
    predictions = []
    for name in [name for name in (*OURS, *TORCHS) if name not in excluded]:
        ours, plain, idle = name in OURS, name.removeprefix("torch_"), bubble_formula(name, ranks, microbatches)
        number, stages = 1 if name == "naive" else microbatches, chunks if "interleaved" in name else 1
        ends = [pipeline_ends(ranks, stages, rank, folded=plain in FOLDED) for rank in range(ranks)]
        more_bytes, more_calls, more_messages = beside(config, folded=plain in FOLDED)
        sent = tuple(end * passed_bytes(config) + more for end, more in zip(ends, more_bytes, strict=True))
        calls = tuple(float(end * number + more) for end, more in zip(ends, more_calls, strict=True))
        messages = tuple(end * number + more for end, more in zip(ends, more_messages, strict=True))
        most = int(max(calls))
        of_chunks = "v·" if stages > 1 else "2·" if plain in FOLDED else ""
        formula, shown = f"2{of_chunks}A, the ends A less", "" if ours else PYTORCHS
        predictions.append(Prediction(name, "wire bytes", "B", formula, sent, most, shown, messages))
        if ours:
            predictions.append(Prediction(name, "calls", "calls", f"2{of_chunks}m, the ends m less", calls, most))
        kept = tuple(rest(config, owners_of(name, ranks, chunks), rank) for rank in range(ranks))
        stages_of = "weights, gradients, moments and buffers of its stages"
        predictions.append(Prediction(name, "rest bytes", "B", stages_of, kept, 0, shown))
        if idle:
            share = idle_share(name if name in ("torch_gpipe", "torch_1f1b") else plain, ranks, number, stages)
            predictions.append(Prediction(name, "bubble", "", idle, (share,) * ranks, most, "a time"))
    return predictions


def owners_of(name: str, ranks: int, chunks: int) -> list[int]:
    """The rank of each stage of a variant."""
    if name.removeprefix("torch_") in FOLDED:
        return zero_bubble.folded(ranks)
    return [*range(ranks)] * (chunks if "interleaved" in name else 1)


def rest(config: Config, owners: list[int], rank: int) -> float:
    """Bytes that `rank` keeps between two steps of the layers of its stages, of which stage s is on `owners[s]`."""
    layers, dtype = model.outline(config).layers, getattr(torch, config.dtype)
    runs = runs_of(config.model, len(layers), len(owners))
    own = [layers[index] for run, owner in zip(runs, owners, strict=True) if owner == rank for index in run]
    # A tied weight counts once, on each of its ranks.
    sizes = [each.numel() for each in dict.fromkeys(each for layer in own for each in layer.parameters())]
    adam, total = config.optimizer == "adamw", sum(sizes)
    held = rest_bytes(0, total, total, itemsize=dtype.itemsize, moments=2 * adam, num_tensors=adam * len(sizes))
    return sum(held.values()) + sum(model.carried_bytes(layer, dtype) for layer in own)


def beside(config: Config, *, folded: bool = False) -> tuple[list[float], list[int], list[int]]:
    """Bytes, calls and messages of each rank that are not a pipeline's own: a tied gradient, of which folded stages
    have one copy, and the norm to clip by."""
    ranks = config.world_size
    nbytes, calls, messages = [0.0] * ranks, [0] * ranks, [0] * ranks
    if ranks > 1 and config.tie and config.model == "gpt" and not folded:
        tied: int = model.VOCABULARY * config.width * getattr(torch, config.dtype).itemsize
        for rank in (0, ranks - 1):
            nbytes[rank] += tied
            calls[rank] += 1
            messages[rank] += 1
    if config.clip is not None:
        nbytes = [value + all_reduce_bytes("gloo", ranks, NORM_BYTES) for value in nbytes]
        calls = [value + 1 for value in calls]
        messages = [value + gloo_all_reduce_messages(ranks, NORM_BYTES) for value in messages]
    return nbytes, calls, messages
