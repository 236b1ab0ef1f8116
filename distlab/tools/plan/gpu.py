"""GPUs as the planner knows them: peaks and links from data sheets, shares reached in published runs.

gpus.json has both. `python -m benchmarks.plan_fit` writes its fit to published runs: `fitted` by kind, which is a
chip, or a chip with its software, since other kernels reach other shares on the same chip; `left_out`, the same
without the rows of one source each, with which `distlab plan --score` predicts that source; and `bands`. A kind
without rows uses its chip's shares, and a chip without rows FALLBACK's; the answer states it.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from distlab.lab.config import ConfigError
from distlab.lab.config.settings import suggest

TABLE = Path(__file__).with_name("gpus.json")
FALLBACK = "A100"
# The default software per chip: what its published runs used.
SOFTWARE = {
    "torchtitan": "PyTorch's own products, attention and FSDP, compiled; on H100s those of 500 W",
    "megatron": "Megatron-LM, NeMo and their kin with Transformer Engine, on DGX",
    "mpt": "llm-foundry with the PyTorch and the attention of 2023",
}
# What NCCL's rings reach of a link with large messages: busbw of nccl-tests' all_reduce, some 230 of 300 GB/s on
# an A100's NVLink and 360 of 450 on an H100's; of InfiniBand 40 to 42 of 50 GB/s a card (nccl issue 1218, all 8 cards).
NODE_LINK_SHARE, LINK_SHARE = 0.75, 0.8


@dataclass(frozen=True)
class Shares:
    """Shares that a training reaches: of the peak in large matrix products and in attention, and of the memory's rate;
    `fp8` and `experts` are factors on the products' share, in 8 bits and in the many small products of experts."""

    matrix: float
    attention: float
    memory: float
    fp8: float = 1.0
    experts: float = 1.0


@dataclass(frozen=True)
class Gpu:
    """One card: dense FLOP/s in 16 bits and in 8 (0: none), its memory's bytes, and bytes per second of its memory, its
    link inside a node and its link to other nodes, one way."""

    name: str
    flops: float
    fp8_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    node_link_bytes_per_s: float
    link_bytes_per_s: float
    gpus_per_node: int
    shares: Shares
    told: str  # the source, in words


@cache
def tables() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return found


def gpu_names() -> list[str]:
    return list(tables()["gpus"])


def fitted(chip: str, software: str, without: str = "") -> tuple[str, dict[str, Any]]:
    """Return the nearest kind with rows, and its fit without the rows of one source."""
    rows = tables()["fitted"] | tables()["left_out"].get(without, {})
    kind = next(kind for kind in (f"{chip} {software}", chip, FALLBACK) if rows.get(kind))
    return kind, rows[kind]


def shares_of(chip: str, software: str = "", without: str = "") -> Shares:
    """Return the shares of a chip with this software, fitted without one source."""
    row = fitted(chip, software, without)[1]
    return Shares(*(row[f"{part}_share"] for part in ("matrix", "attention", "memory", "fp8", "expert")))


def loss_of(software: str, *, fp8: bool) -> str:
    """Return how vocabulary scores are stored: torchtitan compiles its loss with its products in 8 bits."""
    return "fused" if fp8 and software == "torchtitan" else "fp32"


def band(kind: str) -> float:
    """Return the factor within which nine of ten numbers of a kind are predicted, with their source left out."""
    return float(tables()["bands"][kind])


def gpu_named(name: str, software: str = "", without: str = "") -> Gpu:
    """Return a GPU of the table; raises ConfigError."""
    key = name.lower().replace("_", "-")
    key = {"a100": "a100-80gb", "a100-80": "a100-80gb", "a100-40": "a100-40gb", "h100-sxm": "h100", "4090": "rtx4090", "3090": "rtx3090"}.get(key, key)  # fmt: skip
    row = tables()["gpus"].get(key)
    if row is None:
        raise ConfigError(
            [f"--gpu={name!r} is not in the table{suggest(key, gpu_names())}, allowed: {', '.join(gpu_names())};"
             " any other: --flops and --gpu-memory"]
        )  # fmt: skip
    kind, row_of_kind = fitted(row["kind"], software, without)
    chip = row["kind"] if key.startswith(row["kind"].lower().replace(" ", "")) else key.upper()
    told = f"{chip}: {row['source']}; shares of the peak are those of {kind}, by {row_of_kind['rows']} published runs"
    told += f" ({SOFTWARE[software]})" if software and kind.endswith(software) else ""
    return Gpu(
        key, row["flops"], row["fp8_flops"], row["memory_bytes"], row["memory_bytes_per_s"],
        row["node_link_bytes_per_s"], row["link_bytes_per_s"], row["gpus_per_node"], shares_of(row["kind"], software, without), told,
    )  # fmt: skip
