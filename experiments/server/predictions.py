"""Bytes that a step of the server and its like sends, settings that they cannot take, and the claims of a run."""

from collections.abc import Iterator

import torch

from distlab.collectives.costs import all_reduce_bytes, gloo_all_reduce_messages
from distlab.config import Config
from distlab.contract import WHOLE_RUN, Claims, Mode, untrainable
from distlab.data_parallel.buckets import layout
from distlab.lab import Lab
from distlab.measure.prediction import Prediction
from distlab.parameter_server.costs import averaging_bytes, server_bytes
from distlab.verify.run_all import measured
from distlab.workload.model import outline

ASYNCHRONOUS, ROUNDS = ("ssp", "downpour"), ("local_sgd", "diloco")
COUNT_BYTES = 8  # beside its gradients a worker of `sync` says of how many terms they are the sum
SHOWN_RANKS = (2, 4, 8, 16, 32, 64)
LATE = (0, 1, 2, 4, 8, 16)  # updates, of the line's largest stable rates
MOST_PROVEN = 12  # local steps of a proven round


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    refusals = untrainable(config)
    if config.trace and config.variant and set(config.variant) <= set(ASYNCHRONOUS):
        allowed = "dp, sync, local_sgd, diloco"
        refusals.append(
            "LAB_TRACE=1 profiles a step that all ranks take, which LAB_VARIANT leaves out, "
            f"allowed beside it: {allowed}"
        )
    return refusals


def cannot(config: Config) -> dict[str, str]:
    """The variants that cannot take these settings, and why."""
    adam = "LAB_OPTIMIZER=adamw would divide each worker's push by its own size, as if it were the gradient of all"
    clip = "LAB_CLIP bounds the norm of the gradient of all workers, which nobody ever holds"
    reasons = {adam: config.optimizer == "adamw", clip: config.clip is not None}
    found = [reason for reason, applies in reasons.items() if applies]
    return dict.fromkeys(ASYNCHRONOUS, "; ".join(found)) if found else {}


def weight_bytes(config: Config) -> int:
    """S: the bytes of all weights, as of all gradients."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    return outline(config).num_parameters() * itemsize


def predict(config: Config, local_steps: int) -> list[Prediction]:
    """Bytes that each rank sends in a step, and in how many calls; if asynchronous, where all take as many steps."""
    ranks, nbytes, h = config.world_size, weight_bytes(config), local_steps
    itemsize: int = getattr(torch, config.dtype).itemsize
    sizes = [parameter.numel() * itemsize for parameter in outline(config).parameters()]
    buckets = [sum(sizes[index] for index in bucket) for bucket in layout(sizes, config.bucket_mib * 2**20)]
    dense = (all_reduce_bytes("gloo", ranks, nbytes),) * ranks
    served, seldom = (tuple(server_bytes(ranks, nbytes, rank, steps) for rank in range(ranks)) for steps in (1, h))
    counted = tuple(sent + (COUNT_BYTES if rank else 0) for rank, sent in enumerate(served))
    averaged = (averaging_bytes(ranks, nbytes, h),) * ranks
    reduced = (sum(gloo_all_reduce_messages(ranks, size) for size in buckets),) * ranks
    in_rounds = (gloo_all_reduce_messages(ranks, nbytes) / h,) * ranks
    through_server = tuple(2.0 * (ranks - 1) if rank == 0 else 2.0 for rank in range(ranks))
    rows: list[tuple[str, str, tuple[float, ...], int, tuple[float, ...]]] = [
        ("dp", "2(N-1)/N x S", dense, len(buckets), reduced),
        ("sync", "S + 8 B, rank 0 (N-1) x S", counted, 2, through_server),
        ("local_sgd", "2(N-1)/N x S / H", averaged, 1, in_rounds),
        ("diloco", "2(N-1)/N x S / H", averaged, 1, in_rounds),
        ("ssp", "S, rank 0 (N-1) x S", served, 2, ()),
        ("downpour", "S / H, rank 0 (N-1) x S / H", seldom, 2, ()),
    ]
    impossible = cannot(config)
    return [
        Prediction(name, "wire bytes", "B", formula, value, calls, messages=messages)
        for name, formula, value, calls, messages in rows
        if name not in impossible
    ]


def show_bytes(lab: Lab, local_steps: int) -> None:
    """The busiest rank's bytes as N grows: the server's wall, and the ring that stays under 2S."""
    nbytes, h = weight_bytes(lab.config), local_steps
    size, ranks = nbytes / 1e6, lab.world_size
    ring = 2 * (ranks - 1) / ranks * size
    lab.say(
        f"S = {size:.3g} MB: a worker sends S a step and rank 0 (N-1) x S = {(ranks - 1) * size:.3g} MB, as much comes "
        f"in there; a ring sends 2(N-1)/N x S = {ring:.3g} MB a rank; every {h} steps, 1/{h} of it",
        "predict",
    )
    rows: list[list[float]] = []
    for ranks in SHOWN_RANKS:
        server = 2 * server_bytes(ranks, nbytes, 0) / 1e6
        ring, seldom = (2 * averaging_bytes(ranks, nbytes, steps) / 1e6 for steps in (1, h))
        rows.append([ranks, server, ring, seldom, server / ring])
    columns = ["ranks", "server (MB)", "ring (MB)", f"ring every {h} steps (MB)", "server / ring"]
    lab.table("In and out of the busiest rank, a step, by formula", columns, rows)
    x = [float(row[0]) for row in rows]
    names = ("server, in and out", "ring", f"ring every {h} steps")
    series = {name: [x, [row[index] for row in rows]] for index, name in enumerate(names, 1)}
    lab.chart("In and out of the busiest rank, a step", "ranks", "MB", series, log_x=True, log_y=True)


def claims(mode: Mode, config: Config, local_steps: int) -> Iterator[Claims]:
    """Of all that keep step bytes, of rounds what all workers in one process do, out of step what any order allows."""
    unlike = ROUNDS if config.steps % local_steps else ()
    in_step = [name for name in mode.by_hand if name not in ROUNDS]
    yield from measured(mode, config, apart=ROUNDS, unlike=unlike, copied=in_step)
    yield Claims(("called bytes", "wire bytes"), mode.by_hand)
    yield Claims([f"largest stable rate at staleness {late}" for late in LATE], WHOLE_RUN, one=True)
    yield Claims(("who may start", "budget", "updates", "final weights"), ASYNCHRONOUS, one=True)
    yield Claims(("staleness",), ("ssp",), one=True)
    yield Claims(("samples of the pace",), ("dp", "sync"), one=True)
    yield Claims(("wire bytes of the run",), ASYNCHRONOUS)
    if config.proof:
        yield from proven(mode, config, local_steps)


def proven(mode: Mode, config: Config, local_steps: int) -> Iterator[Claims]:
    """What the proof adds."""
    lengths = sorted({1, min(local_steps, MOST_PROVEN)})
    yield Claims(("samples",), WHOLE_RUN, one=True)
    yield Claims(("replicas",), [name for name in mode.by_hand if name not in ROUNDS])
    yield Claims(("replicas",), ROUNDS, times=len(lengths))
    yield Claims([f"{kind} at H = {length}" for length in lengths for kind in ("losses", "weights")], ROUNDS, one=True)
    if config.optimizer == "adamw" or config.clip is not None:
        tuned = f"at H = {lengths[-1]} as trained"
        yield Claims((f"losses {tuned}", f"weights {tuned}"), ROUNDS, one=True)
    yield Claims(("timed losses",), ROUNDS, one=True)
    yield Claims(("losses", "gradients", "weights", "samples", "order of events"), ASYNCHRONOUS, one=True)
