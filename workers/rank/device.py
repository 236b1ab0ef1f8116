"""Where a rank's tensors live: the processor, or the graphics card that is this rank's.

NCCL wants a card of its own for each rank: rank r takes card LOCAL_RANK, or r where no launcher numbered the ranks of a
machine. Ranks over gloo may share cards: r modulo their number.
"""

import torch

from workers.config import Config, ConfigError


def pick_device(config: Config) -> torch.device:
    """The device of this rank; raises ConfigError if the card that it needs is not there."""
    if config.backend in ("gloo", "tcp") and config.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = "LAB_BACKEND=nccl" if config.backend == "nccl" else "LAB_DEVICE=cuda"
    if count == 0:
        raise ConfigError(
            [f"{wanted} needs a GPU and rank {config.rank} sees none: use LAB_BACKEND=gloo LAB_DEVICE=cpu"]
        )
    card = config.local_rank if config.local_rank is not None else config.rank or 0
    if config.backend == "gloo":
        card %= count
    if card >= count:
        raise ConfigError(
            [f"rank {config.rank} needs GPU {card} and sees {count} (GPU 0 to {count - 1}): start fewer ranks"]
        )
    torch.cuda.set_device(card)
    return torch.device("cuda", card)
