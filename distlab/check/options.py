"""What `distlab check` can be told beside the variables that a run has too."""

from distlab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """The variables that `check` alone knows."""

    hang_after_s: float = Field(
        5,
        alias="LAB_HANG_AFTER_S",
        ge=0.5,
        le=10**6,
        allow_inf_nan=False,
        description="seconds without progress after which ranks that wait for each other are called hung",
    )
    every: int = Field(
        100,
        alias="LAB_CHECK_EVERY",
        ge=1,
        le=10**9,
        description="optimizer steps from one comparison of the replicas' weights to the next",
    )
    mesh: str | None = Field(
        None,
        alias="LAB_MESH",
        pattern=r"^\w+:\d+(,\w+:\d+)*$",
        description="axes of the ranks, the outermost first, such as dp:2,tp:2; unset: those of the script's mesh",
    )
    requirements: str | None = Field(
        None,
        alias="LAB_REQUIREMENTS",
        description="pip's list of what the script needs, beside it, such as requirements.txt (containers alone)",
    )
