"""Invalid settings in containers: each affected rank prints one sentence, has the right exit code, and leaves no files."""

from pathlib import Path

import pytest

from tests.compose.conftest import change_owner
from tests.compose.containers import TINY, TOP, Containers, call

pytestmark = pytest.mark.compose


def assert_refused(cluster: Containers, codes: dict[int, int], *sentences: str) -> None:
    assert set(codes.values()) == {2}, cluster.logs()
    for rank in codes:
        assert all(sentence in cluster.log(rank) for sentence in sentences), cluster.logs()
        assert "Traceback" not in cluster.log(rank)
    assert list(cluster.runs.iterdir()) == []


@pytest.mark.parametrize(
    ("service", "variables", "sentence"),
    [
        ("worker0", {"WORLD_SIZE": "9"}, "WORLD_SIZE='9' is out of range: expected 1 to 8"),
        ("worker0", {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is out of range"),
        ("worker0", {"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' is not a whole number"),
        ("worker4", {"WORLD_SIZE": "4"}, "RANK=4 is outside of WORLD_SIZE=4, allowed: 0 to 3"),
        ("worker0", {"RANK": ""}, "MASTER_ADDR='worker0' is set and RANK is not"),
        ("worker0", {"RUN_MODE": "tpp"}, "RUN_MODE='tpp' is not a mode"),
        ("worker0", {"LAB_STEP": "5"}, "LAB_STEP is not a variable of the lab (did you mean 'LAB_STEPS'?)"),
        ("worker0", {"LAB_MODEL": "gtp", "LAB_SEED": "x"}, "did you mean 'gpt'"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_a_single_rank_refuses_invalid_settings(
    cluster: Containers, service: str, variables: dict[str, str], sentence: str
) -> None:
    done = cluster.run_alone(service, **variables)
    assert done.returncode == 2, done.stdout
    assert sentence in done.stdout
    assert "Traceback" not in done.stdout
    assert list(cluster.runs.iterdir()) == []


WRONG_TOGETHER = {
    "LAB_BATCH": "1",
    "LAB_VARIANT": "bucket",
    "LAB_BUG": "no_sample",
    "LAB_MODEL": "gpt",
    "LAB_TEXT": "texts/absent.txt",
}


@pytest.mark.parametrize(
    ("variables", "sentences"),
    [
        (
            WRONG_TOGETHER,
            [
                "LAB_BATCH=1 ",
                "LAB_VARIANT='bucket' is not a variant of dp (did you mean 'bucketed'?)",
                "LAB_BUG='no_sample' is not a bug of dp (did you mean 'no_sampler'?)",
                "LAB_TEXT='texts/absent.txt' does not exist",
            ],
        ),
        ({"LAB_BACKEND": "nccl"}, ["LAB_BACKEND=nccl"]),
    ],
    ids=["all at once", "no gpu"],
)
def test_every_rank_refuses_invalid_settings(
    cluster: Containers, variables: dict[str, str], sentences: list[str]
) -> None:
    assert_refused(cluster, cluster.run(2, **TINY | variables), *sentences)


def test_an_unwritable_folder_of_runs_is_refused(cluster: Containers, image: str) -> None:
    change_owner(image, cluster.runs, "1234:1234")
    change_mode(image, cluster.runs, "555")
    codes = cluster.run(2, **TINY)
    assert_refused(cluster, codes, "runs/ cannot be written by its owner, uid 1234")


def change_mode(image: str, folder: Path, bits: str) -> None:
    call(
        "docker", "run", "--rm", "-v", f"{folder}:/folder", "--entrypoint", "chmod", f"distlab:{image}", bits, "/folder"
    )


def test_a_full_disk_ends_the_run(image: str, tmp_path: Path) -> None:
    """runs/ is a file system of 8 kB on each rank, and the records are larger."""
    overlay = write_overlay(
        tmp_path, "worker0", "worker1", volume="{type: tmpfs, target: /lab/runs, tmpfs: {size: 8192}}"
    )
    cluster = Containers(image, tmp_path, overlay)
    try:
        codes = cluster.run(2, LAB_VARIANT="flat", **TINY)
        assert set(codes.values()) == {1}, cluster.logs()
        assert all("No space left on device" in cluster.log(rank) for rank in codes), cluster.logs()
        assert "Traceback" not in cluster.logs()
    finally:
        cluster.down()


def test_a_rank_of_another_version_is_refused(image: str, tmp_path: Path) -> None:
    other = tmp_path / "train.py"
    other.write_text((TOP / "experiments/train/__init__.py").read_text() + "# another\n")
    overlay = write_overlay(
        tmp_path, "worker1", volume=f"{{type: bind, source: {other}, target: /lab/experiments/train.py}}"
    )
    cluster = Containers(image, tmp_path, overlay)
    try:
        codes = cluster.run(2, **TINY)
        assert set(codes.values()) == {3}, cluster.logs()
        assert all("version" in cluster.log(rank) for rank in codes), cluster.logs()
    finally:
        cluster.down()


def write_overlay(folder: Path, *services: str, volume: str) -> Path:
    path = folder / "overlay.yaml"
    path.write_text("services:\n" + "".join(f"  {service}:\n    volumes:\n      - {volume}\n" for service in services))
    return path


def test_a_duplicate_rank_is_named_with_its_host(cluster: Containers) -> None:
    cluster.up(2, LAB_JOIN_TIMEOUT_S="30", **TINY | {"LAB_STEPS": "3000"})
    cluster.wait_for_line(1, "rank 1 of 2")  # rank 1 has joined, so that the second one is the duplicate
    done = cluster.run_alone("worker1", WORLD_SIZE="2", **TINY | {"LAB_STEPS": "3000"})
    assert done.returncode == 3, done.stdout
    hosts = [call("docker", "inspect", "--format", "{{.Config.Hostname}}", cluster.name(1)).stdout.strip()]
    assert "rank 1" in done.stdout
    assert hosts[0] in done.stdout


def test_an_unknown_master_address_is_named(cluster: Containers) -> None:
    done = cluster.run_alone("worker1", MASTER_ADDR="nobody", LAB_JOIN_TIMEOUT_S="2")
    assert done.returncode == 3, done.stdout
    assert "nobody" in done.stdout
    assert "Traceback" not in done.stdout
