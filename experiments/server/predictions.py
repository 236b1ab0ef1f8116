"""Predictions of the server mode: bytes per step, unsupported settings, and the checks of a run."""

from collections.abc import Sequence
from dataclasses import replace

from distlab.contract import Claims, Mode, ruled_out, untrainable
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import Prediction, of_a_step
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.model import outline
from distlab.techniques.collectives.costs import Cost, gloo_all_reduce_messages
from distlab.techniques.data_parallel.costs import gradients_cost

from .options import Options

DOWNPOUR, ROUNDS = "downpour", ("local_sgd", "diloco")
RUN_BYTES = "wire bytes of the run"
COUNT_BYTES = 8  # a worker of `sync` also sends the number of terms in its sum
SHOWN_RANKS = (2, 4, 8, 16, 32, 64)
MOST_PROVEN = 12  # local steps of a proven round: two rounds of them are run, for any H


def refuse(config: Config) -> list[str]:
    refusals = untrainable(config)
    if config.gloo_on_gpus:
        why = "LAB_BACKEND=gloo cannot send weights from a GPU, as a server does"
        refusals.append(f"{why}: set LAB_BACKEND=nccl, or leave LAB_DEVICE=cpu")
    return refusals


def cannot(config: Config) -> dict[str, str]:
    adam = "LAB_OPTIMIZER=adamw would normalise each worker's push separately, as if it were the whole batch's gradient"
    clip = "LAB_CLIP bounds the norm of the whole batch's gradient, which no rank ever has"
    reasons = "; ".join([adam] * (config.optimizer == "adamw") + [clip] * (config.clip is not None))
    return ruled_out(((DOWNPOUR,), reasons, reasons))


def weight_bytes(config: Config) -> int:
    """Return S: the bytes of all weights, or of all gradients."""
    return outline(config).num_parameters() * config.itemsize


def predict(config: Config) -> list[Prediction]:
    """Return each rank's bytes and calls per step; if asynchronous, for equal numbers of steps."""
    ranks, nbytes, h = config.world_size, weight_bytes(config), config.own(Options).local_steps
    averaged = Cost(averaging_bytes(ranks, nbytes, h), 1, gloo_all_reduce_messages(ranks, nbytes) / h)
    served, every_h_steps = ([server_bytes(ranks, nbytes, rank, steps) for rank in range(ranks)] for steps in (1, h))
    counted = [
        Cost(sent + COUNT_BYTES * (rank > 0), 2, 2 if rank else 2 * ranks - 2) for rank, sent in enumerate(served)
    ]
    rows = [
        ("dp", "2(N-1)/N x S", [gradients_cost(config)] * ranks),
        ("sync", "S + 8 B, rank 0 (N-1) x S", counted),
        *((name, "2(N-1)/N x S / H", [averaged] * ranks) for name in ROUNDS),
        (DOWNPOUR, "S / H, rank 0 (N-1) x S / H", [Cost(sent, 2) for sent in every_h_steps]),
    ]
    return [
        each for name, formula, costs in rows if name not in cannot(config) for each in of_a_step(name, formula, costs)
    ]


