"""The variables of RUN_MODE=fsdp. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """The variables that only fsdp has."""

    reshard: bool = Field(
        True, alias="LAB_RESHARD", description="0: zero3 keeps gathered weights from the forward to the backward pass"
    )
