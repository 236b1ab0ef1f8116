"""The variables and default sizes of RUN_MODE=comm. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """The variables that only this mode has."""

    sweep_mib: float = Field(
        16, alias="LAB_SWEEP_MIB", ge=0.25, le=64, description="MiB of the largest tensor that comm sweeps"
    )
