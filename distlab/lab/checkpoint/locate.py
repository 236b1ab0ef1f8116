"""Find the checkpoint to resume from: the newest complete one at LAB_RESUME, of the same model and data.

Before the ranks join, every rank checks the settings against the manifests alone. A checkpoint that one run loads is
not removed by another that keeps only its last ones: a reader has a shared lock (flock) on its manifest, a remover an
exclusive lock.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from distlab.lab.checkpoint import manifest
from distlab.lab.checkpoint.manifest import Manifest, Unreadable
from distlab.lab.config import Config, ConfigError
from distlab.lab.config.settings import quoted
from distlab.lab.report.run_folder import locked


def lock_for_reading(folder: Path) -> int | None:
    """Lock the checkpoint in `folder` until `release`; None if it is none, or is being removed."""
    if (file := _opened(folder)) is None:
        return None
    try:
        if locked(file, fcntl.LOCK_SH) and os.path.samestat(os.fstat(file), (folder / manifest.FILE).stat()):
            return file
    except FileNotFoundError:  # removed between the two calls
        pass
    os.close(file)
    return None


def release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def remove(folder: Path) -> bool:
    """Remove the checkpoint atomically; return False if a run has it locked."""
    if (file := _opened(folder)) is None:  # without a manifest there is no lock
        shutil.rmtree(folder, ignore_errors=True)
        return True
    try:
        if not locked(file, fcntl.LOCK_EX):
            return False
        trash = folder.with_name(f".{folder.name}.gone")
        shutil.rmtree(trash, ignore_errors=True)
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
        return True
    finally:
        os.close(file)


def _opened(folder: Path) -> int | None:
    with suppress(OSError):
        return os.open(folder / manifest.FILE, os.O_RDONLY | os.O_NONBLOCK)
    return None


# Refusals need the manifests alone. Then rank 0 reads every byte of the newest checkpoint; if a checksum differs, it
# reports that, and all ranks use the one before.

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{8,})")
NO_NAMES: Mapping[str, str] = {}  # of a mode whose variants were never renamed


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint on the disk."""

    folder: Path
    manifest: Manifest
    lock: int | None = None  # protects it from removal while it is being read
    saved_as: Mapping[str, str] = field(default_factory=dict)  # by variant the former name of its tensors

    def with_current_names(self, formerly: Mapping[str, str]) -> "FoundCheckpoint":
        """Return a copy whose manifest has the variants' current names; see `Mode.formerly`."""
        saved_as = {formerly[name]: name for name in self.manifest.steps if name in formerly}
        return replace(self, manifest=manifest.with_current_names(self.manifest, formerly), saved_as=saved_as)


def refusals(config: Config, formerly: Mapping[str, str] = NO_NAMES) -> list[str]:
    """Return errors of LAB_RESUME and LAB_CHECKPOINT_EVERY for this run; `formerly` is the mode's."""
    if config.resume == "auto" and config.run_id is None:
        return ["LAB_RESUME=auto continues the run that LAB_RUN_ID names: set LAB_RUN_ID"]
    try:
        wrong = _resume_faults(config, formerly) if config.resume is not None else []
    except OSError as error:  # a path that is too long, or a folder that may not be read
        wrong = [f"LAB_RESUME={quoted(config.resume)} cannot be read: {error.strerror}"]
    if config.checkpoint_every is not None and config.resume == "auto":
        wrong += _unwritable(config)
    return wrong


def _resume_faults(config: Config, formerly: Mapping[str, str]) -> list[str]:
    source, named = resume_path(config), f"LAB_RESUME={quoted(config.resume)}"
    found = candidates(source)
    if config.resume != "auto" and not source.exists():
        where = f"name a run in {config.runs_dir}, or the path of a run or of a checkpoint"
        return [f"{named}: {source} does not exist: {where}"]
    if not found and config.resume != "auto":
        return [f"{named}: {source} holds no checkpoint (a folder such as step-00000020)"]
    unreadable = []
    for folder in found:
        try:
            wrong = misfit(manifest.read(folder), config, formerly)
        except Unreadable as error:
            unreadable.append(f"{folder} {error}")
            continue
        return [f"{named}: {folder} {wrong}"] if wrong else []
    return [f"{named}: {'; '.join(unreadable)}"] if unreadable else []


