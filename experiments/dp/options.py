"""The sizes of RUN_MODE=dp, of which a first run is. torch is not imported here: they are read before it."""

from distlab.lab.config.settings import ModeOptions


class Options(ModeOptions):
    """Half as many layers as elsewhere: half the tensors that per_parameter sends, and a verdict in a minute."""

    sizes = {"depth": 4}  # noqa: RUF012  ModeOptions says that it is the class's
