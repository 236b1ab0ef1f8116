"""What `distlab prove` can be told beside the variables that a check has too."""

from distlab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """The variables of a proof, and the sizes of the lab's own model and batch where a file leaves them out."""

    sizes = {  # noqa: RUF012
        "width": 32,
        "depth": 2,
        "heads": 4,
        "seq": 16,
        "microbatches": 2,
        "batch": 16,
    }

    hang_after_s: float = Field(
        5,
        alias="LAB_HANG_AFTER_S",
        ge=0.5,
        le=10**6,
        allow_inf_nan=False,
        description="seconds without progress after which ranks that wait for each other are called hung",
    )
    requirements: str | None = Field(
        None,
        alias="LAB_REQUIREMENTS",
        description="pip's list of what the file needs, beside it, such as requirements.txt (containers alone)",
    )
