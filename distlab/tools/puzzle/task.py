"""A task: an idea, a function to fill in, hints, one process' result, and bounds of an answer's cost."""

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

WORLD_SIZES = (2, 3, 4, 1)  # 2 ranks show most errors, in the shortest form
TOLERANCE = 1e-12  # relative to the largest number of a tensor, or to 1 if that is less
FLOAT64_BYTES = 8
MESSAGES = frozenset({"send", "recv"})

Tensors = dict[str, Tensor]


class CallRecord(NamedTuple):
    """A call of torch.distributed on one rank: the bytes that it must send, and its line in the answer."""

    op: str
    sent_bytes: float
    line: str
    waits: bool = False  # until it is done, before it returns


@dataclass(frozen=True)
class Report:
    """One rank's results: tensors by name, calls, bytes sent by its sockets, and other observations."""

    tensors: Tensors = field(default_factory=dict)
    calls: Sequence[CallRecord] = ()
    wire_bytes: int | None = None  # None if the kernel does not count
    peak_bytes: int = 0  # of all tensors that the answer made or received, at one time
    seen: Mapping[str, Any] = field(default_factory=dict)  # what a task has recorded

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
    """The largest cost of an answer; None is not bounded."""

    rank_bytes: float | None = None  # that any rank sends
    all_bytes: float | None = None  # that all ranks send together
    messages: int | None = None  # that any rank sends: rounds, if sequential
    calls: int | None = None  # of collectives, on any rank
    peak_bytes: float | None = None  # of tensors on any rank


class Bench(Protocol):
    """A task's tools on a rank."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    folder: str  # for files, of all ranks

    def measured(self) -> AbstractContextManager[None]:
        """Return a context that measures the answer; enter it once."""

    def num_calls(self) -> int:
        """Return the number of calls so far inside `measured`."""

    def note(self, name: str, value: Any) -> None:
        """Record a value in the report's `seen`."""


Play = Callable[[Any, Bench], Tensors]


def no_suspects(world_size: int) -> dict[str, list[Tensors]]:  # noqa: ARG001
    """Return no suspects."""
    return {}


def nothing_else(world_size: int, reports: Sequence[Report]) -> str:  # noqa: ARG001
    """Require nothing else."""
    return ""


def unbounded(world_size: int) -> Bound:  # noqa: ARG001
    """Return no bound."""
    return Bound()


@dataclass(frozen=True)
class Task:
    """One task. Functions of a world size compute in one process, and return a list by rank."""

    number: int
    name: str
    title: str
    idea: str  # 3 to 8 sentences
    stub: str  # the functions with their shapes and `...`
    hints: Sequence[str]
    allowed: frozenset[str]  # operations of torch.distributed that an answer may call
    limits: str  # the bound in words
    play: Play  # on a rank: calls the answer, and returns the tensors to compare
    expected: Callable[[int], list[Tensors]]
    bound: Callable[[int], Bound] = unbounded
    suspects: Callable[[int], dict[str, list[Tensors]]] = no_suspects  # results of typical errors, by a description
    inspect: Callable[[int, Sequence[Report]], str] = nothing_else  # other requirements: a sentence if one is not met
    resume: Play | None = None  # if given, ranks are killed in `play`, and new ones run this

    @property
    def file(self) -> str:
        return f"{self.number:02d}_{self.name}.py"

    @property
    def functions(self) -> list[str]:
        """Return the names that an answer must define."""
        return functions_of(self.stub)


def functions_of(source: str) -> list[str]:
    """Return a source's top-level functions; raises SyntaxError."""
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def sizes_of(total: int, parts: int) -> list[int]:
    """Return different, unsorted sizes that add up to `total`."""
    weights = [5 + 3 * ((2 * part + 1) % 5) + part for part in range(parts)]
    sizes = [total * weight // sum(weights) for weight in weights]
    sizes[-1] += total - sum(sizes)
    return sizes


def numbers(seed: int, *shape: int) -> Tensor:
    """Return normal numbers in float64, equal on all ranks with this seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_reduce_bytes(nbytes: float, world_size: int) -> float:
    """Return the bytes per rank of the best all_reduce."""
    return 2 * nbytes * (world_size - 1) / world_size
