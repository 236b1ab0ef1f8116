"""Every variable of the lab, once: its name, type, default, unit, check and one line of help.

A run is configured by its environment alone, as a container is. `Config.read()` turns the environment into one
frozen object, or raises `ConfigError` with every fault at once, a line each, before torch is imported.
Variables of the cluster keep the names that torchrun and Kubernetes use; all others begin with `LAB_`, and a name
that begins so and is not in this file is refused, with the nearest one suggested.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from workers.config import values
from workers.config.faults import contradictions, sentence

MAX_WORLD_SIZE = 8
OWN_SIZES = {
    "compress": {"width": 64, "depth": 4},
    "precision": {"width": 64, "depth": 2},
    "largebatch": {"width": 16, "heads": 2, "seq": 16, "steps": 192},
}  # a dozen variants in 40 s, and many short trainings in place of a long one


class ConfigError(Exception):
    """The environment cannot be run; `faults` holds a sentence for each thing that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class Config(BaseSettings):
    """The settings of one rank. Each field is read from the variable that is its alias; empty counts as unset."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True, populate_by_name=True, extra="forbid")

    # fmt: off
    # The cluster: who this rank is, and where the others are.
    run_mode: Annotated[str, AfterValidator(values.known_mode)] = Field("dp", alias="RUN_MODE", description="the experiment: a file in experiments/")
    rank: int | None = Field(None, alias="RANK", ge=0, description="this rank, from 0; unset: start all ranks as local processes")
    world_size: int = Field(4, alias="WORLD_SIZE", ge=1, le=MAX_WORLD_SIZE, description="number of ranks")
    master_addr: str | None = Field(None, alias="MASTER_ADDR", description="host of rank 0")
    master_port: int = Field(29500, alias="MASTER_PORT", ge=1, le=65535, description="port of rank 0's store")
    local_rank: int | None = Field(None, alias="LOCAL_RANK", ge=0, description="index among the ranks of this machine, as torchrun sets it")

    # What is run.
    variant: Annotated[tuple[str, ...], NoDecode] = Field((), alias="LAB_VARIANT", description="variants to run, separated by commas; empty: all")
    model: Literal["line", "mlp", "gpt"] = Field("gpt", alias="LAB_MODEL", description="what is trained")
    width: int = Field(128, alias="LAB_WIDTH", ge=1, description="width of the model (unset in compress and precision: 64, in largebatch: 16)")
    depth: int = Field(8, alias="LAB_DEPTH", ge=1, description="number of layers (unset in compress: 4, in precision: 2, in largebatch: 2 of mlp and 1 of gpt)")
    heads: int = Field(8, alias="LAB_HEADS", ge=1, description="attention heads of gpt (unset in largebatch: 2)")
    seq: int = Field(64, alias="LAB_SEQ", ge=1, description="bytes of text in a sample of gpt (unset in largebatch: 16)")
    tie: bool = Field(False, alias="LAB_TIE", description="1: gpt's output layer shares the embedding's weights")
    text: Path | None = Field(None, alias="LAB_TEXT", description="file or folder that gpt reads; unset: Python's own standard library")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", alias="LAB_DTYPE", description="type of weights and gradients in the timed pass")
    steps: int = Field(20, alias="LAB_STEPS", ge=1, description="steps of the timed pass (unset in largebatch: 192)")
    batch: int = Field(16, alias="LAB_BATCH", ge=1, description="samples in the global batch")
    microbatches: int | None = Field(None, alias="LAB_MICROBATCHES", ge=1, description="parts into which a rank splits its samples (in pp the whole batch is split); unset: 1, in pp 4")
    optimizer: Literal["sgd", "adamw"] = Field("sgd", alias="LAB_OPTIMIZER", description="optimizer of the timed pass")
    lr: float | None = Field(None, alias="LAB_LR", gt=0, allow_inf_nan=False, description="learning rate; unset: 0.1 for sgd, 0.001 for adamw (in largebatch SGD's base rate; unset: 0.05)")
    clip: float | None = Field(None, alias="LAB_CLIP", gt=0, allow_inf_nan=False, description="bound on the global norm of the gradients; unset: off")
    seed: int = Field(1, alias="LAB_SEED", ge=0, description="seed of weights and data")
    proof: bool = Field(True, alias="LAB_PROOF", description="0: leave the proof out")
    bug: str | None = Field(None, alias="LAB_BUG", description="a classic mistake to make on purpose; `make explain` lists those of a mode")

    # What is sent in place of gradients.
    ratio: float = Field(0.01, alias="LAB_RATIO", gt=0, le=1, description="compress: share of the gradients that topk and randomk send")
    low_rank: int = Field(4, alias="LAB_LOW_RANK", ge=1, description="compress: rank of powersgd's matrices")
    error_feedback: bool = Field(True, alias="LAB_ERROR_FEEDBACK", description="compress: 0: what a compressor leaves out is lost, not added to the next step's gradients")
    staleness: int = Field(2, alias="LAB_STALENESS", ge=0, description="server: steps that the fastest worker may be ahead of the slowest")
    local_steps: int = Field(4, alias="LAB_LOCAL_STEPS", ge=1, description="server: steps on a worker's own weights before it sends something")

    # How it is run.
    backend: Literal["gloo", "nccl"] = Field("gloo", alias="LAB_BACKEND", description="library that moves the bytes")
    device: Literal["cpu", "cuda"] = Field("cpu", alias="LAB_DEVICE", description="where tensors live; nccl means cuda")
    threads: int = Field(1, alias="LAB_THREADS", ge=1, description="compute threads of a rank")
    bucket_mib: float = Field(25, alias="LAB_BUCKET_MIB", gt=0, allow_inf_nan=False, description="size of a gradient bucket in MiB")

    chunks: int = Field(2, alias="LAB_CHUNKS", ge=1, description="stages that a rank holds in pp's interleaved schedule")
    sleep_ms: float = Field(0, alias="LAB_SLEEP_MS", ge=0, allow_inf_nan=False, description="pp: milliseconds of pretended compute of a microbatch forward through one rank, twice that backward")
    reshard: bool = Field(True, alias="LAB_RESHARD", description="fsdp: 0: zero3 keeps gathered weights from the forward to the backward pass")
    recompute: bool = Field(False, alias="LAB_RECOMPUTE", description="1: keep no activations inside a layer, compute them again in the backward pass (dp, fsdp)")
    offload: bool = Field(False, alias="LAB_OFFLOAD", description="1: fsdp keeps shards and optimizer in the host's memory (LAB_DEVICE=cuda)")
    net_rate: Annotated[str, AfterValidator(values.rate)] | None = Field(None, alias="LAB_NET_RATE", description="rate of each rank's link, such as 100mbit (containers with compose/net.yaml); unset: as fast as it is")
    net_delay: Annotated[str, AfterValidator(values.delay)] | None = Field(None, alias="LAB_NET_DELAY", description="delay of each message, such as 5ms (containers with compose/net.yaml, where the kernel has netem)")
    slow_rank: Annotated[str, AfterValidator(values.slow_rank)] | None = Field(None, alias="LAB_SLOW_RANK", description="a rank that computes at a share of its speed in the timed pass, such as 2:0.5")
    trace: bool = Field(False, alias="LAB_TRACE", description="1: a profiled step of each variant more, and trace.json")

    # What survives it.
    checkpoint_every: int | None = Field(None, alias="LAB_CHECKPOINT_EVERY", ge=1, description="steps from one checkpoint to the next; unset: none")
    checkpoint_keep: int = Field(2, alias="LAB_CHECKPOINT_KEEP", ge=1, description="checkpoints that are kept, the newest ones")
    checkpoint_async: bool = Field(False, alias="LAB_CHECKPOINT_ASYNC", description="1: write checkpoints while training goes on")
    resume: str | None = Field(None, alias="LAB_RESUME", description="go on from a checkpoint: auto (LAB_RUN_ID's own, if there is one), a run id, or a path")

    # Where its files go.
    runs_dir: Path = Field(Path("runs"), alias="LAB_RUNS_DIR", description="folder of all runs")
    run_id: Annotated[str, AfterValidator(values.run_name)] | None = Field(None, alias="LAB_RUN_ID", description="name of this run; unset: mode and time")

    # Bounds.
    join_timeout_s: float = Field(60, alias="LAB_JOIN_TIMEOUT_S", gt=0, allow_inf_nan=False, description="seconds to wait for all ranks to arrive")
    lost_after_s: float = Field(2.5, alias="LAB_LOST_AFTER_S", ge=1, allow_inf_nan=False, description="seconds of silence after which a rank is lost")
    collective_timeout_s: float = Field(300, alias="LAB_COLLECTIVE_TIMEOUT_S", gt=0, allow_inf_nan=False, description="seconds that one collective may take")
    cpus: float | None = Field(None, alias="LAB_CPUS", gt=0, allow_inf_nan=False, description="cores of one container; unset: no limit")
    memory: str | None = Field(None, alias="LAB_MEMORY", pattern=r"(?i)^[0-9]+(b|[kmg]b?)?$", description="memory of one container, such as 900m; unset: no limit")
    # fmt: on

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **more: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take nothing but the mapping that `read` passes: no dotenv file, no secrets folder."""
        del settings_cls, others, more
        return (init_settings,)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Check `environ` as a whole; raises ConfigError with all faults at once."""
        aliases = {field.alias: name for name, field in cls.model_fields.items() if field.alias}
        given = {name: environ[name].strip() for name in aliases if environ.get(name, "").strip()}
        faults = [
            f"{name} is not a variable of the lab{values.suggest(name, list(aliases))}"
            for name in sorted(environ)
            if name.startswith("LAB_") and name not in aliases
        ]
        try:
            config = cls(**_typed(given))._with_own_sizes()
        except ValidationError as error:
            wrong = [(fault, str(fault["loc"][0])) for fault in error.errors()]
            faults += [sentence(fault, given.get(name, ""), cls.model_fields[aliases[name]]) for fault, name in wrong]
            raise ConfigError(faults) from None
        faults += contradictions(config)
        if faults:
            raise ConfigError(faults)
        return config

    def _with_own_sizes(self) -> Self:
        """The same with the sizes of its mode where none are set; they do not count as set."""
        own = {
            name: value for name, value in OWN_SIZES.get(self.run_mode, {}).items() if name not in self.model_fields_set
        }
        sized = self.model_copy(update=own)
        sized.model_fields_set.difference_update(own)
        return sized

    @property
    def learning_rate(self) -> float:
        """LAB_LR, or the default of the optimizer."""
        return self.lr or {"sgd": 0.1, "adamw": 0.001}[self.optimizer]

    @property
    def num_microbatches(self) -> int:
        """LAB_MICROBATCHES, or the default of the mode: a pipeline of one microbatch would have nothing to overlap."""
        return self.microbatches or (4 if self.run_mode == "pp" else 1)

    @property
    def slowed_to(self) -> float:
        """The share of its speed at which this rank computes, by LAB_SLOW_RANK."""
        rank, _, share = (self.slow_rank or "").partition(":")
        return float(share) if rank and int(rank) == self.rank else 1.0

    def awake(self) -> Self:
        """The same without pretended compute, for passes that measure no time."""
        return self.model_copy(update={"sleep_ms": 0.0})

    def environ(self) -> dict[str, str]:
        """The variables that were set, as text: what repeats this run."""
        written = {}
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            alias = type(self).model_fields[name].alias or name
            if isinstance(value, tuple):
                value = ",".join(value)
            elif isinstance(value, bool):
                value = int(value)
            written[alias] = str(value)
        return written


def _typed(given: dict[str, str]) -> dict[str, Any]:
    typed: dict[str, Any] = dict(given)
    if "LAB_VARIANT" in given:
        typed["LAB_VARIANT"] = tuple(part.strip() for part in given["LAB_VARIANT"].split(",") if part.strip())
    return typed
