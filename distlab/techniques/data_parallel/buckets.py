"""Gradients in flat buckets, summed over a group while the backward pass still runs.

A collective costs a latency whatever its size, so a gradient at a time is slow; one collective after the backward
pass leaves the link idle while the cores work. Between them stand buckets (Li et al. 2020, "PyTorch Distributed",
section 3.2): parameters in reverse order of registration, which is roughly the order in which the backward pass
reaches them, laid out once in flat buffers of which every gradient is a view. A bucket is launched when the
last of its gradients is written, and always after those before it: ranks that launched in different orders would sum
one bucket with another.

Gradients are summed and never divided: whoever scales each rank's loss by its share of the global batch gets the mean,
however unevenly the batch was dealt.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.collectives.phases import phase

# Begins to sum a flat tensor over the group, in place; returns a handle to `wait` for, or None if it is done.
AllReduce = Callable[[Tensor], Any]
# The same for one bucket alone, made for the shapes of the gradients that lie in it: it may keep something between
# steps.
AllReduceOf = Callable[[list[torch.Size]], AllReduce]


def layout(sizes: Sequence[int], bucket_bytes: float) -> list[list[int]]:
    """Which parameters share a bucket: indices into `sizes` (bytes, in order of registration), last parameter first.

    A bucket is closed once it holds `bucket_bytes`, so that none is smaller but the last. A tensor is never cut.
    """
    buckets: list[list[int]] = []
    held = bucket_bytes
    for index in reversed(range(len(sizes))):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def broadcast_parameters(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank of `group` the values of its first one, in a single broadcast."""
    tensors = [parameter.detach() for parameter in parameters]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.broadcast(flat, group=group, group_src=0)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


class GradientBuckets:
    """The gradients of `parameters`, summed over `group` once a step.

        buckets.zero()
        for microbatch in microbatches:
            with buckets.accumulate(last=microbatch is microbatches[-1]):
                loss(microbatch).backward()
        buckets.finish()

    Autograd hands over a fresh tensor for each gradient; a hook copies it to its place and makes `parameter.grad` that
    view of the bucket, where later microbatches are added. A bucket so is never filled with zeros and added to, which
    costs twice the memory traffic: 3 to 5 % of a step of a GPT of 10M parameters on 2 ranks.

    Args:
        parameters: in order of registration, of one dtype and device; a tied one counts once.
        group: the ranks that hold replicas.
        bucket_bytes: size at which a bucket is closed.
        all_reduce: what sums every bucket; by default the group's own, asynchronous.
        all_reduce_of: what makes each bucket an all_reduce of its own instead, such as one that compresses.
        overlap: launch from hooks during the last backward pass, or all together after it.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: float, *,
        all_reduce: AllReduce | None = None, all_reduce_of: AllReduceOf | None = None, overlap: bool = True,
    ) -> None:  # fmt: skip
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        shared = all_reduce or partial(dist.all_reduce, group=group, async_op=True)
        self.overlap = overlap
        self.buckets: list[Tensor] = []
        self.all_reduces: list[AllReduce] = []  # of each bucket
        self._members: list[list[tuple[nn.Parameter, Tensor]]] = []  # of each bucket: parameters and their views
        for indices in layout([p.numel() * p.element_size() for p in trained], bucket_bytes):
            members = [trained[index] for index in indices]
            self.all_reduces.append(all_reduce_of([member.shape for member in members]) if all_reduce_of else shared)
            self._add_bucket(members)
        self._armed = False
        self._begin()

    def zero(self) -> None:
        """Begin a step: no gradients. The buckets keep their numbers until the new ones are written over them."""
        for parameter, _ in chain.from_iterable(self._members):
            parameter.grad = None

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch; only the last one's gradients are complete, and launched."""
        self._armed = last and self.overlap
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """Launch what no hook launched, and wait for all sums; every parameter then has its gradient."""
        while self._next < len(self.buckets):
            for parameter, view in self._members[self._next]:
                if parameter.grad is None:  # the loss did not reach it here, but may have on another rank
                    parameter.grad = view.zero_()
            self._launch_next()
        with phase("wait"):
            for handle in self._handles:
                if handle is not None:
                    handle.wait()
        self._begin()

    def _begin(self) -> None:
        self._missing = [len(members) for members in self._members]  # gradients that a bucket still waits for
        self._next = 0  # the first bucket that is not launched
        self._handles: list[Any] = []

    def _add_bucket(self, parameters: list[nn.Parameter]) -> None:
        sizes, first = [parameter.numel() for parameter in parameters], parameters[0]
        bucket = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        views = [piece.view_as(p) for p, piece in zip(parameters, bucket.split(sizes), strict=True)]
        for parameter, view in zip(parameters, views, strict=True):
            self._watch(parameter, view, len(self.buckets))
        self.buckets.append(bucket)
        self._members.append(list(zip(parameters, views, strict=True)))

    def _watch(self, parameter: nn.Parameter, view: Tensor, index: int) -> None:
        """Hear of a gradient after it was accumulated: an earlier hook would launch what is not yet written.

        The hook knows the buckets by a weak reference alone: torch keeps hooks where Python's garbage collector does
        not look, so a cycle through one is never freed (every strategy of a run stayed alive, 13 MB each).
        """
        buckets = weakref.ref(self)

        def written(parameter: Tensor) -> None:
            alive = buckets()
            if alive is not None:
                set_gradient_view(parameter, view)
                alive._complete(index)

        parameter.register_post_accumulate_grad_hook(written)

    def _complete(self, index: int) -> None:
        if not self._armed:
            return
        self._missing[index] -= 1
        while self._next < len(self.buckets) and self._missing[self._next] == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        with phase("all_reduce"):
            self._handles.append(self.all_reduces[self._next](self.buckets[self._next]))
        self._next += 1


