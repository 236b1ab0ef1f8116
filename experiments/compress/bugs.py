"""Classic bugs of compression, injected by LAB_BUG, each with the check that must catch it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.contract import Mistakes, Needs
from distlab.lab.config import Config
from distlab.techniques.compression.compressors import Compressor, Handle, Quantised, RandomK, rank_seed
from distlab.techniques.compression.powersgd import LowRank, first_factor, orthonormal
from distlab.techniques.data_parallel.buckets import GradientBuckets, MakeAllReduce

from .options import Options
from .predictions import METHODS

mistake = Mistakes()


# --- settings that hide a bug ---


def all_sent(config: Config) -> str:
    """Return a sentence if everything is sent, or error feedback is off anyway."""
    own = config.own(Options)
    if not own.error_feedback:
        return "LAB_ERROR_FEEDBACK=0: there is no residual to lose"
    chosen = {name for name in METHODS if not config.variant or name in config.variant}
    return "LAB_RATIO=1: all numbers are sent" if chosen <= {"topk", "randomk"} and own.ratio == 1 else ""


def all_positions(config: Config) -> str:
    """If all positions are drawn, seeds do not matter."""
    return "LAB_RATIO=1: all positions are drawn" if config.own(Options).ratio == 1 else ""


def few_rows(config: Config) -> str:
    """A matrix's gradient has at most as high a rank as the batch has rows, so factors of that rank are exact."""
    rows = config.batch * (config.seq if config.model == "gpt" else 1)
    low_rank = config.own(Options).low_rank
    if low_rank < rows:
        return ""
    return f"LAB_LOW_RANK={low_rank}: gradients of {rows} rows have no higher rank, allowed: less than {rows}"


# --- the bugs ---


class Forgetful:
    """A compressor that loses its residual before the next step."""

    residual = None

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor

    def __call__(self, bucket: Tensor) -> Handle:
        self.compressor.residual = None
        return self.compressor(bucket)


@mistake(
    "no_error_feedback",
    check="sent + residual",
    part="GradientBuckets",
    of=METHODS,
    needs=Needs(ranks=1, unless=all_sent),
)
class ForgetfulBuckets(GradientBuckets):
    """The unsent part is dropped although error feedback is on: it never reaches the weights."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: float, *,
        make_all_reduce: MakeAllReduce,
    ) -> None:  # fmt: skip
        def make_forgetful(shapes: list[torch.Size]) -> Forgetful | Compressor:
            compressor = make_all_reduce(shapes)
            assert isinstance(compressor, Compressor)
            return Forgetful(compressor) if compressor.feedback else compressor

        super().__init__(parameters, group, bucket_bytes, make_all_reduce=make_forgetful)


@mistake("unshared_seed", check="formula", part="RandomK", of=("randomk",), needs=Needs(unless=all_positions))
class OwnPlaces(RandomK):
    """Each rank draws random-k's positions with its own seed: numbers of different positions are added."""

    def __init__(self, group: dist.ProcessGroup, ratio: float, seed: int, *, feedback: bool) -> None:
        super().__init__(group, ratio, rank_seed(seed, group.rank()), feedback=feedback)


@mistake("int8_overflow", check="formula", part="Quantised", of=("int8",))
class Overflowing(Quantised):
    """Codes of up to 127 are added in 8 bits: 127 + 127 wraps to -2.

    It uses all levels of 8 bits, for any number of added codes.
    """

    def __init__(self, group: dist.ProcessGroup, seed: int, *, feedback: bool) -> None:
        super().__init__(group, seed, feedback=feedback)
        self.levels = 127


@mistake("per_rank_powersgd", check="rank", part="LowRank", of=("powersgd",), needs=Needs(unless=few_rows))
class PerRank(LowRank):
    """Each rank factors its gradient alone and the products are added: rank N·r, and a dense tensor is sent."""

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
