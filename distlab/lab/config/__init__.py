"""Every variable of the lab: its name, type, default, unit, check and one line of help.

The environment alone configures a run, as it does a container. `Config.read()` turns it into one frozen object, or
raises `ConfigError` with every fault at once, one per line, before torch is imported. Variables of the cluster keep the
names of torchrun and Kubernetes; all others begin with `LAB_`. Those of a single mode are in its options.py. A name in
neither place is refused, with the nearest one suggested.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from distlab.lab.config import fault_spec as planned
from distlab.lab.config import settings, user_code
from distlab.lab.config.settings import ModeOptions, aliases, declared, fault_sentence, named_value, quoted

MAX_WORLD_SIZE = 1024  # of ranks that a launcher starts
ON_ONE_MACHINE = 8  # containers or local processes: the size of the Compose file
MOST = 10**9  # of any count: more than any machine has, and far below the limit of 64-bit integers
MOST_LAYERS = 1000  # an outline of this many takes seconds
MOST_SIZE = 10**6  # of a model's width, a sample and a batch: its square times 32 is far below that limit, too
MOST_SEED = 2**32 - 1  # the seed of an epoch's generator is a million times as large, in 64 bits
MOST_SECONDS = 10**6  # twelve days; a thread can wait for at most 292 years, gloo for less
Own = TypeVar("Own", bound=ModeOptions)
LINE_POINTS = 32  # of the first lesson: 8, 6, 9 and 9 for four ranks


class Refusal(Exception):
    """The request cannot be fulfilled; `faults` has a sentence for each reason. A command that raises it ends with
    2."""

    def __init__(self, *faults: str) -> None:
        self.faults = list(faults)
        super().__init__("\n".join(faults))


VOCABULARY = 256  # of gpt, which reads bytes
BUCKETS = 5  # of gradients, approximately


class ConfigError(Refusal):
    """The settings in the environment cannot run."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__(*map(settings.shorten_words, faults))