def set_gradient_view(parameter: Tensor, view: Tensor) -> None:
    """Make `view` the gradient of `parameter`, with the numbers that autograd just left there."""
    if parameter.grad is not None and parameter.grad is not view:
        view.copy_(parameter.grad)
        parameter.grad = view


# A model as two flat vectors: all weights, and all gradients. What is pushed, fetched or averaged is then one tensor.


class Vectors:
    """The `parameters` of a model, which become views of `weights`, and their gradients views of `gradients`.

        weights     [P]  the numbers stay; whatever is written here, the model computes with
        gradients   [P]  the backward passes add to it, until `zero`

    All parameters are of one dtype and device; a tied one counts once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.weights = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.gradients = torch.zeros_like(self.weights)
        sizes = [parameter.numel() for parameter in self.parameters]
        pieces = zip(self.weights.split(sizes), self.gradients.split(sizes), strict=True)
        for parameter, (weight, gradient) in zip(self.parameters, pieces, strict=True):
            parameter.data = weight.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)

    def zero(self) -> None:
        """Begin a step."""
        self.gradients.zero_()


# Which all_reduce a bucket of `bucketed` takes: the group's own, or on a slow link between two ranks a swap.
#
# gloo's all_reduce sums piece by piece, in two rounds of which one waits for the other, and a slow link idles
# meanwhile. Two ranks that send each other everything and both add (distlab/techniques/collectives/direct.py) send the
# same bytes in one round: on a link of 500 Mbit/s 64 MiB take gloo's 1221 ms and a swap 1111, of which 1074 are the
# link's (LAB_NET_RATE=500mbit RUN_MODE=comm LAB_VARIANT=gloo,direct), and in buckets the pauses add up (`python -m
# benchmarks.link dp`). What comes needs room: the gradients once more, as much as DDP takes. On a link without a rate
# the two take as long (`python -m benchmarks.collectives 2`), and for more ranks a swap would send more.


def swaps_buckets(group: dist.ProcessGroup, config: Config) -> bool:
    """Whether two ranks on a link with a rate swap their buckets; NCCL's all_reduce is left to itself."""
    return group.size() == 2 and config.net_rate is not None and dist.get_backend(group) == "gloo"


def all_reduce_of_buckets(group: dist.ProcessGroup, config: Config) -> AllReduce:
    """The all_reduce that begins to sum a bucket."""
    if swaps_buckets(group, config):
        return partial(Collective(group, "direct").all_reduce, async_op=True)
    return partial(dist.all_reduce, group=group, async_op=True)
