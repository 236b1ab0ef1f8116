"""The default sizes of RUN_MODE=dp. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import ModeOptions


class Options(ModeOptions):
    """Half as many layers as other modes: per_parameter sends half the tensors, and a verdict takes a minute."""

    sizes = {"depth": 4}  # noqa: RUF012  ModeOptions says that it is the class's
