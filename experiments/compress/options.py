"""The variables and default sizes of RUN_MODE=compress. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """How much is sent, and whether the rest is kept."""

    sizes = {"width": 64, "depth": 4}  # noqa: RUF012  eight variants in 20 s
    ratio: float = Field(
        0.01, alias="LAB_RATIO", gt=0, le=1, description="share of the gradients that topk and randomk send"
    )
    low_rank: int = Field(4, alias="LAB_LOW_RANK", ge=1, le=10**9, description="rank of powersgd's matrices")
    error_feedback: bool = Field(
        True,
        alias="LAB_ERROR_FEEDBACK",
        description="0: the unsent part is lost, not added to the next step's gradients",
    )