def show_bytes(lab: Lab) -> None:
    """Show the busiest rank's bytes as N grows: the server's limit, and the ring, which stays below 2S."""
    nbytes, h = weight_bytes(lab.config), lab.config.own(Options).local_steps
    size, ranks = nbytes / 1e6, lab.world_size
    ring = 2 * (ranks - 1) / ranks * size
    lab.say(
        f"S = {size:.3g} MB: per step a worker sends S, rank 0 sends (N-1) x S = {(ranks - 1) * size:.3g} MB and"
        f" receives as much; in a ring each rank sends 2(N-1)/N x S = {ring:.3g} MB; with a message every {h} steps"
        f" 1/{h} of it",
        "predict",
    )
    rows: list[list[float]] = []
    for ranks in SHOWN_RANKS:
        server = 2 * server_bytes(ranks, nbytes, 0) / 1e6
        ring, every_h_steps = (2 * averaging_bytes(ranks, nbytes, steps) / 1e6 for steps in (1, h))
        rows.append([ranks, server, ring, every_h_steps, server / ring])
    columns = ["ranks", "server (MB)", "ring (MB)", f"ring every {h} steps (MB)", "server / ring"]
    lab.table("Bytes in and out of the busiest rank per step, by formula", columns, rows)
    x = [float(row[0]) for row in rows]
    names = ("server, in and out", "ring", f"ring every {h} steps")
    series = {name: [x, [row[index] for row in rows]] for index, name in enumerate(names, 1)}
    lab.chart("Bytes in and out of the busiest rank per step", "ranks", "MB", series, log_x=True, log_y=True)


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """Return the checks: bytes of synchronous variants, rounds compared with one process, and rules of downpour."""
    local_steps = config.own(Options).local_steps
    asynchronous = "tests/experiments/test_server_asynchronous.py::"
    synchronous = [name for name in mode.by_hand if name not in ROUNDS]
    lengths, tuned = sorted({1, min(local_steps, MOST_PROVEN)}), config.optimizer == "adamw" or config.clip is not None
    of_lengths = [f"{kind} at H = {length}" for length in lengths for kind in ("losses", "weights")]
    as_trained = [f"{kind} at H = {lengths[-1]} as trained" for kind in ("losses", "weights")]
    rounds = "test_a_wrong_mean_fails_losses_and_weights_at_every_h"
    worker = f"{asynchronous}test_a_wrong_worker_fails_its_checks"

    def of_run(name: str, test: str) -> Claims:
        return Claims((name,), (DOWNPOUR,), one=True, fails_in=f"{asynchronous}{test}")

    return (
        *measured(
            mode,
            config,
            not_compared=ROUNDS,
            unequal=ROUNDS if config.steps % local_steps else (),
            replicated=synchronous,
        ),
        Claims(("called bytes", "wire bytes"), mode.by_hand),
        of_run("who may start", "test_workers_start_within_the_staleness_bound"),
        of_run("budget", "test_a_server_that_exceeds_its_budget_is_detected"),
        of_run("updates", "test_a_lost_or_repeated_update_is_counted"),
        of_run("final weights", "test_a_worker_with_different_final_weights_fails"),
        Claims(("staleness",), (DOWNPOUR,), one=True, when=config.own(Options).staleness is not None),
        Claims((RUN_BYTES,), (DOWNPOUR,), fails_in="test_additional_bytes_fail_the_run"),
        Claims(("samples",), one=True, when=config.proof),
        Claims(("replicas",), synchronous, when=config.proof),
        Claims(("replicas",), ROUNDS, times=len(lengths), when=config.proof),
        Claims(of_lengths, ROUNDS, one=True, when=config.proof, fails_in=rounds),
        Claims(as_trained, ROUNDS, one=True, when=config.proof and tuned, fails_in=rounds),
        Claims(("timed losses",), ROUNDS, one=True, when=config.proof, fails_in=rounds),
        Claims(("outer step",), (), fails_in="test_a_wrong_outer_step_fails_the_run"),
        Claims(
            ("losses", "gradients", "weights", "samples"), (DOWNPOUR,), one=True, when=config.proof, fails_in=worker
        ),
        replace(of_run("order of events", "test_a_wrong_order_of_events_fails"), when=config.proof),
    )


# --- bytes per step; S is the bytes of all weights or all gradients, H the local steps between two messages ---


def server_bytes(world_size: int, nbytes: int, rank: int, local_steps: int = 1) -> float:
    """Return the bytes that `rank` sends per step: a worker its update, rank 0 the weights to all others.

    Rank 0 also receives (N-1)·S: 2(N-1)·S in both directions pass one link (a server that is no worker: 2N·S), where a
    ring's links each carry 2(N-1)/N·S (Li et al.: Scaling Distributed Machine Learning with the Parameter Server, OSDI
    2014).
    """
    return (nbytes if rank else (world_size - 1) * nbytes) / local_steps


def averaging_bytes(world_size: int, nbytes: int, local_steps: int) -> float:
    """Return a rank's bytes per step if an all_reduce averages the weights every H steps: 2(N-1)/N·S / H."""
    return 2 * (world_size - 1) / world_size * nbytes / local_steps
