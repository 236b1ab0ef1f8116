"""The Compose files as Compose reads them: the started ranks, the passed variables, and a rank's privileges."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from distlab.lab.config import ON_ONE_MACHINE, Config
from distlab.lab.config.variables import COMPOSE_FILE, compose_lines, names

TOP = Path(__file__).parent.parent.parent
FILES = ["docker-compose.yaml", "docker-compose.gpu.yaml"]

needs_compose = pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")


def resolved(*files: str, **variables: str) -> dict[str, Any]:
    """Return the output of `docker compose config` for the files with only these variables."""
    command = [
        "docker",
        "compose",
        *[part for file in files or FILES[:1] for part in ("-f", file)],
        "config",
        "--format",
        "json",
    ]
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | variables
    done = subprocess.run(command, cwd=TOP, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    config: dict[str, Any] = json.loads(done.stdout)
    return config


def raw(file: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((TOP / file).read_text())
    return content


@needs_compose
@pytest.mark.parametrize("files", [FILES[:1], FILES], ids=["cpu", "gpu"])
@pytest.mark.parametrize("world_size", range(1, ON_ONE_MACHINE + 1))
def test_exactly_world_size_ranks_start(files: list[str], world_size: int) -> None:
    services = resolved(*files, WORLD_SIZE=str(world_size))["services"]
    assert sorted(services) == [f"worker{rank}" for rank in range(world_size)]
    for rank in range(world_size):
        environment = services[f"worker{rank}"]["environment"]
        assert environment["RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == str(world_size)
        assert environment["MASTER_ADDR"] == "worker0"


@needs_compose
@pytest.mark.parametrize("world_size", ["0", "9", "abc"])
def test_an_invalid_world_size_starts_only_rank_0(world_size: str) -> None:
    services = resolved(WORLD_SIZE=world_size)["services"]
    assert list(services) == ["worker0"]
    assert services["worker0"]["environment"]["WORLD_SIZE"] == world_size


@needs_compose
@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": ""}], ids=["unset", "empty"])
def test_four_ranks_start_by_default(variables: dict[str, str]) -> None:
    assert len(resolved(**variables)["services"]) == Config.model_fields["world_size"].default


def test_exactly_the_known_variables_are_passed_on() -> None:
    assert compose_lines() in COMPOSE_FILE.read_text(), "python -m distlab.lab.config.variables --write corrects it"
    passed_on = raw("docker-compose.yaml")["x-environment"]
    assert set(passed_on) == {*names(), "MASTER_ADDR", "RANKS_ON_HOST", "DISTLAB_STARTED_BY"} - {
        "RANK",
        "LOCAL_RANK",
        "LAB_RUNS_DIR",
        "LAB_KEY_FILE",
    }
    bare = {name for name, value in passed_on.items() if value is None}
    assert set(passed_on) - bare == {
        "WORLD_SIZE",
        "MASTER_ADDR",
        "RANKS_ON_HOST",
        "DISTLAB_STARTED_BY",
    }  # only these have a value in the file


@needs_compose
def test_only_set_variables_reach_a_rank() -> None:
    environment = resolved(LAB_STEPS="7")["services"]["worker3"]["environment"]
    assert environment["LAB_STEPS"] == "7"
    assert environment["LAB_LR"] is None
    assert environment["RUN_MODE"] is None


@needs_compose
def test_a_rank_has_minimal_privileges() -> None:
    config = resolved(WORLD_SIZE="8")
    assert config["networks"]["default"]["internal"] is True
    for service in config["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert sorted(service["cap_add"]) == ["KILL", "SETGID", "SETUID"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp:size=512m"]
        assert service["pids_limit"] == 1024
        assert service["init"] is True
        assert service["stop_grace_period"] == "5s"
        assert not {"ports", "privileged", "devices", "network_mode", "pid", "ipc"} & set(service)
        writable = [mount["target"] for mount in service["volumes"] if not mount.get("read_only")]
        assert writable == ["/lab/runs"]
        assert {mount["target"] for mount in service["volumes"]} == {"/lab/runs", "/lab/texts", "/lab/mine"}


@needs_compose
def test_lab_memory_limits_a_rank() -> None:
    limited = resolved(LAB_MEMORY="900m")["services"]["worker1"]
    assert int(limited["mem_limit"]) == int(limited["memswap_limit"]) == 900 * 2**20
    free = resolved()["services"]["worker1"]
    assert int(free.get("mem_limit", 0)) == int(free.get("memswap_limit", 0)) == 0


@needs_compose
def test_a_key_file_is_passed_as_a_secret(tmp_path: Path) -> None:
    with_key, unset = resolved(LAB_KEY_FILE=str(tmp_path / "key")), resolved()
    assert with_key["secrets"]["lab_key"]["file"] == str(tmp_path / "key")
    assert Path(unset["secrets"]["lab_key"]["file"]).read_text() == ""
    for service in with_key["services"].values():
        assert [secret["source"] for secret in service["secrets"]] == ["lab_key"]
        assert "LAB_KEY_FILE" not in service["environment"]


@needs_compose
def test_one_service_builds_the_image_of_all() -> None:
    config = resolved(WORLD_SIZE="8", COMPOSE_PROJECT_NAME="somebody")
    assert [name for name, service in config["services"].items() if "build" in service] == ["worker0"]
    assert {service["image"] for service in config["services"].values()} == {"distlab:somebody"}


@needs_compose
@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, "https://download.pytorch.org/whl/cpu"),
        ({"TORCH_INDEX_URL": ""}, ""),
        ({"TORCH_INDEX_URL": "https://a/b"}, "https://a/b"),
    ],
    ids=["unset", "empty", "set"],
)
def test_an_empty_torch_index_is_passed_on(variables: dict[str, str], index: str) -> None:
    assert resolved(**variables)["services"]["worker0"]["build"]["args"]["TORCH_INDEX_URL"] == index


@needs_compose
def test_the_gpu_overlay_uses_nccl_on_all_gpus() -> None:
    for service in resolved(*FILES, WORLD_SIZE="8", COMPOSE_PROJECT_NAME="clone")["services"].values():
        assert service["environment"]["LAB_BACKEND"] == "nccl"
        assert service["environment"]["LAB_DEVICE"] == "cuda"
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
        assert service["ipc"] == "host"  # one /dev/shm, and one machine to NCCL
        assert service["environment"]["NCCL_HOSTID"] == "clone"  # one id for all ranks of a cluster
        assert service["ulimits"]["memlock"] == -1
        assert service["cap_drop"] == ["ALL"]  # still as in the first file
    shared = resolved(*FILES, LAB_BACKEND="gloo")["services"]["worker0"]
    assert (shared["environment"]["LAB_BACKEND"], shared["build"]["args"]["TORCH_INDEX_URL"]) == ("gloo", "")


def unknown_to_v1(text: str) -> set[str]:
    """Return what Compose v1.29 refuses: newer keys at the top and in a service, and `${X:+y}`."""
    content = yaml.safe_load(text)
    keys = {name for name in content if not name.startswith("x-")} - {"services", "networks", "secrets"}
    for service in content["services"].values():
        keys |= {"develop", "attach", "annotations", "post_start"} & set(service)
    return keys | set(re.findall(r"\$\{\w+(:?.)", text)) - {":-", "-"}


@needs_compose
def test_the_restart_overlay_resumes_every_rank() -> None:
    services = resolved(FILES[0], "compose/restart.yaml", WORLD_SIZE="8")["services"]
    assert len(services) == ON_ONE_MACHINE
    for service in services.values():
        assert service["restart"].startswith("on-failure:")
        environment = service["environment"]
        assert (environment["LAB_RESUME"], environment["LAB_RUN_ID"], environment["LAB_CHECKPOINT_EVERY"]) == (
            "auto",
            "restart",
            "5",
        )
        assert service["init"] is True  # else the rank is PID 1, which SIGKILL from inside cannot end
    named = resolved(FILES[0], "compose/restart.yaml", LAB_RUN_ID="mine", LAB_CHECKPOINT_EVERY="9")["services"][
        "worker1"
    ]
    assert (named["environment"]["LAB_RUN_ID"], named["environment"]["LAB_CHECKPOINT_EVERY"]) == ("mine", "9")
    assert "restart" not in resolved()["services"]["worker0"]


@pytest.mark.parametrize("file", [*FILES, "compose/restart.yaml"])
def test_the_files_have_no_key_unknown_to_v1(file: str) -> None:
    assert unknown_to_v1((TOP / file).read_text()) == set()


def test_a_key_unknown_to_v1_is_found() -> None:
    later = 'name: lab\nservices: {a: {attach: false, command: "${X:+y}"}}'
    assert unknown_to_v1(later) == {"name", "attach", ":+"}
