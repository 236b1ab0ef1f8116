"""What a rank refuses before it joins: every reason why these settings cannot run in this mode, a sentence each, all at
once."""

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from workers.config import Config, ConfigError
from workers.config.sentences import shown
from workers.config.values import suggest
from workers.contract import Mode
from workers.rank.modes import modes_that
from workers.report.latest import LATEST
from workers.strategies.own import is_step
from workers.workload.own import is_own

# The longest path below LAB_RUNS_DIR that a run writes: a run id, a checkpoint's draft, a file of it.
DEEPEST = Path("x" * 200, "checkpoints", ".step-000000000000.partial", "x" * 40)


def refuse(config: Config, mode: Mode, of_this_rank: Sequence[str] = ()) -> None:
    """Raise ConfigError with all that the mode cannot run; `of_this_rank` are sentences that others have found."""
    refusals = [*unknown(config, mode), *idle(config, mode), *mode.refuse(config)]
    # Of sizes that the mode can take.
    refusals = refusals or [*excluded(config, mode), *out_of_place(config, mode), *hidden(config, mode)]
    refusals += [*unwritable(config), *of_this_rank]
    if config.resume is not None or config.checkpoint_every is not None:
        from workers.checkpoint import finding  # a run without checkpoints need not wait for it

        refusals += finding.refusals(config)
    if refusals:
        raise ConfigError(refusals)


def unknown(config: Config, mode: Mode) -> Iterator[str]:
    """A variant or a mistake that the mode does not have."""
    for name in config.variant:
        if name not in mode.names:
            allowed = ", ".join(mode.names) or "none, leave it unset"
            yield (
                f"LAB_VARIANT={shown(name)} is not a variant of {config.mode_name}{suggest(name, mode.names)}, allowed:"
                f" {allowed}"
            )
    if config.bug is not None and config.bug not in mode.mistakes:
        allowed = ", ".join(mode.mistakes) or "none, leave it unset"
        nearest = suggest(config.bug, list(mode.mistakes))
        yield f"LAB_BUG={shown(config.bug)} is not a bug of {config.mode_name}{nearest}, allowed: {allowed}"


def idle(config: Config, mode: Mode) -> Iterator[str]:
    """A variable that asks for something which this mode never does."""
    if not mode.timed:
        if config.slow_rank is not None:
            what = f"LAB_SLOW_RANK={config.slow_rank!r} slows a rank in the timed training of each variant"
            yield f"{what}, and {config.mode_name} has none, allowed: {modes_that(lambda other: other.timed)}"
        if config.trace:
            what = "LAB_TRACE=1 profiles a step of the timed training of each variant"
            yield f"{what}, and {config.mode_name} has none, allowed: {modes_that(lambda other: other.timed)}"
    yield from undrilled(config, mode)
    if config.recompute and not mode.recomputes:
        allowed = modes_that(lambda other: other.recomputes)
        yield f"LAB_RECOMPUTE=1 is not possible in {config.mode_name}, allowed: {allowed}, whose ranks run whole layers"
    if mode.unsaved:
        for name, value in {"LAB_CHECKPOINT_EVERY": config.checkpoint_every, "LAB_RESUME": config.resume}.items():
            if value is not None:
                allowed = modes_that(lambda other: not other.unsaved)
                yield f"{name}={value}: {config.mode_name} {mode.unsaved}; checkpoints go with {allowed}"


def undrilled(config: Config, mode: Mode) -> Iterator[str]:
    """A fault whose moment never comes in this mode, or that nothing in it could see."""
    if mode.audits:
        return
    name, allowed = config.mode_name, modes_that(lambda other: other.audits)
    if config.audit_every is not None:
        what = f"LAB_AUDIT_EVERY={config.audit_every} compares what the ranks of a training hold alike"
        yield f"{what}, and {name} has none, allowed: {allowed}"
    for each in config.planned_faults:
        if each.flipped:
            yield f"LAB_FAULTS={each.text!r} changes a training, and {name} has none, allowed: {allowed}"
        elif each.step is not None and not (mode.at_once or mode.stepped):
            yield f"LAB_FAULTS={each.text!r} comes at a step of a training, and {name} has none, allowed: @2s"


def excluded(config: Config, mode: Mode) -> Iterator[str]:
    """A variant that was asked for by name and cannot take these settings."""
    for name, reason in mode.cannot(config).items():
        if name in config.variant:
            yield f"LAB_VARIANT={name!r} cannot run: {reason}"


def out_of_place(config: Config, mode: Mode) -> Iterator[str]:
    """A strategy of one's own where no variant is trained by itself, or a replica's step where ranks share samples."""
    timed = any(each.build is not None for each in mode.variants if not is_own(each.name))
    shared = [axis for axis, size in mode.axes(config).items() if axis != "dp" and size > 1]
    for name in filter(is_own, config.variant):
        what = f"LAB_VARIANT={name!r}"
        if not timed:
            allowed = modes_that(lambda other: other.timed)
            yield f"{what} is timed beside a mode's variants, and {config.mode_name} times none, allowed: {allowed}"
        elif shared and is_step(name):
            yield (
                f"{what} is the step of a replica with samples of its own, and {config.mode_name} deals the ranks of"
                f" {' and '.join(shared)} the same ones: write a strategy of (model, mesh, config), or run it in dp"
            )


def hidden(config: Config, mode: Mode) -> Iterator[str]:
    """A mistake that could not show: a check that cannot fail would only look like one that held."""
    mistake = mode.mistakes.get(config.bug or "")
    if mistake is not None and (reason := mistake.hidden(mode, config)):
        yield f"LAB_BUG={config.bug} cannot show with {reason}"


def unwritable(config: Config) -> list[str]:
    """Why no run can be written where LAB_RUNS_DIR and LAB_RUN_ID say."""
    runs = config.runs_dir
    try:
        os.lstat(runs.absolute() / DEEPEST)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return [f"LAB_RUNS_DIR={shown(runs)} is too long for the names of files in it: name another folder"]
    # A link to nowhere or in a circle is there, too, and is no folder.
    nearest = next(folder for folder in [runs, *runs.absolute().parents] if os.path.lexists(folder))
    fault = _no_folder_in(nearest)
    if fault:
        return [
            f"LAB_RUNS_DIR={shown(runs)} cannot be written by user {os.getuid()} ({fault}): change its owner or name"
            " another folder"
        ]
    if (latest := runs / LATEST).exists() and not latest.is_symlink():
        return [f"{shown(latest)} is no link to the newest run: rename it or remove it"]
    goes_on = config.resume == "auto" and config.run_id is not None and (runs / config.run_id).is_dir()
    if config.run_id is not None and os.path.lexists(runs / config.run_id) and not goes_on:
        return [f"LAB_RUN_ID={config.run_id!r} exists already in {runs}: choose another or remove it"]
    return []


def _no_folder_in(nearest: Path) -> str:
    """Why no folder can be made in this one, found out by making one, and removing it; empty if it can.

    Permissions do not say it: /proc and a file system that is mounted to be read have those that allow it.
    """
    probe = nearest / f".probe.{secrets.token_hex(8)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        # A disk that is full is no fault of the settings: the run says so where it meets it, and ends with 1.
        return "" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return ""
