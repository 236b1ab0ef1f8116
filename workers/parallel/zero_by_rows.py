"""ZeRO over sequence parallelism: what was used on some rows is summed over the ranks that had the others.

Between its slices a rank of sequence parallelism has its own rows alone, so a norm's gradient there is a part of the
whole one (sequence.py). ZeRO lays a layer's gradients end to end and sums that vector over the replicas; of the sum a
rank keeps a run, which begins and ends somewhere else on the rank beside it along the tensor axis, since their slices
are not of one size. After that sum the parts no longer lie opposite each other. So they are added up before it, in the
unit's vector, as soon as its last gradient is there.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from workers.parallel.phases import phase
from workers.parallel.sequence import sum_together
from workers.parallel.zero import Zero


class ZeroByRows(Zero):
    """`Zero`, of which the parameters `whole` have a part of their gradient on each rank of `rows`."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], group: dist.ProcessGroup, stage: int, *,
        whole: Collection[nn.Parameter], rows: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        self.whole, self.rows = set(whole), rows
        super().__init__(model, layers, group, stage)

    @torch.no_grad()
    def _complete(self, index: int) -> None:
        if self.rows is not None and (self.stage > 1 or self._last):  # of stage 1 the vector is kept, and summed once
            flat = self._flat_gradient(index)
            named = zip(self.units[index].named.values(), flat.places, strict=True)
            parts = [place for parameter, place in named if parameter in self.whole]
            if parts:
                with phase("all_reduce"):
                    sums = sum_together(parts, self.rows)
                for part, total in zip(parts, sums, strict=True):
                    part.copy_(total)
        super()._complete(index)
