"""The card: products, attention, memory, each by size, and the GPT steps that are held against their sum.

`python -m benchmarks.gpu.measured_card FILE` measures one and writes it, with the steps; with LAB_DEVICE=cpu small
sizes, to see that it runs.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.tools.plan.card import BACKWARD_ATTENTION, Attention, Card, Product

ON_CARD = os.environ.get("LAB_DEVICE", "cuda") == "cuda"
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
# Dense bf16 FLOP/s by NVIDIA's data sheets (H100 and H200 SXM, A100, L40S), by a part of the card's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
LEAST_S, MOST_CALLS = 0.02 if ON_CARD else 0.0, 200
SIZES = (1024, 2048, 4096, 8192, 16384) if ON_CARD else (16, 32)
SCORES = [(8192, 2048, 50304), (8192, 50304, 2048), (50304, 8192, 2048)] if ON_CARD else []
POSITIONS = (1024, 2048, 4096, 8192, 16384) if ON_CARD else (64,)
TOKENS, WIDTH, VOCABULARY = (8192, 4096, 50304) if ON_CARD else (32, 16, 64)
STEPS = 3
# layers, width, heads, positions, samples
SHAPES = [
    (24, 1024, 16, 2048, 8), (24, 2048, 16, 2048, 4), (10, 4096, 32, 2048, 4), (10, 4096, 32, 8192, 1),
    (4, 8192, 64, 2048, 2),
]  # fmt: skip
TINY = [(2, 32, 2, 16, 2), (1, 64, 4, 16, 2), (2, 64, 2, 32, 1), (3, 32, 2, 16, 2), (1, 32, 2, 64, 1)]


def seconds(call: Callable[[], object], warm: int = 2) -> float:
    """Of one of many calls in a row, which together take LEAST_S or longer."""
    for _ in range(warm):
        call()
    synchronize()
    began, calls = time.perf_counter(), 0
    while calls < MOST_CALLS and (calls == 0 or time.perf_counter() - began < LEAST_S):
        for _ in range(5):
            call()
        calls += 5
        synchronize()
    return (time.perf_counter() - began) / calls


def synchronize() -> None:
    if ON_CARD:
        torch.cuda.synchronize()


def drawn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_(grad)


def card_name() -> str:
    return torch.cuda.get_device_name() if ON_CARD else "cpu"


def warm_up(until_s: float = 2.0) -> None:
    """A card is fastest when it is cold: what lasts is what counts."""
    if ON_CARD:
        a, began = drawn(8192, 8192), time.perf_counter()
        while time.perf_counter() - began < until_s:
            a @ a
            synchronize()


def measure_card() -> Card:
    """Everything that a step is predicted from."""
    warm_up()
    products = []
    for rows, inner, columns in [*product(SIZES, repeat=3), *SCORES]:
        left, right = drawn(rows, inner), drawn(columns, inner)
        taken = seconds(partial(F.linear, left, right))
        products.append(Product(rows, inner, columns, 2 * rows * inner * columns / taken))
    attention = [measure_attention(positions) for positions in POSITIONS]
    peak = next((flops for name, flops in PEAKS.items() if name in card_name()), max(each.flops for each in products))
    return Card(card_name(), peak, products, attention, measure_numbers(), measure_memory())


def measure_attention(positions: int) -> Attention:
    samples, heads, size = max(1, TOKENS // positions), max(1, WIDTH // 128), min(128, WIDTH)
    q, k, v = (drawn(samples, heads, positions, size, grad=True) for _ in range(3))
    flops = 2 * samples * heads * positions**2 * size

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        forward().backward(q.detach())

    forward_s = seconds(forward)
    backward_s = max(seconds(both) - forward_s, forward_s / 10)
    return Attention(positions, flops / forward_s, BACKWARD_ATTENTION * flops / backward_s)


def measure_memory() -> float:
    """Bytes read and written a second by a copy."""
    source = torch.empty(1 << (28 if ON_CARD else 12), device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 4 * source.numel() / seconds(lambda: target.copy_(source))


def measure_numbers() -> dict[str, float]:
    """Seconds a number of what is bound by memory, forward and backward where it has both."""
    x, wide, norm = drawn(TOKENS, WIDTH, grad=True), drawn(TOKENS, 4 * WIDTH, grad=True), nn.LayerNorm(WIDTH)
    norm = norm.to(DEVICE, torch.bfloat16)
    own, own_wide = x.detach(), wide.detach()
    scores, targets = drawn(TOKENS, VOCABULARY, grad=True), torch.zeros(TOKENS, device=DEVICE, dtype=torch.long)
    weights = [drawn(WIDTH, WIDTH, grad=True) for _ in range(8)]
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, fused=ON_CARD)

    def update() -> None:
        step_masters(weights, masters, optimizer)

    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    numbers = {
        "norm": (x.numel(), lambda: norm(x).backward(own)),
        "gelu": (wide.numel(), lambda: F.gelu(wide).backward(own_wide)),
        "add": (x.numel(), lambda: own + own),
        "copy": (x.numel(), lambda: own.clone()),
        "loss": (scores.numel(), lambda: F.cross_entropy(scores.float(), targets).backward()),
        "update": (sum(weight.numel() for weight in weights), update),
    }
    return {kind: seconds(call) / count for kind, (count, call) in numbers.items()}


@torch.no_grad()
def step_masters(weights: Sequence[Tensor], masters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """AdamW of float32 masters by gradients of 16 bits, and the weights from them."""
    for weight, master in zip(weights, masters, strict=True):
        assert weight.grad is not None
        master.grad = weight.grad.float()
    optimizer.step()
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)
        master.grad = None


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, positions, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(samples, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(samples, positions, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return out


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.token(tokens) + self.position.weight)
        return F.cross_entropy(self.scores(self.norm(hidden)).flatten(0, 1).float(), tokens.flatten())


def time_step(card: Card, shape: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """Seconds of a step, beside what the card's parts add up to, its MFU and the allocator's peak."""
    layers, width, heads, positions, samples = shape
    if ON_CARD:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.device(DEVICE):
        model = GPT(layers, width, heads, positions).to(torch.bfloat16)
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, fused=ON_CARD)
    tokens = torch.randint(0, VOCABULARY, (samples, positions), device=DEVICE)
    taken = []
    for _ in range(2 + STEPS):
        synchronize()
        began = time.perf_counter()
        model(tokens).backward()
        step_masters(weights, masters, optimizer)
        for weight in weights:
            weight.grad = None
        synchronize()
        taken.append(time.perf_counter() - began)
    step_s, numbers = sorted(taken[2:])[STEPS // 2], sum(weight.numel() for weight in weights)
    found = dict(card.parts(layers, width, positions, samples, VOCABULARY))
    predicted_s = sum(found.values())
    # Model FLOPs: 6 a weight that multiplies (no embedding), and attention's causal half, forward and twice backward.
    flops = samples * positions * (6 * (numbers - (VOCABULARY + positions) * width) + 6 * layers * positions * width)
    return {
        "layers": layers, "width": width, "heads": heads, "positions": positions, "samples": samples,
        "parameters": numbers, "step_s": step_s, "predicted_s": predicted_s, "off": predicted_s / step_s - 1,
        "mfu": flops / step_s / card.peak, "parts_s": found,
        "peak_bytes": torch.cuda.max_memory_allocated() if ON_CARD else 0,
    }  # fmt: skip


def main(words: list[str]) -> int:
    """Measure, and write after each part what there is."""
    path, found = Path(words[0]), dict[str, Any]()
    if not ON_CARD:
        torch.set_num_threads(1)

    def write(name: str, value: Any) -> None:
        found[name] = value
        path.write_text(json.dumps(found))

    card = measure_card()
    write("card", card._asdict())
    steps: list[dict[str, Any]] = []
    for shape in SHAPES if ON_CARD else TINY:
        try:
            steps.append(time_step(card, shape))
        except torch.OutOfMemoryError as error:
            steps.append({"shape": shape, "error": str(error).splitlines()[0]})
        gc.collect()
        write("steps", steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
