"""Whole runs in containers: one, three and eight ranks, a mode of each kind, and the owner of the files."""

import re
from pathlib import Path

import pytest

from tests.compose.conftest import change_owner
from tests.compose.containers import TINY, Containers, call

pytestmark = pytest.mark.compose


@pytest.mark.parametrize(("world_size", "variants"), [(3, ""), (8, "bucketed")])
def test_dp_passes_with_3_and_8_ranks(cluster: Containers, world_size: int, variants: str) -> None:
    codes = cluster.run(world_size, RUN_MODE="dp", LAB_VARIANT=variants, **TINY)
    assert set(codes.values()) == {0}, cluster.logs()
    run = cluster.verdict()
    assert (run["verdict"], run["world_size"]) == ("pass", world_size)
    assert run["checks"]
    assert "PASS" in cluster.log(0)


def test_the_image_alone_runs_one_rank(image: str) -> None:
    """The image is started without mounts. It contains the bytecode of what a run imports, because its root is read-only:
    without it, importing torch took 14 s instead of 3."""
    settings = {
        "PYTHONVERBOSE": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "RUN_MODE": "dp",
    } | TINY
    variables = [word for name, value in settings.items() for word in ("-e", f"{name}={value}")]
    done = call("docker", "run", "--rm", *variables, f"distlab:{image}", timeout_s=110, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"PASS +\d+ checks passed", done.stdout), done.stdout
    compiled = re.findall(r"# code object from (\S+\.py)$", done.stdout, re.MULTILINE)
    assert len(compiled) <= 3, compiled


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("comm", {"LAB_VARIANT": "gloo,ring,tcp", "LAB_BACKEND": "tcp", "LAB_SWEEP_MIB": "0.25"}),
        ("train", {"LAB_TEXT": "workers"}),  # a user's text may be a file or a folder; this one is in every image
    ],
)
def test_other_modes_pass_with_three_ranks(cluster: Containers, mode: str, settings: dict[str, str]) -> None:
    codes = cluster.run(3, RUN_MODE=mode, **settings)
    assert set(codes.values()) == {0}, cluster.logs()
    run = cluster.verdict()
    assert run["verdict"] == "pass"
    assert run["config"]["LAB_TEXT"] == settings.get("LAB_TEXT")


SMALL_GPT = {"LAB_MODEL": "gpt", "LAB_WIDTH": "32", "LAB_HEADS": "4", "LAB_DEPTH": "3", "LAB_STEPS": "3"}


def test_a_pipeline_over_three_ranks_is_proven(cluster: Containers) -> None:
    codes = cluster.run(3, RUN_MODE="pp", LAB_VARIANT="1f1b", **SMALL_GPT)
    assert set(codes.values()) == {0}, cluster.logs()
    run = cluster.verdict()
    assert run["proven"]
    assert {check["variant"] for check in run["checks"] if check["name"] == "gradients"} == {"1f1b"}


def test_a_failed_check_exits_1_on_every_rank(cluster: Containers) -> None:
    codes = cluster.run(2, LAB_BUG="means_of_shards", LAB_VARIANT="flat", **TINY)
    assert set(codes.values()) == {1}, cluster.logs()
    assert cluster.verdict()["verdict"] == "fail"


def test_files_belong_to_the_owner_of_runs(cluster: Containers, image: str) -> None:
    change_owner(image, cluster.runs, "4321:4322")
    codes = cluster.run(2, LAB_VARIANT="flat", **TINY)
    assert set(codes.values()) == {0}, cluster.logs()
    assert {owner(path) for path in cluster.runs.rglob("*")} == {(4321, 4322)}


def owner(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_uid, status.st_gid
