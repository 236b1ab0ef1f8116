"""What a task is: an idea, a function to fill in, hints, what one process computes, and what an answer may cost."""

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

WORLD_SIZES = (2, 3, 4, 1)  # with 2 ranks most errors show, and read best
TOLERANCE = 1e-12  # relative to the largest number of a tensor, or to 1 if that is less
FLOAT64_BYTES = 8
MESSAGES = frozenset({"send", "recv"})

Tensors = dict[str, Tensor]


class Made(NamedTuple):
    """A call of torch.distributed on one rank: the bytes that it has to send, and the line of the answer."""

    op: str
    sent_bytes: float
    line: str
    waits: bool = False  # until it is over, before it returns


@dataclass(frozen=True)
class Report:
    """What one rank did: its tensors by name, its calls, what its sockets sent, and what else was looked at."""

    tensors: Tensors = field(default_factory=dict)
    calls: Sequence[Made] = ()
    wire_bytes: int | None = None  # None where the kernel does not count
    peak_bytes: int = 0  # of all tensors that the answer made or was given, at one time
    seen: Mapping[str, Any] = field(default_factory=dict)  # what a task has noted on the way

    @property
    def sent_bytes(self) -> float:
        return sum(each.sent_bytes for each in self.calls)

    @property
    def num_messages(self) -> int:
        return sum(each.op == "send" for each in self.calls)

    @property
    def num_calls(self) -> int:
        return sum(each.op not in MESSAGES for each in self.calls)


class Bound(NamedTuple):
    """The most that an answer may cost; None is not bounded."""

    rank_bytes: float | None = None  # that any rank sends
    all_bytes: float | None = None  # that all ranks send together
    messages: int | None = None  # that any rank sends: rounds, where they follow each other
    calls: int | None = None  # of collectives, on any rank
    peak_bytes: float | None = None  # of tensors on any rank


class Bench(Protocol):
    """What a task has on a rank."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    folder: str  # for files, of all ranks

    def measured(self) -> AbstractContextManager[None]:
        """What the answer does inside is counted; enter it once."""

    def num_calls(self) -> int:
        """Calls that were made so far inside `measured`."""

    def note(self, name: str, value: Any) -> None:
        """Put it into the report's `seen`."""


Play = Callable[[Any, Bench], Tensors]


def nothing(world_size: int) -> dict[str, list[Tensors]]:  # noqa: ARG001
    """No suspect."""
    return {}


def all_is_well(world_size: int, reports: Sequence[Report]) -> str:  # noqa: ARG001
    """Nothing else is asked for."""
    return ""


def unbounded(world_size: int) -> Bound:  # noqa: ARG001
    """No bound."""
    return Bound()


@dataclass(frozen=True)
class Task:
    """One task. Functions of a world size compute in one process, and give a list by rank."""

    number: int
    name: str
    title: str
    idea: str  # 3 to 8 sentences
    stub: str  # the functions with their shapes and `...`
    hints: Sequence[str]
    allowed: frozenset[str]  # operations of torch.distributed that an answer may call
    limits: str  # the bound in words
    play: Play  # on a rank: calls the answer, and returns what is compared
    expected: Callable[[int], list[Tensors]]
    bound: Callable[[int], Bound] = unbounded
    suspects: Callable[[int], dict[str, list[Tensors]]] = nothing  # what typical errors give, in words
    inspect: Callable[[int, Sequence[Report]], str] = all_is_well  # what else has to hold: a sentence where it does not
    resume: Play | None = None  # with it the ranks are killed while `play` runs, and new ones do this

    @property
    def file(self) -> str:
        return f"{self.number:02d}_{self.name}.py"

    @property
    def functions(self) -> list[str]:
        """The names that an answer has to define."""
        return functions_of(self.stub)


def functions_of(source: str) -> list[str]:
    """The functions at the top of a source; raises SyntaxError."""
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def sizes_of(total: int, parts: int) -> list[int]:
    """Parts that are all different, in no order, and sum up to `total`."""
    weights = [5 + 3 * ((2 * part + 1) % 5) + part for part in range(parts)]
    sizes = [total * weight // sum(weights) for weight in weights]
    sizes[-1] += total - sum(sizes)
    return sizes


def numbers(seed: int, *shape: int) -> Tensor:
    """Normal numbers in float64, the same on every rank that asks with this seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_reduce_bytes(nbytes: float, world_size: int) -> float:
    """What the best all_reduce sends on each rank."""
    return 2 * nbytes * (world_size - 1) / world_size