class Config(BaseSettings):
    """The settings of one rank. Each field is read from the variable that is its alias; empty counts as unset."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True, populate_by_name=True, extra="forbid")

    # fmt: off
    # The cluster: who this rank is, and where the others are.
    run_mode: Annotated[str, AfterValidator(settings.known_mode)] = Field("dp", alias="RUN_MODE", description="the experiment: a mode in experiments/, or the path of one such as mine/mode.py")
    rank: int | None = Field(None, alias="RANK", ge=0, le=MOST, description="this rank, from 0; unset: start all ranks as local processes")
    world_size: int = Field(4, alias="WORLD_SIZE", ge=1, le=MAX_WORLD_SIZE, description="number of ranks; at most 8 as containers or local processes on one machine")
    master_addr: Annotated[str, AfterValidator(settings.host_name)] | None = Field(None, alias="MASTER_ADDR", description="host of rank 0")
    master_port: int = Field(29500, alias="MASTER_PORT", ge=1, le=65535, description="port of rank 0")
    key: Annotated[SecretStr, AfterValidator(settings.key)] | None = Field(None, alias="LAB_KEY", exclude=True, repr=False, description="key of the run, the same on all ranks, at least 16 characters: messages that are not signed with it are ignored; unset: the launcher of all ranks creates one, else it is derived from MASTER_PORT")
    key_file: Annotated[Path, AfterValidator(settings.key_file)] | None = Field(None, alias="LAB_KEY_FILE", exclude=True, description="file with the key of the run; safer than LAB_KEY, which anyone who can inspect a process or a container can read; containers get it as a secret")
    local_rank: int | None = Field(None, alias="LOCAL_RANK", ge=0, le=MOST, description="index among the ranks of this machine, as torchrun sets it")

    # What to run.
    variant: Annotated[tuple[str, ...], NoDecode] = Field((), alias="LAB_VARIANT", description="variants to run, separated by commas; your own strategy as mine/wave.py:wave; unset: all except plain, the mode's page of code")
    model: Annotated[str, AfterValidator(settings.known_model)] = Field("gpt", alias="LAB_MODEL", description="model to train: line, mlp, gpt, or a function in your own file such as mine/model.py:model")
    width: int = Field(128, alias="LAB_WIDTH", ge=1, le=MOST_SIZE, description="width of the model")
    depth: int = Field(8, alias="LAB_DEPTH", ge=1, le=MOST_LAYERS, description="number of layers")
    heads: int = Field(8, alias="LAB_HEADS", ge=1, le=MOST, description="attention heads of gpt")
    seq: int = Field(64, alias="LAB_SEQ", ge=1, le=MOST_SIZE, description="bytes of text in a sample of gpt")
    tie: bool = Field(False, alias="LAB_TIE", description="1: gpt's output layer shares the embedding's weights")
    text: Path | None = Field(None, alias="LAB_TEXT", description="file or folder with the text that gpt is trained on; unset: the source of Python's standard library")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", alias="LAB_DTYPE", description="type of weights and gradients in the timed pass")
    steps: int = Field(20, alias="LAB_STEPS", ge=1, le=MOST, description="steps of the timed pass")
    batch: int = Field(16, alias="LAB_BATCH", ge=1, le=MOST_SIZE, description="samples in the global batch (unset with LAB_MODEL=line: 32)")
    microbatches: int | None = Field(None, alias="LAB_MICROBATCHES", ge=1, le=MOST, description="parts into which a rank splits its samples (in pp the whole batch is split); unset: 1")
    optimizer: Literal["sgd", "adamw"] = Field("sgd", alias="LAB_OPTIMIZER", description="optimizer of the timed pass")
    lr: float | None = Field(None, alias="LAB_LR", gt=0, le=1000, allow_inf_nan=False, description="learning rate; unset: 0.1 for sgd, 0.001 for adamw")
    clip: float | None = Field(None, alias="LAB_CLIP", gt=0, le=MOST, allow_inf_nan=False, description="bound on the global norm of the gradients; unset: off")
    seed: int = Field(1, alias="LAB_SEED", ge=0, le=MOST_SEED, description="seed of weights and data")
    proof: bool = Field(True, alias="LAB_PROOF", description="0: skip the proof against one process")
    bug: str | None = Field(None, alias="LAB_BUG", description="a bug to inject; `make explain` lists the bugs of a mode")

    # How to run it.
    backend: Literal["gloo", "nccl", "tcp"] = Field("gloo", alias="LAB_BACKEND", description="communication backend: a library, or tcp, the lab's own transport over plain TCP")
    device: Literal["cpu", "cuda"] = Field("cpu", alias="LAB_DEVICE", description="device of the tensors; LAB_BACKEND=nccl implies cuda")
    bucket: float | None = Field(None, alias="LAB_BUCKET_MIB", gt=0, le=2**20, allow_inf_nan=False, description="size of a gradient bucket in MiB; unset: a fifth of the gradients of mlp or gpt, 1 for other models")

    recompute: bool = Field(False, alias="LAB_RECOMPUTE", description="1: store no activations inside a layer and recompute them in the backward pass")
    net_rate: Annotated[str, AfterValidator(settings.rate)] | None = Field(None, alias="LAB_NET_RATE", description="rate of each rank's link, such as 100mbit (containers with compose/net.yaml); unset: no limit")
    net_delay: Annotated[str, AfterValidator(settings.delay)] | None = Field(None, alias="LAB_NET_DELAY", description="delay of each message, such as 5ms (containers with compose/net.yaml, where the kernel has netem)")
    slow_rank: Annotated[str, AfterValidator(settings.slow_rank)] | None = Field(None, alias="LAB_SLOW_RANK", description="a rank to slow in the timed pass, and its fraction of full speed: 2:0.5 lets rank 2 compute at half speed")

    # Checkpoints.
    checkpoint_every: int | None = Field(None, alias="LAB_CHECKPOINT_EVERY", ge=1, le=MOST, description="steps between two checkpoints; unset: none")
    resume: str | None = Field(None, alias="LAB_RESUME", description="continue from a checkpoint: auto (LAB_RUN_ID's own, if there is one), a run id, or a path")

    # Injected faults, and the checks that look for them.
    faults: str | None = Field(None, alias="LAB_FAULTS", description="faults to inject, and when, separated by commas: kill:rank2@step5, pause:rank1:1s@4s, ...; LAB_SEED draws the rank of an entry without one")
    audit_every: int | None = Field(None, alias="LAB_AUDIT_EVERY", ge=1, le=MOST, description="steps between two audits, which compare replicated weights and gradients and name the rank that differs; unset: none")

    # Where its files go.
    runs_dir: Path = Field(Path("runs"), alias="LAB_RUNS_DIR", description="folder of all runs")
    run_id: Annotated[str, AfterValidator(settings.run_name)] | None = Field(None, alias="LAB_RUN_ID", description="name of this run; unset: mode and time")

    # Output during the run.
    log: Literal["quiet", "normal", "full"] = Field("normal", alias="LAB_LOG", description="how much ranks print; quiet: only the verdict, full: also every table and check, on rank 0")

    # Limits.
    join_timeout_s: float = Field(60, alias="LAB_JOIN_TIMEOUT_S", ge=0.1, le=MOST_SECONDS, allow_inf_nan=False, description="seconds to wait for all ranks to arrive")
    lost_after_s: float = Field(2.5, alias="LAB_LOST_AFTER_S", ge=1, le=MOST_SECONDS, allow_inf_nan=False, description="seconds without a heartbeat after which a rank is lost")
    collective_timeout_s: float = Field(300, alias="LAB_COLLECTIVE_TIMEOUT_S", ge=0.1, le=MOST_SECONDS, allow_inf_nan=False, description="seconds that one collective may take")
    memory: str | None = Field(None, alias="LAB_MEMORY", pattern=r"(?i)^[0-9]{1,15}(b|[kmg]b?)?$", description="memory of one container, such as 900m; unset: no limit")
    # fmt: on

    options: ModeOptions = Field(
        default_factory=ModeOptions, exclude=True
    )  # the mode's own; `own` returns them with their type

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **more: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read only the mapping that `read` passes: no dotenv file, no secrets folder."""
        del settings_cls, others, more
        return (init_settings,)

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str] = os.environ,
        found_before: Sequence[str] = (),
        options: type[ModeOptions] | None = None,
    ) -> Self:
        """Check `environ` as a whole; raises ConfigError with all faults at once, including `found_before`.

        `options` replaces the mode's own.
        """
        named = environ.get("RUN_MODE", "").strip() or "dp"
        mode = named if settings.fault_of(settings.known_mode, named) == "" else "dp"  # else no file is read
        kind = options or _options_class(mode, environ.get("LAB_JOIN_TIMEOUT_S", ""))
        common, own = aliases(cls), aliases(kind)
        values = {name: environ[name].strip() for name in common | own if environ.get(name, "").strip()}
        typos = {typo for name in common | own for typo in settings.one_typo_from(name)}
        faults = [*found_before] + [
            _unknown_variable(name, environ[name], mode, [*common, *own])
            for name in sorted(environ)
            if name not in common | own and environ[name].strip() and (name.startswith("LAB_") or name in typos)
        ]
        unprintable = [name for name in values if not values[name].isprintable()]
        faults += [f"{named_value(name, values[name])} is not printable text in UTF-8" for name in unprintable]
        typed: dict[str, Any] = {name: values[name] for name in values if name not in unprintable}
        if "LAB_VARIANT" in typed:
            typed["LAB_VARIANT"] = tuple(filter(None, (part.strip() for part in typed["LAB_VARIANT"].split(","))))
        found: dict[str, Any] = {}
        for model, names in ((cls, common), (kind, own)):
            try:
                found[model.__name__] = model(**{name: typed[name] for name in typed if name in names})
            except ValidationError as error:
                wrong = [(fault, str(fault["loc"][0])) for fault in error.errors()]
                faults += [
                    fault_sentence(each, values.get(name, ""), model.model_fields[names[name]]) for each, name in wrong
                ]
        config: Self | None = found.get(cls.__name__)
        faults += planned.parse_faults(values["LAB_FAULTS"])[1] if "LAB_FAULTS" in typed else []
        faults += _contradictions(config) if config is not None else []
        faults += _too_many_ranks(values.get("WORLD_SIZE", ""), "RANKS_ON_HOST" in environ or "RANK" not in values)
        if faults or config is None:
            raise ConfigError(faults)
        return cls._with_own_sizes(config.model_copy(update={"options": found[kind.__name__]}))

    def _with_own_sizes(self) -> Self:
        """Return the settings with the default sizes of mode and model, and NCCL's device; these do not count as
        set."""
        sizes: dict[str, Any] = {"batch": LINE_POINTS} if self.model == "line" else {}
        sizes |= {"device": "cuda"} if self.backend == "nccl" else {}
        own = {
            name: value
            for name, value in (sizes | dict(self.options.sizes)).items()
            if name not in self.model_fields_set
        }
        sized = self.model_copy(update=own)
        sized.model_fields_set.difference_update(own, {"options"})
        return sized

    def own(self, kind: type[Own]) -> Own:
        """Return the mode's own settings, as the class Options of its lesson."""
        return kind(**self.options.model_dump(exclude_unset=True))

    def with_own(self, **update: Any) -> Self:
        """Return the settings with other values of the mode's own."""
        return self.model_copy(update={"options": self.options.model_copy(update=update)})

    @property
    def mode_name(self) -> str:
        """Return RUN_MODE, or the last part of a path: it names the run."""
        return settings.mode_name(self.run_mode)

    @property
    def bucket_mib(self) -> float:
        """Return the size of a gradient bucket; by default mlp and gpt have several, so that their overlap shows."""
        if self.bucket is not None:
            return self.bucket
        numbers = {
            "mlp": self.depth * self.width**2,
            "gpt": (12 * self.depth * self.width + 2 * VOCABULARY + self.seq) * self.width,
        }
        return numbers[self.model] * 4 / BUCKETS / 2**20 if self.model in numbers else 1.0

    @property
    def learning_rate(self) -> float:
        """Return LAB_LR, or the default of the optimizer."""
        return self.lr or {"sgd": 0.1, "adamw": 0.001}[self.optimizer]

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number of LAB_DTYPE."""
        return {"float64": 8, "float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def gloo_on_gpus(self) -> bool:
        """Return whether gloo connects ranks with tensors on GPUs: all_reduce and all_gather work, but a send to one rank
        ends the process ("Bad address"), and so does fully_shard."""
        return self.device == "cuda" and self.backend == "gloo" and self.world_size > 1

    @property
    def num_microbatches(self) -> int:
        """Return LAB_MICROBATCHES, or one."""
        return self.microbatches or 1

    @property
    def slowed_to(self) -> float:
        """Return the share of its speed at which this rank computes, by LAB_SLOW_RANK."""
        rank, _, share = (self.slow_rank or "").partition(":")
        return float(share) if rank and int(rank) == self.rank else 1.0

    @property
    def planned_faults(self) -> list[planned.FaultSpec]:
        """Return the entries of LAB_FAULTS."""
        return planned.parse_faults(self.faults or "")[0]

    def untimed(self) -> Self:
        """Return the same settings for passes that measure no time."""
        return self.model_copy(update={"options": self.options.untimed()})

    def environ(self) -> dict[str, str]:
        """Return the variables that were set, as text: they repeat this run."""
        return dict(sorted((_set_in(self) | _set_in(self.options)).items()))

    def written(self) -> dict[str, Any]:
        """Return all variables with their values, in JSON's types."""
        dumped: dict[str, Any] = {}
        for part in (self, self.options):
            dumped |= json.loads(part.model_dump_json(by_alias=True))
        return dumped


