"""A mode's own variables and sizes, read from its lesson without running it.

Settings are checked before torch is imported, and a lesson imports torch. So a lesson states what is its own in one
class,

    class Options(ModeOptions):
        sizes = {"width": 64}  # defaults of common variables that differ here
        ratio: float = Field(0.01, alias="LAB_RATIO", gt=0, le=1, description="share of the gradients that topk sends")

whose lines need nothing but the names of this file: they alone are run here. `config.own(Options)` gives the lesson its
values. What the lessons of pipelines have in common stands here once, for them to build on.
"""

import ast
import copyreg
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Field", "Literal", "ModeOptions", "PipelineOptions", "aliases", "declared"]


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


@cache
def declared(lesson: Path) -> type[ModeOptions]:
    """The class Options of the lesson in this file; ModeOptions itself where it has none, or is no Python."""
    try:
        tree = ast.parse(lesson.read_text())
    except (OSError, SyntaxError, ValueError):  # the import says it in its own words
        return ModeOptions
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options"]
    known = ("Field", "Literal", "ModeOptions", "PipelineOptions")
    names: dict[str, Any] = {name: globals()[name] for name in known}
    exec(compile(ast.Module(list[ast.stmt](found), []), str(lesson), "exec"), names | {"__name__": __name__}, names)
    options: type[ModeOptions] = names.get("Options", ModeOptions)
    if options is not ModeOptions:  # no module has it by name, so a process that it is sent to reads the lesson again
        copyreg.pickle(options, lambda values: (_again, (lesson, values.model_dump(exclude_unset=True))))
    return options


def _again(lesson: Path, values: dict[str, Any]) -> ModeOptions:
    return declared(lesson)(**values)


def aliases(kind: type[BaseModel]) -> dict[str, str]:
    """The field of each variable."""
    return {field.alias: name for name, field in kind.model_fields.items() if field.alias}
