"""Manifests and checkpoints for tests, made without a run."""

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from distlab.lab.checkpoint import manifest, storage
from distlab.lab.checkpoint.manifest import Manifest
from distlab.lab.config import Config

SMALL = {"LAB_MODEL": "mlp", "LAB_WIDTH": "4", "LAB_DEPTH": "1", "LAB_BATCH": "3"}


def config_of(**environ: str) -> Config:
    return Config.read({"RANK": "0", "MASTER_ADDR": "127.0.0.1"} | SMALL | environ)


def manifest_of(step: int, config: Config | None = None, **changed: Any) -> Manifest:
    """Return a manifest after `step` steps of one variant, `flat`, whose epoch has 8 batches of 3 samples."""
    settings = manifest.defining(config or config_of())
    made = Manifest(
        schema=manifest.SCHEMA, run_id="a", world_size=1, settings=settings, data="", versions={}, step=step, steps={"flat": step},
        epoch=step // 8, batch=step % 8, seen=list(range(3 * (step % 8))), losses={"flat": [1.0] * step}, generators={}, draws={},
        files={},
    )  # fmt: skip
    return replace(made, **changed)


def checkpoint(folder: Path, step: int, **changed: Any) -> Path:
    """Write a good checkpoint of one rank, with one tensor whose numbers are the step."""
    made = manifest_of(step, **changed)
    path = folder / made.name
    path.mkdir(parents=True)
    files = storage.save_state({"flat/weights.w": torch.full((3,), float(step))}, path, None)
    manifest.write(path, replace(made, files=storage.file_entries(files, path)))
    return path
