"""The variables of RUN_MODE=comm, and its own sizes. torch is not imported here: they are read before it."""

from distlab.lab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """What this mode alone knows."""

    sweep_mib: float = Field(
        16, alias="LAB_SWEEP_MIB", ge=0.25, le=64, description="MiB of the largest tensor that comm sweeps"
    )
