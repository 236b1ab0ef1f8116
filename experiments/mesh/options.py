"""The variables and default sizes of RUN_MODE=mesh. Do not import torch here: this is read before it."""

from distlab.lab.config.settings import Field, PipelineOptions


class Options(PipelineOptions):
    """The variables that only a mesh has."""

    sizes = {"microbatches": 4, "batch": 32}  # noqa: RUF012  ModeOptions says that it is the class's
    mesh: str = Field(
        "", alias="LAB_MESH",
        description="axes with their numbers of ranks, outermost first, as pp2,dp2,tp2; unset: the prime factors of"
        " WORLD_SIZE on dp, tp and pp in turn",
    )  # fmt: skip
    dropout: float = Field(
        0, alias="LAB_DROPOUT", ge=0, lt=1, allow_inf_nan=False,
        description="dropout probability of the outputs of attention and MLP, with masks per sample and position",
    )  # fmt: skip
