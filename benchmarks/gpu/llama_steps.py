"""Steps of Llama 3's layers on one card beside what `distlab plan` predicts from published runs alone.

    python3 -m benchmarks.gpu.llama_steps [FILE]

Few layers, each as wide as the 8B's or the 70B's, with grouped queries, a gated feed-forward part and 128256 tokens to
choose from; in bf16 with float32 masters, nothing or all of a layer's forward pass done again. It prints a row for
each, and writes them to FILE in the form of distlab/tools/plan/published.json. With LAB_DEVICE=cpu tiny ones, to see
that it runs.
"""

import gc
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.measured_card import DEVICE, ON_CARD, STEPS, card_name, synchronize, warm_up
from distlab.tools.plan.costs import cost
from distlab.tools.plan.gpu import gpu_names
from distlab.tools.plan.model import Shape
from distlab.tools.plan.rows import Row, job_and_layout

VOCABULARY = 128256 if ON_CARD else 64


class Case(NamedTuple):
    """A shape, its samples, and whether layers are done again."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    positions: int
    samples: int
    recompute: str


CASES = [
    Case(6, 4096, 32, 8, 14336, 8192, 1, "none"), Case(6, 4096, 32, 8, 14336, 8192, 2, "full"),
    Case(6, 4096, 32, 8, 14336, 32768, 1, "full"), Case(3, 8192, 64, 8, 28672, 8192, 1, "none"),
]  # fmt: skip
TINY = [Case(2, 32, 4, 2, 48, 16, 2, "none"), Case(2, 32, 4, 2, 48, 16, 2, "full")]


class Layer(nn.Module):
    """A block of Llama 3: root-mean-square norms, grouped queries, no biases."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, keys = case.width, case.width * case.kv_heads // case.heads
        self.case, self.sizes = case, [width, keys, keys]
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, width + 2 * keys, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * case.mlp_width, bias=False)
        self.down = nn.Linear(case.mlp_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        samples, positions, width = x.shape
        q, k, v = self.qkv(self.before(x)).split(self.sizes, dim=-1)
        q, k, v = (each.view(samples, positions, -1, width // self.case.heads).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, positions, width))
        gate, up = self.gate_up(self.between(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class Llama(nn.Module):
    """As many layers as the case has, between an embedding and an output layer of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.token, self.again = nn.Embedding(VOCABULARY, case.width), case.recompute == "full"
        self.layers = nn.ModuleList(Layer(case) for _ in range(case.layers))
        self.norm, self.scores = nn.RMSNorm(case.width), nn.Linear(case.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.token(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.again else layer(hidden)
        return F.cross_entropy(self.scores(self.norm(hidden)).flatten(0, 1).float(), tokens.flatten())


def measured(case: Case) -> tuple[float, int, int]:
    """Seconds of a step, bytes at its peak (0 without a card), and parameters."""
    if ON_CARD:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.device(DEVICE):
        model = Llama(case).to(torch.bfloat16)
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizers = [torch.optim.AdamW([master], fused=ON_CARD) for master in masters]
    tokens = torch.randint(0, VOCABULARY, (case.samples, case.positions), device=DEVICE)
    taken = []
    for _ in range(2 + STEPS):
        synchronize()
        began = time.perf_counter()
        model(tokens).backward()
        for weight, master, optimizer in zip(weights, masters, optimizers, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None  # one at a time: no second copy of all gradients
            optimizer.step()
            master.grad = None
            weight.data.copy_(master)
        synchronize()
        taken.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if ON_CARD else 0
    return sorted(taken[2:])[STEPS // 2], peak, sum(weight.numel() for weight in weights)


def row_of(case: Case) -> dict[str, Any]:
    """What was measured, in the form of published.json."""
    step_s, peak, count = measured(case)
    card = next((name for name in gpu_names() if name in card_name().lower()), "h100")
    shape = f"{case.layers}x{case.width} s{case.positions} b{case.samples} {case.recompute}"
    row = {
        "name": f"distlab Llama {shape} 1 {card.upper()}",
        "source": "this repository: python3 -m benchmarks.gpu.llama_steps", "gpu": card, "gpus": 1,
        "parameters": count,
        "shape": asdict(Shape(*case[:5], gated=True, vocabulary=VOCABULARY, tied=False)),
        "sequence": case.positions, "tp": 1, "pp": 1, "cp": 1, "dp": 1, "zero": 0, "chunks": 1,
        "microbatch": case.samples, "global_batch": case.samples, "recompute": case.recompute,
        "step_s": float(f"{step_s:.4g}"),
    }  # fmt: skip
    return row | ({"peak_bytes": float(f"{peak:.4g}")} if peak else {})


def main(words: list[str]) -> int:
    warm_up()
    rows: list[dict[str, Any]] = []
    for case in CASES if ON_CARD else TINY:
        try:
            row = row_of(case)
        except torch.OutOfMemoryError as error:
            print(f"{case}: does not fit: {str(error).splitlines()[0]}")
            gc.collect()
            continue
        rows.append(row)
        priced = cost(*job_and_layout(msgspec.convert(row, Row)))
        peak = f", peak {priced.held_bytes / 1e9:.1f} for {row['peak_bytes'] / 1e9:.1f} GB" if ON_CARD else ""
        off = priced.step_s / row["step_s"] - 1
        step = f"step {1e3 * priced.step_s:.0f} ms predicted, {1e3 * row['step_s']:.0f} measured, {off:+.0%}"
        print(f"{row['name']}: {step}{peak}")
        if words:
            Path(words[0]).write_text(json.dumps(rows, indent=1))
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
