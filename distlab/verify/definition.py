"""What the lab's models compute, once more: from their published definitions, by matrices, and without a line of them.

Ranks and the one process that they are held against run the same layers, so a layer that is wrong is wrong on both
sides, and no proof sees it. Here the scores of a model are written down a second time, from the weights by name:

    norm        (x - mean) / sqrt(var + 1e-5)·g + b                    Ba et al. 2016, "Layer Normalization", section 3
    gelu        x·(1 + erf(x/√2)) / 2                                  Hendrycks and Gimpel 2016, section 2
    attention   softmax(q·k/√d over the positions up to one's own)·v   Vaswani et al. 2017, section 3.2
    block       x + attention(norm(x)), then x + MLP(norm(x))          Xiong et al. 2020, figure 1
    mixture     the sum of the k best experts by their gates           Lepikhin et al. 2020, section 2.2
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.config import Config

BALANCE = 0.01  # Fedus et al. 2021, "Switch Transformers", section 2.2
BIAS_RATE = 0.001  # DeepSeek-AI 2024, "DeepSeek-V3", section 4.2


class Computed(NamedTuple):
    """What a model should give."""

    scores: Tensor  # [B, S, V] of a text, else the predictions
    extra: Tensor  # the auxiliary losses of its mixtures, a sum over tokens
    biases: dict[str, Tensor]  # of its routers, after this batch


class Weights:
    """The weights of a model by name, as they are now; `unused` are those that nobody asked for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.unused = set(self.named)

    def __call__(self, name: str) -> Tensor:
        self.unused.discard(name)
        return self.named[name]


def computed(weights: Weights, inputs: Tensor, config: Config, mixing: Any = None) -> Computed:
    """What the model of `config` makes of `inputs`; `mixing` says how its tokens find experts, where it has any."""
    if config.model == "line":
        return Computed(linear(weights, "layers.0", inputs), torch.zeros(()), {})
    text = config.model == "gpt"
    found = Computed(inputs, torch.zeros((), dtype=torch.float64), {})
    if text:
        positions = weights("layers.0.position.weight")[: inputs.shape[1]]
        found = found._replace(scores=weights("layers.0.token.weight")[inputs] + positions)
    for index in range(text, text + config.depth):
        found = block(weights, f"layers.{index}", found, config, mixing)
    if text:
        last = f"layers.{config.depth + 1}"
        to_bytes = weights("layers.0.token.weight" if config.tie else f"{last}.project.weight")
        found = found._replace(scores=norm(weights, f"{last}.norm", found.scores) @ to_bytes.T)
    return found


def num_weights(config: Config, mixing: Any = None) -> int:
    """How many numbers such a model has: 12 D² a block and its vectors, 8 D² of them its MLP's, whose inner width is
    4 D (Radford et al. 2019, section 2.3), or each expert's."""
    width = config.width
    if config.model == "line":
        return 2
    inner = 8 * width**2 + 5 * width
    if mixing is not None:
        inner = mixing.num_experts * (8 * width**2 + width + mixing.by_bias)
    of_layer = inner + 2 * width + (4 * width**2 + 6 * width) * (config.model == "gpt")
    ends = (256 * (2 - config.tie) + config.seq + 2) * width if config.model == "gpt" else 0
    return config.depth * of_layer + ends


def block(weights: Weights, name: str, before: Computed, config: Config, mixing: Any) -> Computed:
    """A layer of gpt, or without its attention one of mlp."""
    x, extra = before.scores, before.extra
    if config.model == "gpt":
        x = x + attention(weights, f"{name}.attention", norm(weights, f"{name}.attention_norm", x), config.heads)
    hidden = norm(weights, f"{name}.mlp_norm", x)
    if mixing is None:
        up = gelu(linear(weights, f"{name}.mlp.up", hidden))
        return Computed(x + linear(weights, f"{name}.mlp.down", up), extra, before.biases)
    mixed, more, biases = mixture(weights, f"{name}.mlp", hidden.flatten(0, -2), mixing)
    return Computed(x + mixed.view_as(x), extra + more, before.biases | biases)


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Each vector with mean 0 and variance 1, then gain and bias."""
    off = x - x.mean(-1, keepdim=True)
    return off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights(f"{name}.weight") + weights(
        f"{name}.bias"
    )


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """x·W' + b."""
    return x @ weights(f"{name}.weight").T + weights(f"{name}.bias")


def gelu(x: Tensor) -> Tensor:
    """x times the share of a normal distribution below it."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def attention(weights: Weights, name: str, x: Tensor, heads: int) -> Tensor:
    """Each position looks at those up to itself, in `heads` parts of the width."""
    q, k, v = (linear(weights, f"{name}.{each}", x).chunk(heads, -1) for each in "qkv")
    behind = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    parts = []
    for query, key, value in zip(q, k, v, strict=True):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        parts.append(scores.masked_fill(behind, -math.inf).softmax(-1) @ value)
    return linear(weights, f"{name}.o", torch.cat(parts, -1))


def mixture(weights: Weights, name: str, tokens: Tensor, mixing: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What the experts make of tokens [T, D], the auxiliary losses, and the router's bias after this batch."""
    number, k, count = mixing.num_experts, mixing.top_k, len(tokens)
    scores = tokens @ weights(f"{name}.router.weight").T
    probabilities = scores.softmax(-1)
    bias = weights(f"{name}.router.bias") if mixing.by_bias else torch.zeros(number, dtype=tokens.dtype)
    chosen = (probabilities + bias).argsort(1, descending=True)[:, :k]
    gates = probabilities.gather(1, chosen)
    gates = gates / gates.sum(1, keepdim=True) if k > 1 else gates
    places = math.ceil(mixing.capacity_factor * k * count / number) if mixing.capacity_factor else count
    up, down = weights(f"{name}.experts.up"), weights(f"{name}.experts.down")
    mixed, taken = torch.zeros_like(tokens), [0] * number
    for choice in range(k):  # first choices before second ones
        for token, expert in enumerate(chosen[:, choice].tolist()):
            if taken[expert] < places:
                taken[expert] += 1
                mixed[token] += gates[token, choice] * (gelu(tokens[token] @ up[expert]) @ down[expert])
    wanted = torch.stack([(chosen == expert).sum() for expert in range(number)]).to(tokens.dtype)
    extra = (BALANCE if mixing.balance else 0.0) * number * (wanted / wanted.sum() * probabilities).sum()
    extra = extra + mixing.z * scores.exp().sum(-1).log().square().sum()
    moved = bias + BIAS_RATE * torch.sign(wanted.mean() - wanted)
    return mixed, extra, {f"{name}.router.bias": moved} if mixing.by_bias else {}