def _contradictions(config: Config) -> list[str]:
    """Return faults of several variables together; distlab/lab/rank/preflight.py finds those of one mode."""
    refusals = []
    if config.rank is not None and config.rank >= config.world_size:
        last = config.world_size - 1
        refusals.append(f"RANK={config.rank} is outside of WORLD_SIZE={config.world_size}, allowed: 0 to {last}")
    if config.rank is None and config.master_addr is not None:
        refusals.append(
            f"MASTER_ADDR={quoted(config.master_addr)} is set and RANK is not: set both for one rank, or neither to start all"
        )
    if config.rank is not None and config.master_addr is None:
        refusals.append(f"RANK={config.rank} is set and MASTER_ADDR is not: set it to the host of rank 0")
    if config.slow_rank is not None and int(config.slow_rank.partition(":")[0]) >= config.world_size:
        last = config.world_size - 1
        refusals.append(
            f"LAB_SLOW_RANK={config.slow_rank!r} names a rank outside of WORLD_SIZE={config.world_size}, allowed: 0 to {last}"
        )
    refusals += planned.misfits(config.planned_faults, config.world_size, config.steps)
    if config.backend == "nccl" and config.device == "cpu" and "device" in config.model_fields_set:
        refusals.append("LAB_BACKEND=nccl works only with LAB_DEVICE=cuda")
    if config.backend == "tcp" and config.device == "cuda":
        refusals.append("LAB_BACKEND=tcp works only with LAB_DEVICE=cpu: it sends from the memory of tensors")
    if config.slow_rank is not None and (config.device == "cuda" or config.backend == "nccl"):
        refusals.append(
            f"LAB_SLOW_RANK={config.slow_rank!r} slows a rank by its CPU time, which a GPU does not use: it works only with"
            " LAB_DEVICE=cpu"
        )
    return refusals


