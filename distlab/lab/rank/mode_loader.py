"""Load what a rank needs before its run: the MODE of a lesson, by its name in experiments/ or by the path of an outside
one, the later imports of torch, and the device."""

import gc
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from distlab.contract import Mode, Variant
from distlab.lab.cluster import name_ranks
from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.config import Config, ConfigError, user_code
from distlab.lab.config.launchers import on_one_machine
from distlab.lab.config.settings import LESSONS, ModeOptions, is_path, lesson_file, mode_name, modes
from distlab.lab.measure.prediction import Prediction
from distlab.lab.rank.user_strategy import strategy_maker
from distlab.lab.report import records
from distlab.lab.report.units import human_bytes
from distlab.lab.workload.user_model import is_own


def load(run_mode: str) -> Mode:
    """Return the mode with its idea, the docstring of its lesson; raises ConfigError if that is not a lesson."""
    module = _import_file(run_mode) if is_path(run_mode) else importlib.import_module(f"{LESSONS}.{run_mode}")
    mode = getattr(module, "MODE", None)
    if not isinstance(mode, Mode):
        raise ConfigError(
            [f"RUN_MODE={run_mode!r} has no MODE: the file of a mode ends with MODE = Mode(...) from distlab.contract"]
        )
    if lesson_file(run_mode).name != "__init__.py" and _declares_options(module, mode):
        place = f"{run_mode.removesuffix('.py')}/options.py"
        raise ConfigError(
            [f"RUN_MODE={run_mode!r} has its own variables, so it must be a folder with class Options in {place}"]
        )
    return replace(
        mode, idea=inspect.cleandoc(module.__doc__ or f"{run_mode} has no docstring that explains its idea.")
    )


def load_for(config: Config) -> Mode:
    """Return the mode, with a user's strategies that LAB_VARIANT names as FILE:name; raises ConfigError."""
    faults, variants = [], []
    with user_code.refusing_exits(config.join_timeout_s, ConfigError):
        mode = load(config.run_mode)
        for spec in config.variant:
            if is_own(spec):
                try:
                    variants.append(Variant(spec, strategy_maker(spec)))
                except Exception as error:  # any exception of a user's file
                    how = "" if isinstance(error, TypeError) else f"cannot be used: {type(error).__name__}: "
                    faults.append(f"LAB_VARIANT={spec!r} {how}{error}")
    if faults:
        raise ConfigError(faults)
    return replace(mode, variants=(*mode.variants, *variants)).requested(config.variant)


def with_names_of_today(config: Config, mode: Mode) -> Config:
    """Return the same settings with current names in LAB_VARIANT, which may have older ones."""
    names = tuple(dict.fromkeys(mode.formerly.get(name, name) for name in config.variant))
    return config if names == config.variant else config.model_copy(update={"variant": names})


def modes_that(have: Callable[[Mode], bool]) -> str:
    """Return the names of all modes in experiments/ for which `have` is true, for a sentence; it imports them all."""
    return ", ".join(name for name in modes() if have(load(name)))


def _import_file(run_mode: str) -> ModuleType:
    """Import a lesson from its file, as a module of its own name; it can import modules next to it."""
    file, name = lesson_file(run_mode), mode_name(run_mode)
    folder = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any exception of a user's lesson
        raise ConfigError([f"RUN_MODE={run_mode!r} cannot be imported: {_error_with_line(error, file)}"]) from error
    return module


def _declares_options(module: ModuleType, mode: Mode) -> bool:
    """Return whether a lesson declares variables where they cannot be read before torch is imported."""
    stated = getattr(module, "Options", mode.options)
    return isinstance(stated, type) and issubclass(stated, ModeOptions) and stated is not ModeOptions


