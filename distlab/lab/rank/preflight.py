"""Check settings before a rank joins: every reason why they cannot run in this mode, one sentence each, all at once."""

import errno
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from distlab.contract import Mode
from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.config import Config, ConfigError, user_code
from distlab.lab.config.settings import quoted, suggest
from distlab.lab.measure.memory import ContainerMemory
from distlab.lab.rank.mode_loader import modes_that
from distlab.lab.report import run_folder
from distlab.lab.report.run_folder import LATEST
from distlab.lab.report.units import human_bytes
from distlab.lab.workload.model import outline
from distlab.lab.workload.user_model import is_own, is_step
from distlab.techniques.tensor_parallel.costs import layer_activation_bytes

# The longest path below LAB_RUNS_DIR that a run writes: a run id, a checkpoint's draft, a file in it.
DEEPEST = Path("x" * 200, "checkpoints", ".step-000000000000.partial", "x" * 40)


def refuse(config: Config, mode: Mode, of_this_rank: Sequence[str] = ()) -> None:
    """Raise ConfigError with all that the mode cannot run; `of_this_rank` are sentences from other checks."""
    with user_code.refusing_exits(config.join_timeout_s, ConfigError):
        refusals = [*unknown(config, mode), *without_effect(config, mode), *mode.refuse(config)]
        # Checks of sizes.
        refusals = refusals or [*excluded(config, mode), *out_of_place(config, mode), *hidden(config, mode)]
    refusals += [*unwritable(config), *of_this_rank]
    if config.resume is not None or config.checkpoint_every is not None:
        from distlab.lab.checkpoint import locate  # runs without checkpoints need not wait for it

        refusals += locate.refusals(config, mode.formerly)
    if refusals:
        raise ConfigError(refusals)


def unknown(config: Config, mode: Mode) -> Iterator[str]:
    """Report a variant or an injected bug that the mode does not have."""
    for name in config.variant:
        if name not in mode.names:
            known = (*mode.names, *mode.left_out)
            allowed = ", ".join(known) or "none, leave it unset"
            nearest = instead(name, mode) or suggest(name, known)
            yield f"LAB_VARIANT={quoted(name)} is not a variant of {config.mode_name}{nearest}, allowed: {allowed}"
    if config.bug is not None and config.bug not in mode.mistakes:
        allowed = ", ".join(mode.mistakes) or "none, leave it unset"
        drawn = ": bugs are no longer drawn by a number, so name one" if config.bug.startswith("mystery:") else ""
        nearest = drawn or instead(config.bug, mode) or suggest(config.bug, list(mode.mistakes))
        yield f"LAB_BUG={quoted(config.bug)} is not a bug of {config.mode_name}{nearest}, allowed: {allowed}"


def instead(name: str, mode: Mode) -> str:
    """Return the replacement of a removed variant or bug."""
    return f" any more: {mode.gone[name]}" if name in mode.gone else ""


def without_effect(config: Config, mode: Mode) -> Iterator[str]:
    """Report a variable for something that this mode never does."""
    if not mode.timed and config.slow_rank is not None:
        what = f"LAB_SLOW_RANK={config.slow_rank!r} slows a rank in the timed training of each variant"
        yield f"{what}, which {config.mode_name} does not have, allowed: {modes_that(lambda other: other.timed)}"
    yield from without_training(config, mode)
    sleep_ms: float = getattr(config.options, "sleep_ms", 0.0)
    if sleep_ms and config.device == "cuda":
        what = f"LAB_SLEEP_MS={sleep_ms:g} pretends compute by sleeping on the CPU"
        yield f"{what}, which a GPU does not wait for: it works only with LAB_DEVICE=cpu"
    if config.recompute and not mode.recomputes:
        allowed = modes_that(lambda other: other.recomputes)
        yield f"LAB_RECOMPUTE=1 needs ranks that run whole layers, as {config.mode_name} does not, allowed: {allowed}"
    if mode.unsaved:
        for name, value in {"LAB_CHECKPOINT_EVERY": config.checkpoint_every, "LAB_RESUME": config.resume}.items():
            if value is not None:
                allowed = modes_that(lambda other: not other.unsaved)
                yield f"{name}={value}: {config.mode_name} {mode.unsaved}, modes with checkpoints: {allowed}"


def without_training(config: Config, mode: Mode) -> Iterator[str]:
    """Report a fault whose moment never comes in this mode, or an audit of data that it never has."""
    if mode.audits:
        return
    name, allowed = config.mode_name, modes_that(lambda other: other.audits)
    if config.audit_every is not None:
        what = f"LAB_AUDIT_EVERY={config.audit_every} compares replicated tensors during training"
        yield f"{what}, but {name} does not train, allowed: {allowed}"
    for each in config.planned_faults:
        if each.step is not None:
            yield f"LAB_FAULTS={each.text!r} is for a training step, but {name} does not train: use a time such as @2s"


