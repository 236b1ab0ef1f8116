"""The variables of RUN_MODE=precision, and its own sizes. torch is not imported here: they are read before it."""

from distlab.lab.config.settings import ModeOptions


class Options(ModeOptions):
    """None of its own; a small model."""

    sizes = {"width": 64, "depth": 2}  # noqa: RUF012  16-bit arithmetic is slow on most CPUs
