"""The variables of RUN_MODE=fsdp, and its own sizes. torch is not imported here: they are read before it."""

from distlab.lab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """What fsdp alone knows."""

    reshard: bool = Field(
        True, alias="LAB_RESHARD", description="0: zero3 keeps gathered weights from the forward to the backward pass"
    )
