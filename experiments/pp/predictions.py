"""What a pipeline predicts before it runs: bytes, calls and the bubble."""

import torch

from experiments.pp.refusals import cannot
from workers.config import Config
from workers.measure.formulas import PYTORCHS, Prediction
from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.messages import gloo_all_reduce_messages
from workers.measure.formulas.pipelines import bubble, pipeline_ends
from workers.workload import model
from workers.workload.own import is_own

NORM_BYTES = 8  # clipping sums one number over all ranks


def passed_bytes(config: Config) -> int:
    """A: the bytes of a whole batch between two stages."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    seq = config.seq if config.model == "gpt" or is_own(config.model) else 1
    return config.batch * seq * config.width * itemsize


def predict(config: Config, chunks: int) -> list[Prediction]:
    """Bytes, calls and bubble of one step of each variant that can run, a value a rank; `chunks` is LAB_CHUNKS."""
    ranks, microbatches = config.world_size, config.num_microbatches
    excluded = cannot(config, chunks)
    predictions = []
    for name, number, stages in (
        ("naive", 1, 1), ("gpipe", microbatches, 1), ("1f1b", microbatches, 1),
        ("interleaved", microbatches, chunks), ("torch_gpipe", microbatches, 1), ("torch_1f1b", microbatches, 1),
    ):  # fmt: skip
        if name in excluded:
            continue
        ours = not name.startswith("torch")
        ends = [pipeline_ends(ranks, stages, rank) for rank in range(ranks)]
        more_bytes, more_calls, more_messages = beside(config)
        sent = tuple(end * passed_bytes(config) + more for end, more in zip(ends, more_bytes, strict=True))
        calls = tuple(float(end * number + more) for end, more in zip(ends, more_calls, strict=True))
        messages = tuple(end * number + more for end, more in zip(ends, more_messages, strict=True))
        most = int(max(calls))
        of_chunks = "v·" if stages > 1 else ""
        formula, shown = f"2{of_chunks}A, the ends A less", "" if ours else PYTORCHS
        predictions.append(Prediction(name, "wire bytes", "B", formula, sent, most, shown, messages))
        if ours:
            predictions.append(Prediction(name, "calls", "calls", f"2{of_chunks}m, the ends m less", calls, most))
        share = bubble(ranks, number, stages)
        formula = "(p-1)/p" if name == "naive" else f"(p-1)/({of_chunks}m+p-1)"
        predictions.append(Prediction(name, "bubble", "", formula, (share,) * ranks, most, "a time"))
    return predictions


def beside(config: Config) -> tuple[list[float], list[int], list[int]]:
    """Bytes, calls and messages of each rank that are not a pipeline's own: a tied gradient, and the norm to clip
    by."""
    ranks = config.world_size
    nbytes, calls, messages = [0.0] * ranks, [0] * ranks, [0] * ranks
    if ranks > 1 and config.tie and config.model == "gpt":
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
