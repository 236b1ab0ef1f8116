"""The variables and default sizes of RUN_MODE=pp. Do not import torch here: this is read before it."""

from typing import ClassVar

from distlab.lab.config.settings import PipelineOptions


class Options(PipelineOptions):
    """Microbatches."""

    sizes = {"microbatches": 4}  # noqa: RUF012  ModeOptions says that it is the class's
    chunks: ClassVar[int] = 2  # stages per rank in the interleaved schedules
