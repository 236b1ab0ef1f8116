"""Distributed tests that end: `@distlab.ranks(4)` runs a test's body on a pool of ranks that are watched.

What a test file uses: `@distlab.ranks(...)`, and in its body `distlab.same_as_one_process(...)`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

TIMEOUT_S = 10.0


def ranks(
    *world_sizes: int,
    timeout_s: float | Sequence[float] = TIMEOUT_S,
    backend: str | Sequence[str] = "gloo",
    mesh: Mapping[str, int] | None = None,
) -> "pytest.MarkDecorator":
    """Run the body of a test on this many ranks at once; several numbers, backends or bounds: one test for each.

    @distlab.ranks(4)                                  on four ranks
    @distlab.ranks()                                   on as many as `pytest --ranks 2,4` says (default: 2)
    @distlab.ranks(1, 2, 3, timeout_s=30)              three tests
    @distlab.ranks(4, mesh={"dp": 2, "tp": 2})         the fixture `mesh` is a DeviceMesh of these axes

    A test that takes longer than `timeout_s` fails, and the report says where each rank was. Raises ValueError for an
    invalid number of ranks, or one that does not fill the mesh.
    """
    import pytest

    refuse(world_sizes, mesh or {})
    backends = [backend] if isinstance(backend, str) else list(backend)
    bounds = [timeout_s] if isinstance(timeout_s, int | float) else list(timeout_s)
    return pytest.mark.ranks(world_sizes=list(world_sizes), timeouts_s=bounds, backends=backends, mesh=dict(mesh or {}))


def refuse(world_sizes: Sequence[Any], mesh: Mapping[str, int]) -> None:
    """Raise ValueError for invalid ranks or mesh."""
    wrong = [each for each in world_sizes if not isinstance(each, int) or isinstance(each, bool) or each < 1]
    if wrong:
        raise ValueError(f"ranks got {wrong[0]!r}, allowed: numbers of ranks from 1, as in @distlab.ranks(2, 4)")
    unfilled = [each for each in world_sizes if mesh and math.prod(mesh.values()) != each]
    if unfilled:
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        raise ValueError(f"a mesh of {axes} has {math.prod(mesh.values())} ranks, not {unfilled[0]}")


def same_as_one_process(**own: Any) -> None:
    """In a test on ranks: check that these compute what one process computes; see distlab/tools/prove/proof.py."""
    from distlab.tools.prove.proof import same_as_one_process as proven  # imports torch

    proven(**own)
