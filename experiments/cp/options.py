"""The default sizes of RUN_MODE=cp. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import ModeOptions


class Options(ModeOptions):
    """Long samples, and few."""

    sizes = {"seq": 240, "batch": 4, "depth": 4}  # noqa: RUF012  240 positions fold evenly over 2, 3, 4, 5, 6 and 8
