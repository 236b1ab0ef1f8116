"""compose/requirements.lock: all packages of the image except torch, with the tested versions and hashes."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TOP = Path(__file__).parent.parent
LOCK = (TOP / "compose/requirements.lock").read_text()
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)


def pinned(text: str) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in PINNED.findall(text)}


def test_every_file_of_every_version_has_a_hash() -> None:
    for entry in re.split(r"\n(?=[a-z])", LOCK.partition("\n")[2])[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    assert "://" not in LOCK, "the lock names the host of an index"


def test_the_versions_equal_the_constraints() -> None:
    checked = pinned((TOP / "constraints.txt").read_text())
    other = {name: version for name, version in pinned(LOCK).items() if checked.get(name, version) != version}
    assert other == {}


def test_the_lock_has_all_requirements_except_torch() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())
    required = [*project["project"]["dependencies"], *project["dependency-groups"]["image"]]
    torch_needs = [Requirement(each) for each in metadata.requires("torch") or []]
    names = {canonicalize_name(Requirement(each).name) for each in required} | {
        canonicalize_name(each.name)
        for each in torch_needs
        if (each.marker is None or each.marker.evaluate({"extra": ""})) and not each.name.startswith(("nvidia", "cuda", "triton"))
    }  # fmt: skip
    assert names - set(pinned(LOCK)) == {"torch"}
