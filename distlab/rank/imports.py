"""What torch imports at its first use, imported before the run begins, so that it can be frozen with the rest.

A collection walks every object that is not frozen, and so do the meters that look for tensors
(distlab/measure/memory.py). torch's compiler, which DDP, fully_shard and every optimizer of torch.optim bring with
them, is 812 modules of 118,000 objects; its checkpoints are 690 modules more. Imported in the middle of a run they made
each walk 0.1 to 0.2 s: `RUN_MODE=compress WORLD_SIZE=3 LAB_MODEL=mlp LAB_DEPTH=1 LAB_WIDTH=16 LAB_STEPS=4 python -m
workers` took 32 s and takes 20.
"""

import gc
import importlib

import torch

from distlab.config import Config, ConfigError
from distlab.contract import Mode

COMPILER, CHECKPOINTS = "torch._dynamo", "torch.distributed.checkpoint"


def import_and_freeze(config: Config, mode: Mode) -> None:
    """Import what the run of `mode` will use, and leave all that is there now out of every later walk."""
    for module in needed(config, mode):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def needed(config: Config, mode: Mode) -> list[str]:
    """The modules that torch would import by itself later."""
    wanted = [variant for variant in mode.variants if not config.variant or variant.name in config.variant]
    compiler = config.optimizer == "adamw" or any(each.by_torch and each.build is not None for each in wanted)
    checkpoints = config.checkpoint_every is not None or config.resume is not None
    return [COMPILER] * compiler + [CHECKPOINTS] * checkpoints


# Where a rank's tensors live: the processor, or the graphics card that is this rank's.
#
# NCCL wants a card of its own for each rank: rank r takes card LOCAL_RANK, or r where no launcher numbered the ranks
# of a machine. Ranks over gloo may share cards: r modulo their number.


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