def misfit(saved: Manifest, config: Config, formerly: Mapping[str, str] = NO_NAMES) -> str:
    """Return why a run of `config` cannot resume from this checkpoint, to follow its path; empty if it can."""
    different = manifest.differences(saved, config)
    if different:
        return f"{different}: set the same values, or leave LAB_RESUME out"
    today = manifest.with_current_names(saved, formerly).steps
    missing = [name for name in config.variant if name not in today]
    if missing:
        return f"holds {', '.join(saved.steps)} and not {', '.join(missing)}: leave LAB_VARIANT={','.join(missing)} out"
    return ""


def _unwritable(config: Config) -> list[str]:
    """Return why the resumed run's folder is not writable."""
    folder = config.runs_dir / str(config.run_id) / FOLDER
    nearest = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    why = f"{nearest} cannot be written by user {os.getuid()}: change its owner"
    return [f"LAB_CHECKPOINT_EVERY={config.checkpoint_every}: {why}"]


def resume_path(config: Config) -> Path:
    """Return the path that LAB_RESUME names: a run's id, or any path."""
    if config.resume == "auto":
        return config.runs_dir / str(config.run_id)
    run = config.runs_dir / str(config.resume)
    return run if run.is_dir() else Path(str(config.resume))


def candidates(source: Path) -> list[Path]:
    """Return the checkpoints of a run or of its checkpoint folder, or a single one, newest first."""
    if NAME.fullmatch(source.name) or (source / manifest.FILE).exists():
        return [source] if source.is_dir() else []
    folder = source / FOLDER if (source / FOLDER).is_dir() else source
    named = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(named, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def choose(
    config: Config, say: Callable[[str], None], formerly: Mapping[str, str] = NO_NAMES
) -> FoundCheckpoint | None:
    """Return the newest good checkpoint, with every byte read; skipped ones are reported.

    None if there is none and LAB_RESUME=auto; raises ConfigError if there are some and none is good.
    """
    try:
        found = newest_good(resume_path(config), say, lambda saved: misfit(saved, config, formerly))
    except Unreadable as error:
        raise ConfigError([f"LAB_RESUME={config.resume!r}: {error}"]) from None
    if found is None and config.resume != "auto":
        raise ConfigError([f"LAB_RESUME={config.resume!r}: {resume_path(config)} holds no checkpoint any more"])
    return found


def newest_good(
    source: Path, say: Callable[[str], None], misfit: Callable[[Manifest], str] = lambda _: ""
) -> FoundCheckpoint | None:
    """Return the newest complete checkpoint of `source` without a `misfit`; `say` gets a sentence for each skipped one.

    None if there is none at all; raises Unreadable, with all reasons, if none is good.
    """
    skipped: list[str] = []
    for folder in candidates(source):
        lock = lock_for_reading(folder)
        try:
            saved = manifest.read(folder)
            wrong = misfit(saved) or "; ".join(damage(folder, saved)[:1])
        except Unreadable as error:
            wrong = str(error)
        if not wrong:
            for sentence in skipped:
                say(f"{sentence}: using step {saved.step} instead")
            return FoundCheckpoint(folder, saved, lock)
        release(lock)
        skipped.append(f"{folder} {wrong}")
    if skipped:
        raise Unreadable("; ".join(skipped))
    return None


def listed_steps(folder: Path) -> set[int]:
    """Return the steps of all checkpoints in a folder, by their names."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return {int(name) for name in names if name.isdecimal()}


def newer_good_steps(source: Path, chosen: int, good: Callable[[Path], bool]) -> list[int]:
    """Return the steps of a run's good checkpoints that are newer than the chosen one."""
    folders = {step: folder for folder in (source, source / "checkpoints") for step in listed_steps(folder)}
    return [
        step for step, folder in sorted(folders.items()) if step > chosen and good(folder / manifest.folder_name(step))
    ]


def damage(folder: Path, saved: Manifest) -> list[str]:
    """Return differences from the manifest, a sentence per file, to follow the checkpoint's path."""
    from distlab.lab.checkpoint import (
        storage,
    )  # 690 modules of torch, for which a run without checkpoints need not wait

    wrong = []
    for name, (size, checksum) in saved.files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"is damaged ({name} is missing)")
        elif path.stat().st_size != size:
            wrong.append(f"is damaged ({name} has {path.stat().st_size} of {size} bytes)")
        elif manifest.sha256(path) != checksum:
            wrong.append(f"is damaged ({name}: its checksum differs)")
    if wrong:
        return wrong
    try:
        named = storage.files_named(folder)
    except storage.Damaged as error:
        return [f"is damaged ({error})"]
    return [f"is incomplete ({name} is missing)" for name in sorted(named - set(saved.files))]
