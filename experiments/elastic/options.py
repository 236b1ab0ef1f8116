"""The variables and default sizes of RUN_MODE=elastic. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """How many ranks are killed, how often they save, and whether the batch follows the members."""

    # Larger learning rates grow rounding errors past 1e-12 within some hundred steps.
    sizes = {"width": 32, "depth": 2, "optimizer": "adamw", "lr": 1e-4}  # noqa: RUF012
    losses: int = Field(
        2, alias="LAB_LOSSES", ge=0, le=10_000, description="ranks of each variant that fault injection kills; 0: none"
    )
    saved_every: int = Field(
        5,
        alias="LAB_SAVED_EVERY",
        ge=1,
        le=10_000,
        description="steps between two checkpoints of restart and zero1",
    )
    rescale: bool = Field(
        False,
        alias="LAB_RESCALE",
        description="1: each rank keeps its number of samples, and the learning rate follows the batch",
    )
