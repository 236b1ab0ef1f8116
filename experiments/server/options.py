"""The variables and default sizes of RUN_MODE=server. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """The variables that only server has."""

    staleness: int | None = Field(
        None,
        alias="LAB_STALENESS",
        ge=0,
        le=10_000,
        description="steps that the fastest worker of `downpour` may be ahead of the slowest; unset: no bound",
    )
    local_steps: int = Field(
        4,
        alias="LAB_LOCAL_STEPS",
        ge=1,
        le=10_000,
        description="local steps of a worker between two messages",
    )