def _too_many_ranks(world_size: str, on_one_machine: bool) -> list[str]:
    """Return a fault if one machine has too many ranks without a launcher; the type limits those of launchers."""
    if not (
        on_one_machine and re.fullmatch("[0-9]{1,9}", world_size) and ON_ONE_MACHINE < int(world_size) <= MAX_WORLD_SIZE
    ):
        return []
    return [
        f"{named_value('WORLD_SIZE', world_size)} is out of range: expected 1 to {ON_ONE_MACHINE} on one machine, and up"
        f" to {MAX_WORLD_SIZE} under an engine such as Slurm or torchrun"
    ]


def _unknown_variable(name: str, value: str, mode: str, known: list[str]) -> str:
    """Return a sentence for a variable that neither the lab nor this mode has."""
    owners = [other for other in settings.modes() if name in aliases(declared(other))]
    if owners:
        return f"{name}={quoted(value.strip())} belongs to RUN_MODE={' or '.join(owners)}: {mode} has no such setting"
    if name in settings.GONE:
        return f"{name}: {settings.GONE[name]}"
    name = name if name.isprintable() and len(name) < 80 else quoted(name)
    return f"{name} is not a variable of the lab{settings.suggest(name, known)}"


def _options_class(mode: str, join_timeout_s: str) -> type[ModeOptions]:
    """Return the class Options of the mode; raises ConfigError if its options.py is invalid."""
    bound_s = Config.model_fields["join_timeout_s"].default
    with suppress(ValueError):  # reported with all other faults
        bound_s = min(max(float(join_timeout_s), 0.1), MOST_SECONDS)
    try:
        with user_code.refusing_exits(bound_s, ConfigError):
            return declared(mode)
    except ConfigError:
        raise
    except Exception as error:  # any exception of a user's file
        why = f"{type(error).__name__}: {error}"
        raise ConfigError([f"RUN_MODE={mode!r} has an options.py that cannot be imported: {why}"]) from error


def text_of(value: Any) -> str:
    """Return the value of a setting as text for its variable."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _set_in(part: BaseModel) -> dict[str, str]:
    set_fields = {name: type(part).model_fields[name] for name in part.model_fields_set}
    return {  # without the key: a repeated run has another
        entry.alias or name: text_of(getattr(part, name)) for name, entry in set_fields.items() if not entry.exclude
    }