def _error_with_line(error: Exception, file: Path) -> str:
    """Return the error in one line, with the last line of the lesson that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    line = error.lineno if isinstance(error, SyntaxError) else next(reversed(lines), None)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}" + (f" (line {line})" if line else "")


# The lesson of a mode in the report: its idea, a sentence per variant, the predictions with their numbers.

PREDICTED = ["variant", "predicted per rank and step", "formula", "value", "calls"]


def lesson(config: Config, mode: Mode) -> records.Lesson:
    """Return what a reader of the report should know before its numbers."""
    variants = {each.name: each.description for each in mode.variants if each.description}
    return records.Lesson(paragraphs(mode.idea), variants, prediction_rows(mode.all_predictions(mode.predict(config))))


def paragraphs(idea: str) -> list[str]:
    """Return the text of a docstring without its tables, which are indented."""
    found = [" ".join(part.split()) for part in idea.split("\n\n") if not part.startswith("  ")]
    return [part for part in found if not part.endswith(":")]  # it introduces a table


def prediction_rows(predictions: list[Prediction]) -> list[list[str]]:
    """Return a row per prediction, as PREDICTED names its columns; if ranks differ, the least and the most."""
    rows = []
    for prediction in predictions:
        shown = [
            human_bytes(value) if prediction.unit == "B" else f"{value:g} {prediction.unit}"
            for value in sorted(prediction.value)
        ]
        value = shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"
        rows.append([prediction.variant, prediction.name, prediction.formula, value, str(prediction.calls or "")])
    return rows


# The later imports of torch come before the run, so that they can be frozen with the rest: a collection walks every
# object that is not frozen, and so does the memory ledger when it looks for tensors (distlab/lab/measure/memory.py).
# torch's compiler, which DDP, fully_shard and torch.optim import, is 812 modules of 118,000 objects; its checkpoints
# are 690 more modules. Imported during a run, they slowed each walk to 0.1 to 0.2 s.

COMPILER, CHECKPOINTS = "torch._dynamo", "torch.distributed.checkpoint"


def import_and_freeze(config: Config, mode: Mode) -> None:
    """Import what the run of `mode` will use, and exclude all current objects from later walks."""
    for module in modules_needed(config, mode):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def modules_needed(config: Config, mode: Mode) -> list[str]:
    wanted = [variant for variant in mode.variants if not config.variant or variant.name in config.variant]
    compiler = config.optimizer == "adamw" or any(each.by_torch and each.build is not None for each in wanted)
    checkpoints = any(each is not None for each in (config.checkpoint_every, config.resume, config.faults))
    return [COMPILER] * compiler + [CHECKPOINTS] * checkpoints


def pick_device(config: Config, engine: str = "") -> torch.device:
    """Return the device of this rank, which `engine` started; raises ConfigError if its card is missing.

    NCCL needs one card per rank: the one of LOCAL_RANK. An engine (Slurm's --gpus-per-task, Kubernetes) may show each
    rank its card alone; without local numbers it is RANK modulo the cards, and `check_cards` reports two ranks on one.
    Ranks over gloo may share cards.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = "LAB_BACKEND=nccl" if config.backend == "nccl" else "LAB_DEVICE=cuda"
    if count == 0:
        raise ConfigError(
            [f"{wanted} needs a GPU and rank {config.rank} sees none: use LAB_BACKEND=gloo LAB_DEVICE=cpu"]
        )
    numbered = config.local_rank is not None or on_one_machine()
    card = config.local_rank if config.local_rank is not None else config.rank or 0
    if config.backend == "gloo" or not numbered or (engine and count == 1):
        card %= count
    if card >= count:
        raise ConfigError(
            [
                f"rank {config.rank} has number {card} on its machine, counted from 0, which has {count}"
                f" GPU{'s' * (count > 1)}, and NCCL needs a GPU per rank: start at most {count} rank{'s' * (count > 1)}"
                " there, or set LAB_BACKEND=gloo, whose ranks can share a GPU"
            ]
        )
    torch.cuda.set_device(card)
    torch.set_float32_matmul_precision("highest")  # no TF32, which has 10 of float32's 23 bits
    return torch.device("cuda", card)


def check_cards(config: Config, device: torch.device, exchange: Exchange) -> None:
    """Raise ConfigError if two ranks share a card: NCCL would refuse it without naming them."""
    if config.backend != "nccl":
        return
    mine = str(torch.cuda.get_device_properties(device).uuid)
    cards = exchange.everyone("cards", mine)
    for card in dict.fromkeys(cards):
        sharing = [rank for rank, other in enumerate(cards) if other == card]
        if len(sharing) > 1:
            raise ConfigError(
                [
                    f"{name_ranks(sharing)} share one GPU ({card}); {len(cards)} ranks have {len(set(cards))} GPUs, and"
                    " NCCL needs a GPU per rank: start fewer ranks, or set LAB_BACKEND=gloo"
                ]
            )


def nccl_gave_up() -> bool:
    """Return whether NCCL has aborted a collective of any group: a peer was lost, or it timed out."""
    fine = torch._C._distributed_c10d.ErrorType.SUCCESS
    backends = [group._get_backend(torch.device("cuda")) for group in dist.distributed_c10d._world.pg_map]
    return any(each.get_error() != fine for each in backends if each.name() == "nccl" and hasattr(each, "get_error"))
