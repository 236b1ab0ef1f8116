"""The classic mistakes of compression, made on purpose by LAB_BUG, each with the check that has to see it."""

import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import Config
from workers.lab import Bug
from workers.parallel.compression import Compressor, Handle
from workers.parallel.lowrank import LowRank, first_factor, orthonormal
from workers.parallel.quantised import Quantised

BUGS = {
    "no_error_feedback": Bug(
        "what is not sent is dropped, although error feedback is on: it never reaches the weights", "sent + residual"
    ),
    "unshared_seed": Bug(
        "each rank draws random-k's places from a seed of its own: numbers of different places are added", "formula"
    ),
    "int8_overflow": Bug("codes of up to 127 are added in 8 bits: 127 + 127 wraps to -2", "formula"),
    "per_rank_powersgd": Bug(
        "each rank factors its gradient alone and products are added: rank N·r, and a dense tensor is sent", "rank"
    ),
}

SEEN_IN = {
    "unshared_seed": ("randomk",),
    "int8_overflow": ("int8",),
    "per_rank_powersgd": ("powersgd", "powersgd_plain"),
}


class Forgetful:
    """A compressor whose residual is gone before the next step."""

    residual = None

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor

    def __call__(self, bucket: Tensor) -> Handle:
        self.compressor.residual = None
        return self.compressor(bucket)


class Overflowing(Quantised):
    """As many levels as 8 bits have, whatever the number of codes that are added."""

    def __init__(self, group: dist.ProcessGroup, seed: int, *, feedback: bool) -> None:
        super().__init__(group, seed, feedback=feedback)
        self.levels = 127


class PerRank(LowRank):
    """Factors of each rank's own, as the lesson had them; what is summed are the products."""

    def __call__(self, bucket: Tensor) -> Handle:
        values = self.with_residual(bucket)
        sent = values.clone()
        matrices, _ = self.members(sent)
        for matrix in matrices:
            random = first_factor(torch.Size((matrix.shape[1], self.rank)), self.seed + self.group.rank())
            p = orthonormal(matrix @ random.to(matrix))
            matrix.copy_(p @ (p.T @ matrix))
        if self.feedback:
            values.sub_(sent)
        bucket.copy_(sent)
        work = dist.all_reduce(bucket, group=self.group, async_op=True)
        return Handle(lambda: work.wait())


def invisible(config: Config, feedback_variants: tuple[str, ...]) -> list[str]:
    """A sentence if no check could see LAB_BUG with these settings."""
    bug = config.bug
    if bug not in BUGS:
        return []
    makers = SEEN_IN.get(bug, feedback_variants)
    chosen = [name for name in makers if not config.variant or name in config.variant]
    rows = config.batch * (config.seq if config.model == "gpt" else 1)  # no gradient of a matrix has a higher rank
    reasons = [
        (not config.proof, "LAB_PROOF=0: nothing is compared"),
        (bug != "no_error_feedback" and config.world_size == 1, "WORLD_SIZE=1: it takes two ranks"),
        (bug == "no_error_feedback" and not config.error_feedback, "LAB_ERROR_FEEDBACK=0: there is none to forget"),
        (not chosen, f"these variants: it takes {' or '.join(makers)}"),
        (bug == "unshared_seed" and config.ratio == 1, "LAB_RATIO=1: all places are drawn"),
        (set(chosen) <= {"topk", "randomk"} and config.ratio == 1, "LAB_RATIO=1: all numbers are sent"),
        (
            bug == "per_rank_powersgd" and config.low_rank >= rows,
            f"LAB_LOW_RANK={config.low_rank}: gradients of {rows} rows have no higher rank, allowed: less than {rows}",
        ),
    ]
    return [f"LAB_BUG={bug} cannot show with {reason}" for applies, reason in reasons if applies][:1]
