"""PyTorch's own pipeline, torch.distributed.pipelining, as an engine of the same strategy.

It cuts a batch into equal microbatches itself, so it gets the whole one. Everything else is ours: the stages, and the
loss with its share. Its import takes most of a second, so only the variants that need it import it.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.techniques.collectives.phases import phase
from distlab.techniques.pipeline_parallel.strategy import Parts, joined

SCHEDULES = {
    "torch_1f1b": Schedule1F1B,
    "torch_interleaved_zb": ScheduleInterleavedZeroBubble,
    "torch_zbv": ScheduleZBVZeroBubble,
    "torch_dualpipev": ScheduleDualPipeV,
}


class MarkedStage(PipelineStage):
    """Marks its passes, so that its bubble can be measured like ours."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with phase("forward", str(fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with phase("backward" if kwargs.get("full_backward", True) else "input", str(bwd_chunk_id)):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with phase("weight", str(bwd_chunk_id)):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class PyTorchPipeline:
    """Runs the schedule `name` on this rank's stages; torch does not report its microbatches in flight."""

    most_in_flight = None

    def __init__(self, name: str, parts: Parts, loss: nn.Module, group: dist.ProcessGroup, config: Config) -> None:
        num_stages = group.size() * len(parts.stages)
        self.first, self.last = 0 in parts.stages, num_stages - 1 in parts.stages
        self.loss, self.share = loss, 1.0
        device = next(iter(parts.parameters.values())).device
        stages = [
            MarkedStage(module, number, num_stages, device, group=group) for number, module in parts.stages.items()
        ]
        schedule: Any = SCHEDULES[name]
        stage_or_stages = stages[0] if name == "torch_1f1b" else stages
        self.schedule: Any = schedule(stage_or_stages, config.num_microbatches, loss_fn=self._loss, scale_grads=False)

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        inputs, targets, self.share = joined(microbatches)
        losses: list[Tensor] = []
        self.schedule.step(
            *([inputs] if self.first else []),
            **({"target": targets, "losses": losses} if self.last else {}),
            return_outputs=False,
        )
        return sum((loss.detach() for loss in losses[1:]), losses[0].detach()) if losses else None

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        weighted: Tensor = self.loss(output, targets) * self.share
        return weighted
