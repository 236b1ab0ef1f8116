"""The default sizes of RUN_MODE=precision. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import ModeOptions


class Options(ModeOptions):
    """No additional variables; a small model."""

    sizes = {"width": 64, "depth": 2}  # noqa: RUF012  16-bit arithmetic is slow on most CPUs