def excluded(config: Config, mode: Mode) -> Iterator[str]:
    """Report a variant that was requested by name and cannot take these settings."""
    for name, reason in mode.cannot(config).items():
        if name in config.variant:
            yield f"LAB_VARIANT={name!r} cannot run: {reason}"


def out_of_place(config: Config, mode: Mode) -> Iterator[str]:
    """Report a user's strategy where no variant trains by itself, or a replica's step where ranks share samples."""
    timed = any(each.build is not None for each in mode.variants if not is_own(each.name))
    shared = [axis for axis, size in mode.axes(config).items() if axis != "dp" and size > 1]
    for name in filter(is_own, config.variant):
        what = f"LAB_VARIANT={name!r}"
        if not timed:
            allowed = modes_that(lambda other: other.timed)
            yield f"{what} is timed next to a mode's variants, but {config.mode_name} times none, allowed: {allowed}"
        elif shared and is_step(name):
            yield (
                f"{what} is the training step of a replica with its own samples, but ranks of {' and '.join(shared)}"
                f" have equal samples in {config.mode_name}: write a strategy of (model, mesh, config), or run it in dp"
            )


def hidden(config: Config, mode: Mode) -> Iterator[str]:
    """Report an injected bug that could not show: a check that cannot fail would look like one that passed."""
    mistake = mode.mistakes.get(config.bug or "")
    if mistake is not None and (reason := mistake.hidden(mode, config)):
        yield f"LAB_BUG={config.bug} cannot be detected with {reason}"


def unwritable(config: Config) -> list[str]:
    """Return why no run can be written at the path of LAB_RUNS_DIR and LAB_RUN_ID."""
    runs = config.runs_dir
    try:
        os.lstat(runs.absolute() / DEEPEST)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return [f"LAB_RUNS_DIR={quoted(runs)} is too long for the names of files in it: name another folder"]
    # A dangling or circular link exists, but is no folder.
    nearest = next(folder for folder in [runs, *runs.absolute().parents] if os.path.lexists(folder))
    fault = _no_folder_in(nearest)
    if fault:
        return [
            f"LAB_RUNS_DIR={quoted(runs)} cannot be written by user {os.getuid()} ({fault}): change its owner or name"
            " another folder"
        ]
    if (latest := runs / LATEST).exists() and not latest.is_symlink():
        return [f"{quoted(latest)} must be a link to the newest run: rename it or remove it"]
    if config.run_id is None or not os.path.lexists(runs / config.run_id):
        return []
    goes_on = config.resume == "auto" and (runs / config.run_id).is_dir()
    if not (goes_on or _is_empty(runs / config.run_id)):
        return [f"LAB_RUN_ID={config.run_id!r} exists already in {runs}: choose another or remove it"]
    return []


def _is_empty(folder: Path) -> bool:
    """Return whether it is a folder without a run's files: a launcher that chose the name has made it."""
    try:
        return not folder.is_symlink() and not any(folder.iterdir())
    except OSError:
        return False


def _no_folder_in(nearest: Path) -> str:
    """Return why no folder can be made in this one, by making and removing one; empty if it can.

    Permissions do not show it: /proc and a read-only file system have those that allow it.
    """
    probe = nearest / f".probe.{secrets.token_hex(8)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        # A full disk is no fault of the settings: the run reports it at its first write, and ends with 1.
        return "" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return ""


# Estimate by formula whether a run fits into this machine's memory: a warning, no refusal.
#
#     proof        in float64: on rank 0 the model and gradients of one process, with copies of both after each of 3
#                  steps; on every rank a variant's weights and gradients, and the weights that it gathers
#     training     in LAB_DTYPE, all variants at once: weights, gradients, moments; on rank 0 also the reference
#     activations  of a rank's samples; on rank 0 of the whole batch in float64 (Korthikanti et al. 2022, see
#                  distlab/lab/measure/storages.py)
#
# A dp run of 14.4 million parameters on 2 ranks (LAB_WIDTH=384, flat and ddp) used 2.91 GB; the estimate is 2.88 GB.
# For other modes and sizes it is within a factor of 1.5.

VOCABULARY = 256
BASE_BYTES = 200e6  # Python, torch and its buffers
PROOF_STEPS = 3
MEMINFO = Path("/proc/meminfo")


def warnings(config: Config, mode: Mode) -> list[str]:
    """Return a sentence if the run will likely not fit into memory."""
    for here, there in memories(config):
        needed = needed_bytes(config, mode, here)
        if needed > there:
            return [
                f"{here} rank{'s' * (here > 1)} of these settings may need about {human_bytes(needed)} of memory here,"
                f" but {human_bytes(there)} are free: lower LAB_WIDTH, LAB_DEPTH, LAB_BATCH, LAB_SEQ or the number of"
                " variants"
            ]
    return []


