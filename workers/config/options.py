"""A mode's own variables and sizes: the class Options in the options.py of its folder.

    class Options(ModeOptions):
        sizes = {"width": 64}  # defaults of common variables that differ here
        ratio: float = Field(0.01, alias="LAB_RATIO", gt=0, le=1, description="share of the gradients that topk sends")

Settings are checked before torch is imported, and a lesson imports torch. So options.py imports nothing but this file,
and is loaded without the package around it. `config.own(Options)` gives the lesson its values. What the lessons of
pipelines have in common stands here once, for them to build on.
"""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from workers.config.values import LESSONS, is_path, lesson_file, mode_name

__all__ = ["Field", "ModeOptions", "PipelineOptions", "aliases", "declared"]


class ModeOptions(BaseModel):
    """The variables that one mode alone knows; frozen, each with an alias that begins with LAB_."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    sizes: ClassVar[Mapping[str, Any]] = {}  # by field of Config

    def untimed(self) -> Self:
        """The same for passes that measure no time: a mode that pretends compute leaves it out there."""
        return self


class PipelineOptions(ModeOptions):
    """What only pipelines know."""

    chunks: int = Field(
        2, alias="LAB_CHUNKS", ge=1, le=10_000, description="stages that a rank holds in the interleaved schedules"
    )
    sleep_ms: float = Field(
        0, alias="LAB_SLEEP_MS", ge=0, le=60_000, allow_inf_nan=False,
        description="milliseconds of pretended compute of a microbatch forward through one rank, twice that backward",
    )  # fmt: skip

    def untimed(self) -> Self:
        """Without pretended compute."""
        return self.model_copy(update={"sleep_ms": 0})


def declared(run_mode: str) -> type[ModeOptions]:
    """The class Options of a mode, ModeOptions where its folder has no options.py; raises whatever that file raises."""
    lesson = lesson_file(run_mode)
    file = lesson.with_name("options.py")
    if lesson.name != "__init__.py" or not file.is_file():
        return ModeOptions
    package = mode_name(run_mode) if is_path(run_mode) else f"{LESSONS}.{run_mode}"
    options: type[ModeOptions] = loaded(f"{package}.options", file).Options
    return options


def loaded(name: str, file: Path) -> ModuleType:
    """The module in this file, which then whoever imports it by its name gets; the package is not imported for it."""
    there = sys.modules.get(name)
    if there is not None and there.__file__ == str(file):
        return there
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def aliases(kind: type[BaseModel]) -> dict[str, str]:
    """The field of each variable."""
    return {field.alias: name for name, field in kind.model_fields.items() if field.alias}
