"""The variables of RUN_MODE=largebatch, and its own sizes. torch is not imported here: they are read before it."""

from distlab.lab.config.settings import ModeOptions


class Options(ModeOptions):
    """No variable of its own; many short trainings in place of a long one."""

    sizes = {"model": "mlp", "width": 16, "depth": 2, "heads": 2, "seq": 16, "steps": 192}  # noqa: RUF012  nobody writes to it
