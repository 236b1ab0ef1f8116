"""What pipelines claim before they run: sizes that cannot be cut, variants that cannot take them, bytes, calls and bubble."""

import torch

from experiments.pp.faults import invisible
from workers.config import Config
from workers.measure.formulas import Prediction
from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.pipelines import bubble, pipeline_ends
from workers.workload import data, model, text
from workers.workload.model import outline

NORM_BYTES = 8  # clipping sums one number over all ranks


def title(config: Config) -> str:
    """What is trained, for headings."""
    return outline(config).describe()


def depth(config: Config) -> int:
    """Layers that are cut; gpt's embedding and head go with the first and the last one."""
    return 1 if config.model == "line" else config.depth


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    layers, ranks, faults = depth(config), config.world_size, []
    if ranks > layers:
        what = "LAB_MODEL=line is one layer" if config.model == "line" else f"LAB_DEPTH={layers} layers"
        verb = ", less than" if config.model == "line" else " are fewer than"
        faults.append(f"{what}{verb} WORLD_SIZE={ranks}: every stage needs one, allowed: 1 to {layers} ranks")
    else:
        reasons = cannot(config)
        faults += [f"LAB_VARIANT={name!r} cannot run: {reasons[name]}" for name in config.variant if name in reasons]
    return faults + model.faults(config) + data.faults(config, 1) + text.faults(config) + invisible(config)


def cannot(config: Config) -> dict[str, str]:
    """The variants that cannot take these sizes, each with the reason."""
    ranks, microbatches, batch = config.world_size, config.num_microbatches, data.global_batch(config)
    stages = ranks * config.chunks
    reasons = {}
    if stages > depth(config):
        reasons["interleaved"] = (
            f"LAB_CHUNKS={config.chunks} on {ranks} ranks makes {stages} stages, more than the {depth(config)} layers"
        )
    elif config.backend == "nccl" and ranks > 1:
        reasons["interleaved"] = (
            "NCCL runs messages in the order of their launch, and ranks with chunks would wait in a circle"
        )
    for name in ("torch_gpipe", "torch_1f1b"):
        if batch % microbatches:
            reasons[name] = (
                f"torch wants equal microbatches, and LAB_BATCH={batch} is no multiple of LAB_MICROBATCHES={microbatches}"
            )
        elif config.device == "cuda" and config.backend == "gloo":
            reasons[name] = "it hands gloo tensors that live on a GPU, which gloo does not send"
    if microbatches < ranks:
        reasons.setdefault(
            "torch_1f1b", f"LAB_MICROBATCHES={microbatches} is fewer than its {ranks} stages, which torch refuses"
        )
    return reasons


def cut_bytes(config: Config) -> int:
    """A: the bytes of a whole batch between two stages."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    seq = config.seq if config.model == "gpt" else 1
    return data.global_batch(config) * seq * config.width * itemsize


def predict(config: Config) -> list[Prediction]:
    """Bytes, calls and bubble of one step of each variant that can run, a value a rank."""
    ranks, microbatches = config.world_size, config.num_microbatches
    excluded = cannot(config)
    predictions = []
    for name, number, chunks in (
        ("naive", 1, 1), ("gpipe", microbatches, 1), ("1f1b", microbatches, 1),
        ("interleaved", microbatches, config.chunks), ("torch_gpipe", microbatches, 1), ("torch_1f1b", microbatches, 1),
    ):  # fmt: skip
        if name in excluded:
            continue
        ours = not name.startswith("torch")
        ends = [pipeline_ends(ranks, chunks, rank) for rank in range(ranks)]
        more_bytes, more_calls = beside(config)
        sent = tuple(end * cut_bytes(config) + more for end, more in zip(ends, more_bytes, strict=True))
        calls = tuple(float(end * number + more) for end, more in zip(ends, more_calls, strict=True))
        most = int(max(calls))
        of_chunks = "v·" if chunks > 1 else ""
        predictions.append(Prediction(name, "wire bytes", "B", f"2{of_chunks}A, the ends A less", sent, most, ours))
        if ours:
            predictions.append(Prediction(name, "calls", "calls", f"2{of_chunks}m, the ends m less", calls, most))
        share = bubble(ranks, number, chunks)
        formula = "(p-1)/p" if name == "naive" else f"(p-1)/({of_chunks}m+p-1)"
        predictions.append(Prediction(name, "bubble", "", formula, (share,) * ranks, most, decides=False))
    return predictions


def beside(config: Config) -> tuple[list[float], list[int]]:
    """Bytes and calls of each rank that are not a pipeline's own: a tied gradient, and the norm to clip by."""
    ranks = config.world_size
    nbytes, calls = [0.0] * ranks, [0] * ranks
    if ranks > 1 and config.tie and config.model == "gpt":
        tied: int = model.VOCABULARY * config.width * getattr(torch, config.dtype).itemsize
        for rank in (0, ranks - 1):
            nbytes[rank] += tied
            calls[rank] += 1
    if config.clip is not None:
        nbytes = [value + all_reduce_bytes("gloo", ranks, NORM_BYTES) for value in nbytes]
        calls = [value + 1 for value in calls]
    return nbytes, calls
