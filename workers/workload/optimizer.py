"""The optimizer of LAB_OPTIMIZER, and the names under which its state is compared.

SGD is plain, without momentum: its update is the gradient, so that nothing hides a wrong scale. AdamW divides by the
gradient's own size and does hide it, which is why the proof uses SGD (and a step of AdamW apart).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from workers.config import Config


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> torch.optim.Optimizer:
    """A fresh optimizer over `parameters`, with the learning rate of `config`."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.learning_rate)
    return torch.optim.SGD(parameters, lr=config.learning_rate)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors under dense names: 'exp_avg.<parameter>', 'exp_avg_sq.<parameter>', ..."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                yield f"{key}.{name}", value
