"""The variables and default sizes of RUN_MODE=moe. Do not import torch here: this is read before it."""

from typing import ClassVar, Literal

from distlab.lab.config.settings import Field, ModeOptions


class Options(ModeOptions):
    """The variables that only a mixture of experts has."""

    sizes = {"depth": 2}  # noqa: RUF012  ModeOptions says that it is the class's
    experts: int = Field(
        8, alias="LAB_EXPERTS", ge=1, le=4096, description="experts of each layer, on all ranks together"
    )
    top_k: int = Field(2, alias="LAB_TOP_K", ge=1, le=64, description="experts that compute each token")
    capacity: float = Field(
        1.25, alias="LAB_CAPACITY", ge=0, le=1000, allow_inf_nan=False,
        description="places of an expert, as a multiple of its even share of a batch's choices; 0: no token is dropped",
    )  # fmt: skip
    balance: Literal["loss", "none"] = Field(
        "loss", alias="LAB_BALANCE", description="how the load of experts is balanced: by a loss, or not at all"
    )
    router_z: ClassVar[float] = 0.001  # weight of the router's z-loss, which keeps its scores small
    mesh: str = Field(
        "", alias="LAB_MESH",
        description="grid of the experts, as dp2,ep2,tp2: dp copies of all experts, each copy spread over ep ranks,"
        " each expert cut over tp ranks; unset: WORLD_SIZE as a product of two or three factors, by the variant's axes",
    )  # fmt: skip
    row_us: float = Field(
        0, alias="LAB_ROW_US", ge=0, le=1e6, allow_inf_nan=False,
        description="microseconds of simulated compute per row and expert in the forward pass, twice that backward",
    )  # fmt: skip

    def untimed(self) -> "Options":
        return self.model_copy(update={"row_us": 0})
