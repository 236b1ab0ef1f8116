"""Read a rank from the variables of each launcher, and refuse variables that are missing or contradict each other.

If they were ignored, three runs of one rank each could start in place of one run of three ranks, and all would pass.
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.lab.config.launchers import EACH_RANK, STARTED_BY, first_host, local_size, read_launcher, starting_command

SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[0-2]", "SLURM_JOB_NODELIST": "node[0-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.6"}
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.9"}


@pytest.mark.parametrize(
    ("environ", "program", "command"),
    [
        ({STARTED_BY: "./run", "RANK": "0"}, "workers/__main__.py", "./run"),
        ({}, "workers/__main__.py", "python -m workers"),
        ({}, "/usr/bin/distlab", "distlab run"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "workers/__main__.py", EACH_RANK),
        (
            {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "workers/__main__.py",
            "torchrun --nproc-per-node 2 -m workers",
        ),
        ({"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "", EACH_RANK),
    ],
)  # fmt: skip
def test_what_started_a_rank(environ: dict[str, str], program: str, command: str) -> None:
    assert starting_command(environ, program) == command


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (SLURM, {"RANK": "2", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}),
        (SKY, {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.4"}),
        (DSTACK, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.9"}),
        (SLURM | {"RANK": "2", "WORLD_SIZE": "6", "MASTER_ADDR": "b", "MASTER_PORT": "9"}, {"MASTER_ADDR": "b", "MASTER_PORT": "9"}),
    ],
    ids=["slurm", "skypilot", "dstack", "mapped by hand"],
)  # fmt: skip
def test_a_launchers_variables_are_read(environ: dict[str, str], wanted: dict[str, str]) -> None:
    found = read_launcher(environ)
    assert found.faults == ()
    assert wanted.items() <= found.variables.items()
    assert f"rank {found.variables['RANK']} by " in found.line


def test_each_step_of_a_job_has_its_own_port() -> None:
    ports = {read_launcher(SLURM | {"SLURM_PROCID": str(rank)}).variables["MASTER_PORT"] for rank in range(6)}
    (port,) = ports
    assert 20_000 <= int(port) < 32_768
    assert read_launcher(SLURM | {"SLURM_STEP_ID": "1"}).variables["MASTER_PORT"] != port


def test_pods_of_an_indexed_job_find_pod_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-2.ranks.default.svc.cluster.local")
    found = read_launcher({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}).variables
    assert (found["RANK"], found["MASTER_ADDR"]) == ("2", "train-0.ranks.default.svc.cluster.local")
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-2")
    assert "set MASTER_ADDR" in read_launcher({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}).faults[0]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (SLURM | {"RANK": "0"}, ["RANK=0 and SLURM_PROCID=2 differ"]),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "4"}, ["RANK=0 and SLURM_PROCID=2", "WORLD_SIZE=4 and SLURM_NTASKS=6"]),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_STEP_ID"}, ["start all by srun"]),
        ({"SLURM_JOB_ID": "3", "SLURM_NNODES": "3"}, ["SLURM_NTASKS=3 is set and SLURM_PROCID is not"]),
        ({name: SKY[name] for name in SKY if name != "SKYPILOT_NODE_RANK"}, ["SKYPILOT_NODE_RANK is not"]),
        ({"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2"}, ["dstack does not say where rank 0 is: set MASTER_ADDR"]),
        ({"JOB_COMPLETION_INDEX": "1"}, ["WORLD_SIZE is not"]),
        (SLURM | {"SLURM_PROCID": "x"}, ["SLURM_PROCID=x"]),
        (
            MPI,
            [
                "OMPI_COMM_WORLD_RANK=1 is set and RANK is not, and Open MPI's variables are not read: start the ranks by"
            ],
        ),
        (SLURM | MPI, ["start the ranks by torchrun or Slurm's srun, or set RANK, WORLD_SIZE and MASTER_ADDR"]),
    ],
    ids=[
        "rank",
        "rank and size",
        "batch script",
        "allocation",
        "no rank",
        "no host",
        "no size",
        "no number",
        "mpi",
        "mpi in slurm",
    ],
)
def test_what_does_not_fit_is_refused(environ: dict[str, str], words: list[str]) -> None:
    found = read_launcher(environ)
    assert found.variables == {}
    assert len(found.faults) == len(words)
    for fault, word in zip(found.faults, words, strict=True):
        assert word in fault


@pytest.mark.parametrize(
    "environ",
    [
        {}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "worker0"}, {"WORLD_SIZE": "3"},
        SLURM | {"TORCHELASTIC_RUN_ID": "job", "RANK": "5"},  # an agent a node, started by srun
        SLURM | MPI | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"SLURM_JOB_ID": "3", "SLURM_NNODES": "1"},
    ],
    ids=["nothing", "compose", "local", "torchrun in slurm", "mpi set by hand", "one of mpi", "one task", "one node"],
)  # fmt: skip
def test_without_a_launcher_of_several_ranks_nothing_changes(environ: dict[str, str]) -> None:
    assert read_launcher(environ) == ({}, "", ())


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node0", "node0"), ("node[003-005,7],login", "node003"), ("a,b[1-2]", "a"), ("rack[1-2]n[03-05,9]", "rack1n03"),
        ("gpu-[2,4].cluster", "gpu-2.cluster"), ("", ""),
    ],
)  # fmt: skip
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(("text", "most"), [("4", "4"), ("2(x3)", "2"), ("4(x2),3", "4"), ("", ""), ("?", "")])
def test_tasks_of_a_node(text: str, most: str) -> None:
    assert local_size(text) == most


def test_a_batch_script_that_starts_ranks_without_srun_is_refused(tmp_path: Path) -> None:
    """Once each process was a run of its own, and the script ended with 0."""
    environ = {name: SLURM[name] for name in SLURM if name != "SLURM_STEP_ID"} | {"LAB_RUNS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "workers"], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout.startswith(
        "refused    SLURM_NTASKS=6 is set and SLURM_PROCID is not, so Slurm did not start this rank"
    )
    assert list(tmp_path.iterdir()) == []
