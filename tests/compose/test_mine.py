"""A mode from mine/ in containers, the one that its README shows: proven and explained; its mistake is made by local
ranks."""

from collections.abc import Iterator

import pytest

from tests.compose.containers import TINY, TOP, Containers, call
from tests.test_mine import shown

pytestmark = pytest.mark.compose


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Its path as containers and the host see it, one for each test that runs beside others; gone after the test."""
    path = TOP / "mine" / f"tried_by_{request.node.name.partition('[')[0]}.py"
    path.write_text(shown())
    yield str(path.relative_to(TOP))
    path.unlink()


def test_the_users_mode_is_proven(cluster: Containers, mode: str) -> None:
    codes = cluster.run(2, RUN_MODE=mode, **TINY)
    assert set(codes.values()) == {0}, cluster.logs()
    run = cluster.verdict()
    assert (run["verdict"], run["proven"], run["run_mode"]) == ("pass", True, mode)
    assert mode in cluster.log(0)


def test_make_explain_accepts_the_path_of_a_mode(mode: str, image: str) -> None:  # noqa: ARG001  built before
    said = call("make", "explain", environ={"RUN_MODE": mode}, timeout_s=110).stdout
    assert "from outside of the lab" in said
    assert "each rank trains on its own samples alone" in said
