"""The reference model with a mixture of experts in place of each MLP, computed by one process.

A router scores E experts for each token, the best k of them compute it, and their outputs are added up, weighted by the
scores. So the MLPs have E times the parameters, of which each token uses k/E. An expert computes at most `capacity`
tokens of a batch: first choices before second ones, then in the order of the batch. A token beyond the capacity is
dropped: only the residual connection around the mixture carries it. The code is slow on purpose and shares nothing with
distlab/techniques/expert_parallel/layer.py, so that a mistake there is not repeated here.

Sources: Lepikhin et al. 2020, "GShard", section 2.2 (queues, capacity); Fedus et al. 2021, "Switch Transformers",
section 2.2 (balance loss); Zoph et al. 2022, "ST-MoE", section 3.1 (z-loss).
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.config import Config
from distlab.lab.workload.model import MLP, Model, build_model, outline


@dataclass(frozen=True)
class Mixing:
    """The routing of tokens, and the weights of its auxiliary losses, which are means over the tokens of a batch."""

    num_experts: int
    top_k: int
    capacity_factor: float  # capacity over an even share of a batch's choices; 0: unlimited
    balance: float  # of the balance loss
    z: float  # of the router's z-loss


class Router(nn.Module):
    """Compute scores [T, E] of tokens [T, D], at least in float32: a rounded score would change a token's expert."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, width))

    def forward(self, tokens: Tensor) -> Tensor:
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        return F.linear(tokens.to(dtype), self.weight.to(dtype))


class Experts(nn.Module):
    """The weights of E MLPs without biases, as one tensor per matrix."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))


class Mixture(nn.Module):
    """Map [..., D] to [..., D], zeros for a dropped token; `extra` is the sum of the auxiliary losses' terms."""

    def __init__(self, width: int, hidden: int, mixing: Mixing) -> None:
        super().__init__()
        self.mixing = mixing
        self.router = Router(width, mixing.num_experts)
        self.experts = Experts(mixing.num_experts, width, hidden)
        self.extra: Tensor | None = None
        self.tilt = 0.0  # raises every second score, to choose the other of two nearly equal experts

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)  # [T, D]
        scores = self.router(tokens)  # [T, E]
        probabilities = scores.softmax(-1)
        chosen = self._preferred(probabilities)  # [T, k], the best first
        gates = probabilities.gather(1, chosen)
        if self.mixing.top_k > 1:  # one gate divided by itself would be 1, without a gradient for the router
            gates = gates / gates.sum(1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for expert, queue in enumerate(self._queues(chosen)):
            rows, choices = torch.tensor(queue, dtype=torch.long, device=tokens.device).view(-1, 2).unbind(1)
            out = F.gelu(tokens[rows] @ self.experts.up[expert]) @ self.experts.down[expert]
            mixed = mixed.index_add(0, rows, (out * gates[rows, choices, None]).to(tokens.dtype))
        self._weigh(scores, probabilities, chosen)
        return mixed.view_as(hidden)

    def _preferred(self, probabilities: Tensor) -> Tensor:
        number = torch.arange(probabilities.numel(), device=probabilities.device).view_as(probabilities)
        tilted = 1 + self.tilt * ((number + number // self.mixing.num_experts) % 2)
        return (probabilities.detach() * tilted).topk(self.mixing.top_k).indices

    def _queues(self, chosen: Tensor) -> list[list[tuple[int, int]]]:
        """Return for each expert its tokens, each with the index of this choice (0: first)."""
        number, (tokens, top_k) = self.mixing.num_experts, chosen.shape
        factor = self.mixing.capacity_factor
        capacity = math.ceil(factor * top_k * tokens / number) if factor else tokens
        queues: list[list[tuple[int, int]]] = [[] for _ in range(number)]
        for choice, of_tokens in enumerate(chosen.T.tolist()):
            for token, expert in enumerate(of_tokens):
                if len(queues[expert]) < capacity:
                    queues[expert].append((token, choice))
        return queues

    def _weigh(self, scores: Tensor, probabilities: Tensor, chosen: Tensor) -> None:
        mixing = self.mixing
        wanted = chosen.flatten().bincount(minlength=mixing.num_experts).to(scores.dtype)
        balance = mixing.num_experts * (wanted / wanted.sum() * probabilities).sum()
        self.extra = mixing.balance * balance + mixing.z * scores.logsumexp(-1).square().sum()


class MixtureModel(Model):
    """A Model with mixtures as `mlp` in some layers; their auxiliary losses are part of its loss."""

    divisible = False  # capacity and balance depend on the whole batch

    @property
    def mixtures(self) -> dict[str, Any]:
        """Return the mixtures by name, in the order of their layers: each a Mixture, or a strategy's replacement."""
        return {f"layers.{index}.mlp": layer.mlp for index, layer in enumerate(self.layers) if hasattr(layer, "mlp")}

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            raise TypeError("the balance of its experts is part of a mixture's loss: call model(inputs, targets)")
        total = super().forward(inputs, targets)
        terms = targets.shape[1] if self.name == "mlp" else 1  # loss terms per token: in mlp a token is a sample
        for mixture in self.mixtures.values():
            total = total + terms * mixture.extra
            mixture.extra = None  # else the graph would stay alive
        return total


def with_experts(model: Model, width: int, mixing: Mixing) -> MixtureModel:
    """Return a copy of `model` with a mixture in place of each MLP; its weights are not initialised yet."""
    layers = list(copy.deepcopy(model).layers)
    for layer in layers:
        if isinstance(getattr(layer, "mlp", None), MLP):
            layer.mlp = Mixture(width, 4 * width, mixing)
    return MixtureModel(model.name, layers, model.loss)


def build_mixture(config: Config, seed: int, mixing: Mixing) -> MixtureModel:
    """Return LAB_MODEL with experts, in float32 on the CPU, with weights that depend only on `seed`."""
    model = with_experts(build_model(config, seed), config.width, mixing)
    model.initialise(seed)
    return model


def outline_mixture(config: Config, mixing: Mixing) -> MixtureModel:
    """Return the model on the meta device, without numbers, for counting."""
    with torch.device("meta"):
        return with_experts(outline(config), config.width, mixing)
