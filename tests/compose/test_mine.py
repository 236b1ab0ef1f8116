"""The mode of mine/README.md in containers: proven and explained. tests/test_mine.py runs its injected bug."""

from collections.abc import Iterator

import pytest

from tests.compose.containers import TINY, TOP, Containers, call
from tests.test_mine import page_code

pytestmark = pytest.mark.compose


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Write the mode to its own file in mine/, which containers and the host see; it is removed after the test."""
    path = TOP / "mine" / f"tried_by_{request.node.name.partition('[')[0]}.py"
    path.write_text(page_code())
    yield str(path.relative_to(TOP))
    path.unlink()


def test_the_users_mode_is_proven(cluster: Containers, mode: str) -> None:
    codes = cluster.run(2, RUN_MODE=mode, **TINY)
    assert set(codes.values()) == {0}, cluster.logs()
    run = cluster.verdict()
    assert (run["verdict"], run["proven"], run["run_mode"]) == ("pass", True, mode)
    assert mode in cluster.log(0)


def test_make_explain_accepts_the_path_of_a_mode(mode: str, image: str) -> None:  # noqa: ARG001  built before
    output = call("make", "explain", environ={"RUN_MODE": mode}, timeout_s=110).stdout
    assert "from outside of the lab" in output
    assert "each rank trains on its own samples alone" in output