def needed_bytes(config: Config, mode: Mode, here: int) -> float:
    """Return the memory of `here` ranks that share it, including rank 0, which needs most."""
    # Simultaneous trainings: the selected variants, or the mode's own number.
    num_trained = mode.at_once or sum(
        each.build is not None and (not config.variant or each.name in config.variant) for each in mode.variants
    )
    if not num_trained:
        return here * BASE_BYTES
    item: int = getattr(torch, config.dtype).itemsize
    parts = config.world_size if mode.shards else 1
    count = outline(config).num_parameters() + mode.more_parameters(config)
    state = 4 if config.optimizer == "adamw" else 2  # weights, gradients, two moments
    trained = num_trained * state * item * count / parts + 4 * count
    proven = (3 / parts + 1) * 8 * count if config.proof else 0.0
    alone = (state * item * count + 8 * 2 * (1 + PROOF_STEPS) * count) if config.proof else 0.0
    samples = -(-config.batch // config.world_size)
    kept = activation_bytes(config, -(-samples // config.num_microbatches), item)
    whole = activation_bytes(config, config.batch, 8) if config.proof else 0.0
    return here * (BASE_BYTES + max(trained, proven)) + alone + (here - 1) * kept + max(kept, whole)


def activation_bytes(config: Config, samples: int, itemsize: int) -> float:
    """Return the activation bytes of a forward pass with so many samples, with gpt's scores for each byte."""
    if config.model == "line":
        return 0.0
    positions = config.seq if config.model == "gpt" else 1
    layer = layer_activation_bytes(
        positions, samples, config.width, config.heads, itemsize=itemsize,
        recompute="full" if config.recompute else "selective",
    )  # fmt: skip
    scores = 3 * VOCABULARY * itemsize * positions * samples if config.model == "gpt" else 0.0
    return layer * config.depth + scores


def memories(config: Config) -> list[tuple[int, float]]:
    """Return the ranks that share a memory, and its bytes: the limit of this container, and the machine's free memory,
    which ranks in other containers fill too (RANKS_ON_HOST, from the Compose file)."""
    here, limit, free = ranks_here(config), ContainerMemory().limit_bytes, free_bytes()
    beside = os.environ.get("RANKS_ON_HOST", "")
    on_host = min(int(beside), config.world_size) if beside.isdecimal() else 0
    return [(ranks, there) for ranks, there in ((here, limit), (max(here, on_host), free)) if there is not None]


def free_bytes() -> float | None:
    """Return this machine's memory that is free or can be freed; None if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def ranks_here(config: Config) -> int:
    """Return the ranks on this machine: all if the launcher starts them, as many as torchrun's agent has, or one."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if config.rank is None or (config.master_addr or "").startswith(("127.", "localhost", "::1")):
        return config.world_size
    return min(int(local), config.world_size) if local.isdecimal() and int(local) else 1


# Machines need not share a disk, but checkpoints need a shared one. Rank 0 writes a file to the run's folder and each
# rank looks for it. The name is new, so that a network file system has to ask its server.


class SeparateDisks(NamedTuple):
    """The host of every rank, and rank 0's sentence about logs that stay on other hosts."""

    hosts: list[str]
    sentence: str


def find_separate_disks(exchange: Exchange, folder: Path, token: str, config: Config) -> SeparateDisks | None:
    """Return the consequences of machines that share no disk; None if all ranks see one folder.

    Raises ConfigError on every rank if the run saves or resumes and some rank does not see rank 0's folder.
    """
    hosts, unseen = seen_by(exchange, folder, token)
    if not unseen:
        return None
    who = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in unseen)
    saves = [
        f"{name}={value}"
        for name, value in (("LAB_CHECKPOINT_EVERY", config.checkpoint_every), ("LAB_RESUME", config.resume))
        if value is not None
    ]
    if saves:
        remove_claimed(folder)
        raise ConfigError(
            [
                f"LAB_RUNS_DIR={str(config.runs_dir)!r} is not the same folder on all machines: {who} cannot see rank"
                f" 0's, and {' and '.join(saves)} needs a folder on a shared disk"
            ]
        )
    return SeparateDisks(hosts, f"not shared with {who}: their logs stay there, rank 0 collects their records")


def remove_claimed(folder: Path) -> None:
    """Remove a folder with nothing but the claim of this run; a run that continues has earlier attempts in it."""
    with suppress(OSError):  # another rank of this machine was faster
        if [path.name for path in folder.iterdir()] == [run_folder.FILE]:
            (folder / run_folder.FILE).unlink()
            folder.rmdir()


def seen_by(exchange: Exchange, folder: Path, token: str) -> tuple[list[str], list[int]]:
    """Return the host of every rank, and the ranks that do not see rank 0's folder."""
    mark = folder / f".seen-{token[:16]}"
    if exchange.rank == 0:
        mark.touch()
    exchange.barrier("the folder of runs")
    found = exchange.everyone("who sees it", [socket.gethostname(), mark.exists()])
    if exchange.rank == 0:
        mark.unlink(missing_ok=True)
    return [host for host, _ in found], [rank for rank, (_, sees) in enumerate(found) if not sees]
