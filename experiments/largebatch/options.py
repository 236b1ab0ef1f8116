"""The default sizes of RUN_MODE=largebatch. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import ModeOptions


class Options(ModeOptions):
    """No additional variables; many short trainings instead of a long one."""

    sizes = {"model": "mlp", "width": 16, "depth": 2, "heads": 2, "seq": 16, "steps": 192}  # noqa: RUF012  nobody writes to it
