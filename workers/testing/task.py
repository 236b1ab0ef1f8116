"""What travels between pytest and a rank: a test to run, and how it ended there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """A test's body for one rank."""

    module: str  # the test file's module, its path, and the name in it: a function, or Class.method
    file: str
    name: str
    arguments: Mapping[str, Any]
    world_size: int
    number: int  # of the task in this pool: its process group's keys begin with it
    port: int  # of the pool's store
    timeout_s: float
    backend: str = "gloo"
    mesh: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How it ended on a rank: "passed", "failed" or "skipped", and the text."""

    outcome: str
    text: str = ""


@dataclass(frozen=True)
class OnRank:
    """In the place of an argument that a rank makes by itself: its group, its mesh, its number."""

    what: str
