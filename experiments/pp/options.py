"""The variables of RUN_MODE=pp, and its own sizes. torch is not imported here: they are read before it."""

from typing import ClassVar

from distlab.lab.config.settings import PipelineOptions


class Options(PipelineOptions):
    """Microbatches."""

    sizes = {"microbatches": 4}  # noqa: RUF012  ModeOptions says that it is the class's
    chunks: ClassVar[int] = 2  # stages that a rank holds in the interleaved schedules
