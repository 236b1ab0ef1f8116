"""Passes that keep no gradient: what a rank's work holds by itself, moment by moment, as gradients come and go."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from workers.measure.purposes import label_before
from workers.measure.storages import Storages


class Moment(NamedTuple):
    """A gradient has come."""

    highest: int  # the most working bytes since the one before
    layer: int  # whose gradient it is, by number in the model
    last: bool  # whether it is of the last microbatch
    added: int = 0  # working bytes where it is added to that of an earlier microbatch; 0 where there is none


class Forgetting:
    """A Reducer (parallel/reducing.py) that drops each gradient when it has come; inside of `storages` memory is
    seen.

    Where memory is seen, torch adds a gradient to the one that is there out of place: it takes any tensor for a
    subclass of its own then (torch/csrc/autograd/functions/accumulate_grad.h). So a sum stands beside both.
    """

    def __init__(self, device: torch.device) -> None:
        self.storages, self.moments, self.last = Storages(device.type), list[Moment](), False
        self.seen: set[Tensor] = set()
        label_before(self.storages)
        self.before = self.storages.peak_bytes = self.storages.live_bytes

    def begin(self) -> None: ...

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Of which microbatch the gradients are that come now."""
        self.last = last
        yield

    def finish(self) -> None: ...

    def forget(self, layer: int, parameter: Tensor) -> None:
        """The gradient of a parameter of `layer` is there."""
        again, self.seen = parameter in self.seen, self.seen | {parameter}
        added = self.storages.live_bytes - self.before + parameter.nbytes if again else 0
        parameter.grad = None
        self.moments.append(Moment(self.storages.peak_bytes - self.before, layer, self.last, added))
        self.storages.peak_bytes = self.storages.live_bytes
