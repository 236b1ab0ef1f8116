"""The classic mistakes of context parallelism, made by LAB_BUG: positions and masks of the part for those of the whole,
parts that are put together wrongly, and gradients that stay where the keys were."""

from functools import partial

from experiments.cp.broken import (
    AsksLate,
    ByArrival,
    KeptBlocks,
    PlainMean,
    ShiftedRows,
    StrayGradients,
    by_local_positions,
    local_mask,
    loss_times_ranks,
)
from experiments.cp.predictions import BY_HAND
from workers.config import Config
from workers.contract import Instead, Mistake, Needs
from workers.parallel.positions import contiguous
from workers.strategies.context import ContextParallel


def too_few(config: Config) -> str:
    """A position a rank is a part that no other one is folded with, or looks at twice."""
    few = config.world_size + 2
    return "" if config.seq >= few else f"LAB_SEQ={config.seq}: it takes {few} positions"


def too_short(config: Config) -> str:
    """Where a rank has a handful of rows, one more or less is as much as the fold is worth."""
    return "" if config.seq >= 8 * config.world_size else f"LAB_SEQ={config.seq}: it takes 8 positions a rank"


def one_head_each(config: Config) -> str:
    """Of rows and heads that no other rank has any, the order does not matter."""
    few = min(config.seq, config.heads)
    return "" if few > 1 else "one head or one position: nothing can be in the wrong order"


MISTAKES = {
    "local_positions": Mistake(
        "every rank looks up position embeddings from 0 on: a part in the middle is taken for a beginning",
        "losses",
        Instead(BY_HAND, {"steps": by_local_positions}),
        Needs(unless=too_few),
    ),
    "local_mask": Mistake(
        "the mask of a folded part is made by local positions, as if it were one run: rows look at later keys, and"
        " miss earlier ones",
        "losses",
        Instead(("zigzag",), {"attention": local_mask}),
        Needs(unless=too_few),
    ),
    "shifted_after_cut": Mistake(
        "targets are made by shifting tokens after the sequence was cut: the last of each part has a wrong one",
        "losses",
        Instead(BY_HAND, {"steps": partial(ContextParallel, rows=ShiftedRows)}),
    ),
    "loss_times_cp": Mistake(
        "the loss is multiplied by the ranks along cp, and the gradients are summed over them all the same: c times too"
        " large (Megatron-LM issue 906)",
        "gradients",
        Instead(BY_HAND, {"steps": loss_times_ranks}),
    ),
    "no_lse": Mistake(
        "what two blocks of keys give is averaged, without their log-sum-exp: each weighs as much as the other",
        "losses",
        Instead(("ring", "zigzag", "shift"), {"attention": PlainMean}),
        Needs(unless=too_few),
    ),
    "stray_gradients": Mistake(
        "dK and dV stay on the rank that computed them: keys learn from their own rank's rows alone",
        "gradients",
        Instead(("ring", "zigzag", "shift"), {"attention": StrayGradients}),
        Needs(unless=too_few),
    ),
    "by_arrival": Mistake(
        "the parts of an all-to-all are put together as they come, and not by rank: positions and heads change places",
        "losses",
        Instead(("ulysses",), {"attention": ByArrival}),
        Needs(unless=one_head_each),
    ),
    "unfolded": Mistake(
        "zigzag holds contiguous parts: every number is right, and the last rank does (2c-1)/c of the mean",
        "balance",
        Instead(("zigzag",), {"cut": contiguous}),
        Needs(proof=False, unless=too_short),
    ),
    "asks_late": Mistake(
        "a rank asks for the next keys when it is done with those that it has: nothing travels while it computes",
        "keys ahead",
        Instead(("ring", "zigzag", "shift"), {"attention": AsksLate}),
        Needs(proof=False, unless=too_few),
    ),
    "kept_blocks": Mistake(
        "a ring keeps all keys and values that came by for its backward pass: as much as if they had been gathered",
        "activation bytes",
        Instead(("ring", "zigzag", "shift"), {"attention": KeptBlocks}),
        Needs(proof=False, unless=too_few),
    ),
}
