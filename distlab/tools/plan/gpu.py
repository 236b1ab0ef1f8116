"""GPUs on paper: peaks and links by data sheets, and what of them a training reaches, by published runs.

gpus.json has both. The second part, `fitted`, is written by `python -m benchmarks.plan_fit` from at most five published
runs a kind; a kind without published runs takes the shares of FALLBACK, and the answer says so.
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
# What a ring of NCCL gets of a link's rate with large messages: busbw of nccl-tests' all_reduce, some 230 of 300 GB/s on
# an A100's NVLink and 360 of 450 on an H100's; of InfiniBand 40 to 42 of 50 GB/s a card (nccl issue 1218, all 8 cards).
NODE_LINK_SHARE, LINK_SHARE = 0.75, 0.8


@dataclass(frozen=True)
class Shares:
    """What a training reaches: of the peak in large matrix products and in attention, and of the memory's rate."""

    matrix: float
    attention: float
    memory: float


@dataclass(frozen=True)
class Gpu:
    """One card: dense FLOP/s in 16 bits and in 8 (0: it has none), bytes, and bytes a second of its memory, of its link
    inside a node and of its own to others, one way."""

    name: str
    flops: float
    fp8_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    node_link_bytes_per_s: float
    link_bytes_per_s: float
    gpus_per_node: int
    shares: Shares
    told: str  # where that is from, in words


@cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text())
    return found


def gpu_names() -> list[str]:
    return list(tables()["gpus"])


def shares_of(kind: str) -> Shares:
    row = tables()["fitted"][kind if kind in tables()["fitted"] else FALLBACK]
    return Shares(row["matrix_share"], row["attention_share"], row["memory_share"])


def gpu_named(name: str) -> Gpu:
    """One of the table; raises ConfigError."""
    key = name.lower().replace("_", "-")
    key = {"a100": "a100-80gb", "a100-80": "a100-80gb", "a100-40": "a100-40gb", "h100-sxm": "h100", "4090": "rtx4090", "3090": "rtx3090"}.get(key, key)  # fmt: skip
    row = tables()["gpus"].get(key)
    if row is None:
        raise ConfigError(
            [f"--gpu={name!r} is not in the table{suggest(key, gpu_names())}, allowed: {', '.join(gpu_names())};"
             " any other: --flops and --gpu-memory"]
        )  # fmt: skip
    kind = row["kind"]
    told = f"{kind}: {row['source']}" + (
        "" if kind in tables()["fitted"] else f"; shares of the peak are an {FALLBACK}'s"
    )
    return Gpu(
        key, row["flops"], row["fp8_flops"], row["memory_bytes"], row["memory_bytes_per_s"],
        row["node_link_bytes_per_s"], row["link_bytes_per_s"], row["gpus_per_node"], shares_of(kind), told,
    )  # fmt: skip
