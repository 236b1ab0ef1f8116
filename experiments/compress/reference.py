"""What each rank sends of a bucket, by the papers' formulas, in one process: dense tensors, loops, nothing distributed.

The compressors are held against it step by step. It gets the ranks' gradients and no more: the
residuals are its own (Karimireddy et al. 2019, algorithm 2: v = e + g, e = v - C(v)), so that what a rank forgets, or
keeps twice, shows in the next step's sum. It shares the seeds with them, and no code. Where a paper leaves a choice, it
is held by what it has to satisfy, below: the places of random-k, and PowerSGD.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from distlab.compression.compressors import Handle, rank_seed
from distlab.config import Config
from distlab.contract import Build, Strategy
from distlab.data_parallel.buckets import GradientBuckets
from distlab.data_parallel.strategy import Replica
from distlab.lab import Lab
from distlab.measure.tensors import larger, largest, largest_difference, sampling_errors
from distlab.workload.model import Model

from .options import Options

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # of one addition on the wire, over the summands
TINY = torch.finfo(torch.float64).tiny


class Reference:
    """One bucket of all ranks. It remembers what the method remembers: residuals and random generators."""

    def __init__(self, method: str, config: Config, *, feedback: bool) -> None:
        self.method, self.ratio, self.feedback = method, config.own(Options).ratio, feedback
        ranks = range(config.world_size)
        self.rounding = [torch.Generator().manual_seed(rank_seed(config.seed, rank)) for rank in ranks]
        self.residuals: list[Tensor] = []

    def judge(self, gradients: list[Tensor], total: Tensor) -> tuple[float, Tensor]:
        """How far the ranks' `total` [n] is from the sum of what each should have sent, over it, and that sum.

        `gradients` [n] a rank, float64.
        """
        residuals = self.residuals or [torch.zeros_like(each) for each in gradients]
        values = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        sent = self.randomk(values, total) if self.method == "randomk" else self.sent(values)
        if self.feedback:
            self.residuals = [value - of_rank for value, of_rank in zip(values, sent, strict=True)]
        size = added([each.abs() for each in sent])
        if self.method not in ROUNDING:  # a rounding is relative to its own number, all else to the largest one
            size = size.max()
        return largest((total - added(sent)) / size.clamp(min=TINY)), added(sent)

    def sent(self, values: list[Tensor]) -> list[Tensor]:
        """What each rank's message says, dense: `values` [n] a rank are gradient and residual, float64."""
        found: list[Tensor] = getattr(self, self.method)(values)
        return found

    def kept(self, values: list[Tensor]) -> int:
        return max(1, round(self.ratio * len(values[0])))

    def bf16(self, values: list[Tensor]) -> list[Tensor]:
        return [value.bfloat16().double() for value in values]

    def fp16(self, values: list[Tensor]) -> list[Tensor]:
        most = torch.finfo(torch.float16).max / (len(values) + 1)
        return [value.clamp(-most, most).half().double() for value in values]

    def int8(self, values: list[Tensor]) -> list[Tensor]:
        """Codes between two integers, the upper one with the probability of the remainder; N of them within 127."""
        scale = max(value.abs().max().item() for value in values) / (127 // len(values))
        draws = [
            torch.rand(value.shape, generator=g, dtype=value.dtype).to(value.device)
            for value, g in zip(values, self.rounding, strict=True)
        ]
        if scale == 0:
            return values
        return [torch.floor(value / scale + draw) * scale for value, draw in zip(values, draws, strict=True)]

    def topk(self, values: list[Tensor]) -> list[Tensor]:
        """The k largest; of equal ones the first."""
        sent = []
        for value in values:
            sizes = value.abs()
            candidates = (sizes >= sizes.topk(self.kept(values)).values[-1]).nonzero().flatten()
            order = sizes[candidates].sort(descending=True, stable=True).indices
            sent.append(masked(value, candidates[order[: self.kept(values)]]))
        return sent

    def randomk(self, values: list[Tensor], total: Tensor) -> list[Tensor]:
        """At most k places, which are those where there is a sum: all ranks have to have drawn the same."""
        places, k = total.nonzero().flatten(), self.kept(values)
        scale = 1.0 if self.feedback else len(total) / k  # unbiased where nothing comes later
        return [masked(value, places[:k]) * scale for value in values]

    def sign(self, values: list[Tensor]) -> list[Tensor]:
        return [torch.where(value >= 0, value.abs().mean(), -value.abs().mean()) for value in values]


def masked(values: Tensor, places: Tensor) -> Tensor:
    sparse = torch.zeros_like(values)
    sparse[places] = values[places]
    return sparse


def added(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


# What a bucket gets, gives and keeps, written down while it is summed: on what the proof rests.


class Witness:
    """An AllReduce that stands before another, and knows of the last step on this rank, flat:"""

    gradient: Tensor  # as the backward pass left it
    before: Tensor  # residual that the step found
    rest: Tensor  # residual that it left
    total: Tensor  # what all ranks then hold as their sum

    def __init__(self, watched: Any) -> None:
        self.watched = watched
        self.lost = 0.0  # the largest difference of a residual found from the one that the step before left

    def __call__(self, bucket: Tensor) -> Handle:
        self.gradient, self.before = bucket.clone(), self.residual(bucket).clone()
        left = getattr(self, "rest", torch.zeros_like(bucket))
        self.lost = larger(self.lost, largest_difference(self.before, left))
        handle = self.watched(bucket)

        def end() -> None:
            if handle is not None:
                handle.wait()
            self.rest, self.total = self.residual(bucket).clone(), bucket.clone()

        return Handle(end)

    def residual(self, like: Tensor) -> Tensor:
        """What is kept, zero where nothing is."""
        residual: Tensor | None = getattr(self.watched, "residual", None)
        return torch.zeros_like(like) if residual is None else residual


def watch_buckets(strategy: Strategy) -> tuple[GradientBuckets, list[Witness]]:
    """The buckets of a strategy, and from here on a witness of each."""
    assert isinstance(strategy, Replica)
    buckets = strategy.gradients
    assert isinstance(buckets, GradientBuckets)
    witnesses = [Witness(each) for each in buckets.all_reduces]
    buckets.all_reduces[:] = witnesses
    return buckets, witnesses


# Gradients that a method can say whole, or has to bear: what comes out, and what is left over.
#
# One of a kind that suits the method has to come out as the dense sum, with nothing left; one of zeros as zeros, though
# its scale is zero; and of one beyond the range of 16 bits casts send what fits N times, and keep the rest.

TOLERANCE = 1e-12  # over the largest number that is summed
CONTROLS = "tests/experiments/test_compress.py::{}"
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_limits(lab: Lab, name: str, method: str, build: Build) -> None:
    """Each gradient through a strategy of its own."""
    low_rank = lab.config.own(Options).low_rank
    shape = Size((4 * low_rank + 8, 3 * low_rank + 6))  # two factors of it are smaller
    gradient = exact_gradient(method, lab.rank, lab.world_size, shape, low_rank).to(lab.device)
    control = CONTROLS.format("test_a_limit_that_is_missed_fails_the_run")
    off = max(passed(lab, build, shape, each) for each in (gradient, torch.zeros_like(gradient)))
    lab.check("limit", off, TOLERANCE, name, control=control)
    if method in CASTS:
        # Twice what one rank may send, the same sign on all: N of them would be beyond it on the way.
        beyond = torch.full_like(gradient, 2 * torch.finfo(CASTS[method]).max / (lab.world_size + 1))
        witness = sender(lab, build, shape, ratio=1.0)(beyond)
        left = witness.rest if lab.config.own(Options).error_feedback else beyond - witness.total / lab.world_size
        detail = "twice what a rank may send of 16 bits: a number, and half of it is left"
        off = largest(left / beyond - 0.5)
        # The limit itself is rounded to 16 bits, and N of them to the sum, by half an epsilon each.
        roundings = (lab.world_size + 1) * torch.finfo(CASTS[method]).eps / 2
        lab.check("range", off, roundings, name, detail, control=control)


def passed(lab: Lab, build: Build, shape: Size, gradient: Tensor) -> float:
    """The largest difference to the dense sum or number left over, over the largest number of the sum."""
    witness = sender(lab, build, shape, ratio=1.0)(gradient)
    dense, rest = gradient.clone(), witness.rest.clone()
    for tensor in (dense, rest):
        dist.all_reduce(tensor, group=lab.group)
    return larger(largest_difference(witness.total, dense), largest(rest)) / (largest(dense) or 1.0)


def sender(lab: Lab, build: Build, shape: Size, **options: Any) -> Callable[[Tensor], Witness]:
    """Of one matrix of `shape` what becomes of this rank's gradients [n], flat, one after the other; the mode's own
    `options` are other ones."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    model = Model("limit", [layer], nn.Identity()).to(lab.device, torch.float64)
    gradients, [witness] = watch_buckets(build(model, lab.mesh, lab.config.with_own(**options)))

    def send(gradient: Tensor) -> Witness:
        gradients.zero()
        with gradients.accumulate(last=True):
            (layer.weight.flatten() @ gradient).backward()  # of which it is the gradient
        gradients.finish()
        return witness

    return send


def exact_gradient(method: str, rank: int, world_size: int, shape: Size, low_rank: int) -> Tensor:
    """This rank's gradient that the method can say whole, flat, float64.

    bf16, fp16: small integers. int8: integers up to the number of levels. topk, randomk: any, at ratio 1. sign: one
    magnitude a rank. powersgd: matrices of half its rank, in one column space, so that their sum has it too; of its
    whole rank the drawn Q all but misses a direction (2.6e-12 at rank 320).
    """
    generator = torch.Generator().manual_seed(rank)
    shared = torch.Generator().manual_seed(world_size)
    if method == "int8":
        levels = 127 // world_size
        codes = torch.randint(-levels, levels + 1, shape, generator=generator).double().flatten()
        codes[0] = levels  # so that the scale is one
        return codes
    if method == "sign":
        signs = torch.randint(2, shape, generator=generator).double().flatten() * 2 - 1
        return signs * (rank + 2)
    if method == "powersgd":
        inner = (low_rank + 1) // 2
        columns = torch.randn(shape[0], inner, generator=shared, dtype=torch.float64)
        return (columns @ torch.randn(inner, shape[1], generator=generator, dtype=torch.float64)).flatten()
    return torch.randint(-7, 8, shape, generator=generator).double().flatten()


# What is drawn at random, held to what it claims: no side is preferred, and no step repeats another.
#
# Sums are held to the formula with the draws that the compressor makes, whatever these are; so the draws have to be
# looked at by themselves. Each figure is counted against its expectation, in deviations of as many fair draws: more
# than SIGMAS of them is no chance (one in 10^9), and the numbers come from the seed, so a run that holds holds again.
#
#     int8     of n numbers a share f above a code, n·f go up (Alistarh et al. 2017, section 3.1: unbiased)
#     randomk  k different places, the same on all ranks; over the steps their mean is the middle, and two steps share
#              k²/n of them, which a hypergeometric draw would (Stich et al. 2018, section 2.2)

SIGMAS = 6.0
SHAPE = Size((64, 32))
SHARES = (0.125, 0.5, 0.75)
RATIOS, DRAWN_STEPS = (0.25, 0.5), 4  # of the places: above a quarter they are drawn in another way; and how many draws
CONTROL = "tests/experiments/test_compress.py::test_draws_that_prefer_fail_the_run"


def check_draws(lab: Lab, name: str, method: str, build: Build) -> None:
    """The largest deviation, in sigmas, of a method that draws."""
    if method not in ("int8", "randomk"):
        return
    off = rounded_up(lab, build) if method == "int8" else max(places(lab, build, ratio) for ratio in RATIOS)
    lab.check("drawn", off, SIGMAS, name, "the worst figure, of as many fair draws", unit="deviations", control=CONTROL)


def rounded_up(lab: Lab, build: Build) -> float:
    """Codes of the whole range and a share above, the same on all ranks; the largest is a whole code."""
    worst, levels, numel = 0.0, 127 // lab.world_size, SHAPE.numel()
    codes = torch.arange(numel, dtype=torch.float64, device=lab.device) % (2 * levels - 1) - levels + 1  # to L - 1
    for share in SHARES:
        values = codes + share
        values[codes == levels - 1] = levels  # which makes the scale one
        fair = values != levels
        total = sender(lab, build, SHAPE, ratio=1.0)(values).total
        ups = (total - lab.world_size * codes)[fair].round().sum().item()
        worst = max(worst, sampling_errors(ups, lab.world_size * int(fair.sum()), share))
    return worst


def places(lab: Lab, build: Build, ratio: float) -> float:
    """Where there is a sum, step after step, of gradients without a zero."""
    numel, gradient = (
        SHAPE.numel(),
        torch.full((SHAPE.numel(),), lab.rank + 1.0, dtype=torch.float64, device=lab.device),
    )
    send = sender(lab, build, SHAPE, ratio=ratio, error_feedback=False)
    drawn = [send(gradient).total.nonzero().flatten() for _ in range(DRAWN_STEPS)]
    k = round(ratio * numel)
    if any(len(each) != k for each in drawn):
        return math.inf
    left = 1 - k / numel  # a draw without repetition varies less, by about what is left
    middle = torch.cat(drawn).double().mean().item() - (numel - 1) / 2
    spread = math.sqrt((numel**2 - 1) / 12 * left / (DRAWN_STEPS * k))
    shared = [int(torch.isin(one, other).sum()) for one, other in itertools.pairwise(drawn)]
    alike = k * k / numel
    return max(abs(middle) / spread, *(abs(same - alike) / math.sqrt(alike * left * left) for same in shared))


# PowerSGD's sum, held against what algorithm 1 makes of it whatever basis it took (Vogels et al. 2019).
#
# The algorithm leaves a choice: P' is any orthonormal basis of the columns of M Q, and where fewer than r of them are
# independent, any that holds theirs. That is no corner: an embedding's gradient has as many rows as the batch has
# distinct bytes, so its Q has columns of nothing but rounding. Two right programs take two bases there, and a step
# later, when the matrix has more rows, their sums differed by 0.45 of it. So no second program is run here. With S
# the sum of all ranks' matrices and R what all ranks hold for it,
#
#     (S - R) Q = 0       what lies in Q's space arrives whole
#     R^T (S - R) = 0     R is S projected onto a space, and nothing else
#     rank R <= r         a space of r dims at most (checks.py)
#
# hold for every choice, and where S Q has rank r, of P' P'^T S alone: the columns of R hold those of R Q = S Q, so
# they span the same space, and there is one projection onto it. The Q of a step needs no telling: R = P' (S^T P')^T,
# so the rows of one step's R span the next one's Q (warm start). Before the first step it is the one that the seed
# draws.
#
# Residuals are kept here as well, of all ranks together: what lies outside of R (section 3, error feedback).


class Projection:
    """One bucket of all ranks, step by step; `shapes` of the gradients in it, `feedback` if residuals are kept."""

    def __init__(self, config: Config, shapes: list[Size], *, feedback: bool) -> None:
        self.feedback, self.left = feedback, torch.zeros(())
        self.low_rank, self.seed, self.shapes = config.own(Options).low_rank, config.seed, shapes
        self.starts: dict[int, Tensor] = {}  # [n, *] by the matrix' place: its columns span this step's Q

    def judge(self, gradients: list[Tensor], total: Tensor) -> tuple[float, Tensor]:
        """How far `total` [n] is from the algorithm's, over what is summed, and what was sent: `total` itself.

        `gradients` [n] a rank, float64.
        """
        sizes = [shape.numel() for shape in self.shapes]
        summed = torch.stack(gradients).sum(dim=0) + self.left
        most = torch.stack([each.abs() for each in gradients]).sum(dim=0) + self.left.abs()
        self.left = summed - total if self.feedback else self.left
        sums, most_of = summed.split(sizes), most.split(sizes)
        worst = 0.0
        for index, (shape, s, r, size) in enumerate(zip(self.shapes, sums, total.split(sizes), most_of, strict=True)):
            if factored(shape, self.low_rank):
                found = self._projected(index, s.view(shape[0], -1), r.view(shape[0], -1), size.norm())
            else:
                found = over(s - r, size.norm())  # sent whole
            worst = max(worst, found)
        return worst, total

    def _projected(self, index: int, s: Tensor, r: Tensor, size: Tensor) -> float:
        rank = min(self.low_rank, *s.shape)
        draw = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(s.shape[1], rank, generator=draw, dtype=torch.float64)
        q = self.starts.get(index, drawn.to(s.device))
        self.starts[index] = r.T.clone()
        return max(over((s - r) @ q, size * q.norm()), over(r.T @ (s - r), size * size))


def factored(shape: Size, low_rank: int) -> bool:
    """Whether a gradient of this shape travels as two factors: where they are smaller."""
    if len(shape) < 2:
        return False
    m, n = shape[0], math.prod(shape[1:])
    r = min(low_rank, m, n)
    return r * m + r * n < m * n


def over(tensor: Tensor, size: Tensor) -> float:
    """The tensor's norm over `size`; infinite where there is no number."""
    found = (tensor.norm() / size.clamp(min=TINY)).item()
    return found if math.isfinite(found) else math.inf
