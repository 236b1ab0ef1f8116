"""What a test file types: `@ranklab.ranks(...)`, and in its body `ranklab.same_as_one_process(...)`."""

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
    """Run the body of a test on this many ranks at once; several numbers, backends or bounds make a test each.

    @ranklab.ranks(4)                                  on four ranks
    @ranklab.ranks(1, 2, 3, timeout_s=30)              three tests
    @ranklab.ranks(4, mesh={"dp": 2, "tp": 2})         the fixture `mesh` is a DeviceMesh of these axes

    A test that takes longer than `timeout_s` fails with what the doctor has seen.
    """
    import pytest

    backends = [backend] if isinstance(backend, str) else list(backend)
    bounds = [timeout_s] if isinstance(timeout_s, int | float) else list(timeout_s)
    return pytest.mark.ranks(world_sizes=list(world_sizes), timeouts_s=bounds, backends=backends, mesh=dict(mesh or {}))


def same_as_one_process(**own: Any) -> None:
    """In a test on ranks: that these compute what one process does; see workers/prove/inside.py."""
    from workers.prove.inside import same_as_one_process as proven  # torch comes in here

    proven(**own)
