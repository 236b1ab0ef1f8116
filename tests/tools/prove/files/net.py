"""The model of these files: a few residual blocks over tokens; the samples of a batch have different padding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH, SAMPLES, PADDING = 11, 6, 5, 19, -100


class Block(nn.Module):
    """A residual block, as in a transformer without its attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = hidden + self.drop(self.down(F.gelu(self.up(self.norm(hidden)))))
        return found


class Head(nn.Module):
    """A norm, and scores for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.score = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.score(self.norm(hidden))
        return scores


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: int = 2, dropout: float = 0.0, *, tied: bool = False) -> None:
        super().__init__()
        first, last = nn.Embedding(VOCABULARY, WIDTH), Head()
        if tied:
            last.score.weight = first.weight
        self.layers = nn.ModuleList([first, *(Block(dropout) for _ in range(blocks)), last])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def model(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=draw)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    for sample in range(SAMPLES):  # 1 to 5 tokens each
        targets[sample, 1 + sample % LENGTH :] = PADDING
    return inputs, targets


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    scores = model(inputs)
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=PADDING)
