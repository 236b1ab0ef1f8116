"""Fixtures of tests with real containers: one image and project per session, one folder of runs per test."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.containers import TOP, Containers, call


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    """Return the name of a Compose project with an image of this tree, which is removed after the session."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=30).returncode
    ):
        if os.environ.get("CI"):
            pytest.fail("no Docker engine responds, and CI requires the container tests")
        pytest.skip("no Docker engine responds")
    project = f"distlab-test-{os.getpid()}"
    call("docker", "compose", "-p", project, "build", timeout_s=900)
    yield project
    call("docker", "rmi", "--force", f"distlab:{project}")


@pytest.fixture
def cluster(image: str, tmp_path: Path) -> Iterator[Containers]:
    """Return a cluster whose containers and files are removed after the test."""
    runs = tmp_path / "runs"
    runs.mkdir()
    containers = Containers(image, runs)
    yield containers
    containers.down()
    give_back(image, tmp_path)


@pytest.fixture
def clone(image: str, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of this tree that belongs to the user 1234; its folder's name is its Compose project."""
    folder = tmp_path / f"distlab-clone-{os.getpid()}"
    files = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout.split("\0")
    for file in filter(None, files):
        if (TOP / file).is_file() or (TOP / file).is_symlink():  # experiments and engines are links in the package
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / file, folder / file, follow_symlinks=False)
    change_owner(image, folder, "1234:1234")
    yield folder
    call("docker", "compose", "down", "--remove-orphans", "--timeout", "0", environ={"WORLD_SIZE": "8"}, folder=folder)
    subprocess.run(["docker", "rmi", "--force", f"distlab:{folder.name}"], capture_output=True, check=False, timeout=60)
    give_back(image, tmp_path)


def change_owner(image: str, folder: Path, owner: str) -> None:
    """Change the owner of a folder in a container, which any user of Docker may do."""
    call(
        "docker",
        "run",
        "--rm",
        "-v",
        f"{folder}:/folder",
        "--entrypoint",
        "chown",
        f"distlab:{image}",
        "-R",
        owner,
        "/folder",
    )


def give_back(image: str, folder: Path) -> None:
    """Give a folder back to this user, so that pytest can remove it."""
    change_owner(image, folder, f"{os.getuid()}:{os.getgid()}")
