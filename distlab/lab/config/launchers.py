"""Read a rank from its launcher's variables: they become RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    torchrun, Compose, Ray   RANK, WORLD_SIZE, MASTER_ADDR, unchanged
    Slurm                    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; rank 0 is on the first node of the step
    Kubernetes               JOB_COMPLETION_INDEX, pod 0's address from this pod's name; WORLD_SIZE from the manifest
    SkyPilot, dstack         SKYPILOT_NODE_RANK, DSTACK_NODE_RANK and related variables, one rank per node

A rank that does not read its launcher's variables would start a run of its own: `srun -n 3` would then start three
separate runs, all of which pass. So the first launcher of this table that started several ranks is used and printed.
Contradicting variables, a process without a rank under such a launcher, and a rank that only Open MPI's variables name
are refused.
"""

import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

STARTED_BY = "DISTLAB_STARTED_BY"  # the command that repeats a run: ./run, make and the Compose file set it
EACH_RANK = "python -m workers, as each rank of an engine"
NO_MPI = (
    "OMPI_COMM_WORLD_RANK={OMPI_COMM_WORLD_RANK} is set and RANK is not, and Open MPI's variables are not read: start"
    " the ranks by torchrun or Slurm's srun, or set RANK, WORLD_SIZE and MASTER_ADDR yourself for each rank"
)
FIRST_PORT, PORTS = 20_000, 10_000  # below the ports that kernels assign, which begin at 32768


class Engine(NamedTuple):
    """The variables of one launcher: this rank's number and the number of ranks, in total and on this machine; and how
    to find rank 0, host and port."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    master: Callable[[Mapping[str, str]], tuple[str, str]]
    starts: str  # how it starts ranks


class LaunchedRank(NamedTuple):
    """A rank according to its launcher: variables with the common names, a line for the log, and faults."""

    variables: dict[str, str]
    line: str = ""
    faults: tuple[str, ...] = ()


def read_launcher(environ: Mapping[str, str]) -> LaunchedRank:
    """Map the variables of the launcher that started this process; empty for none, or for torchrun."""
    environ = {name: value.strip() for name, value in environ.items() if value.strip()}
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun's variables are right, whatever started its agents
        return LaunchedRank({})
    # Inside of a Slurm job mpirun's daemons are tasks of srun, so these come before Slurm's.
    if "OMPI_COMM_WORLD_RANK" in environ and environ.get("OMPI_COMM_WORLD_SIZE") != "1":
        return LaunchedRank({}, faults=() if "RANK" in environ else (NO_MPI.format(**environ),))
    if "SLURM_STEP_ID" not in environ:  # a batch script, or a shell within an allocation: not a task of a step
        environ.pop("SLURM_PROCID", None)
        environ.setdefault("SLURM_NTASKS", environ.get("SLURM_NNODES", ""))
    for engine in ENGINES:
        found = of_engine(engine, environ)
        if found is not None:
            return found
    return LaunchedRank({})


def started_by() -> str:
    """Return the command that started this rank, as set by its user or launcher."""
    return os.environ.get(STARTED_BY, "")


def on_one_machine() -> bool:
    """Return whether this is a rank of the Compose file, all of which are on one machine."""
    return "RANKS_ON_HOST" in os.environ


def starting_command(environ: Mapping[str, str], program: str) -> str:
    """Return what started this process, if no variable has it: torchrun, a launcher, or a user who typed `program`."""
    if environ.get(STARTED_BY):
        return environ[STARTED_BY]
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        return f"torchrun --nproc-per-node {environ['WORLD_SIZE']} -m workers"
    if "RANK" in environ:
        return EACH_RANK
    return "python -m workers" if Path(program).parent.name == "workers" else "distlab run"


def of_engine(engine: Engine, environ: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank according to `engine`; None if it did not start several ranks."""
    rank, size = environ.get(engine.rank, ""), environ.get(engine.size, "")
    if not (rank or size) or (engine.size == "WORLD_SIZE" and not rank):
        return None
    if size == "1" and engine.size != "WORLD_SIZE":  # the launcher started one process, which starts all ranks
        return None
    if not rank.isdecimal() or not size.isdecimal():
        return LaunchedRank({}, faults=(unranked(engine, environ),))
    faults = tuple(contradictions(engine, environ))
    if faults:
        return LaunchedRank({}, faults=faults)
    addr, port = (environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    found, own_port = engine.master(environ) if not (addr and port) else ("", "")
    if not (addr or found):
        return LaunchedRank({}, faults=(f"{engine.name} does not say where rank 0 is: set MASTER_ADDR to its host",))
    variables = {
        "RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": addr or found, "MASTER_PORT": port or own_port,
        "LOCAL_RANK": environ.get(engine.local_rank, ""),
        "LOCAL_WORLD_SIZE": local_size(environ.get(engine.local_size, "")),
    }  # fmt: skip
    line = f"{engine.name}: rank {rank} by {engine.rank}, {size} ranks by {engine.size}, rank 0 at {addr or found}"
    return LaunchedRank({name: value for name, value in variables.items() if value}, line)


def unranked(engine: Engine, environ: Mapping[str, str]) -> str:
    """Report that a launcher of several ranks started this process as none of them."""
    named = ", ".join(f"{name}={environ[name]}" for name in (engine.rank, engine.size) if name in environ)
    missing = engine.size if engine.rank in environ else engine.rank
    return (
        f"{named} is set and {missing} is not, so {engine.name} did not start this rank: start all by {engine.starts}"
    )


def contradictions(engine: Engine, environ: Mapping[str, str]) -> Iterator[str]:
    """Report where the common names contradict the launcher's."""
    for name, own in (("RANK", engine.rank), ("WORLD_SIZE", engine.size)):
        if name in environ and name != own and environ[name] != environ[own]:
            yield f"{name}={environ[name]} and {own}={environ[own]} differ: unset {name}, {engine.name} sets {own}"


def local_size(text: str) -> str:
    """Return "4" for "4"; for Slurm's "4(x2),3", tasks by node, the largest."""
    counts = [int(part.partition("(")[0]) for part in text.split(",") if part.partition("(")[0].isdecimal()]
    return str(max(counts)) if counts else ""


def first_host(hosts: str) -> str:
    """Return the first of Slurm's list of hosts: rack1node03 for rack[1-2]node[03-05,9],login."""
    (first,) = re.findall(r"^(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def port_of(job: str) -> str:
    """Return a port that usually differs between jobs, which share nodes; the same on all ranks of a job."""
    return str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def slurm_master(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return rank 0's host, the first node of the step, and a port by job and step number."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return first_host(hosts), port_of(f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}")


def kubernetes_master(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return rank 0's host: a pod of an Indexed Job is <job>-<index>, by a headless Service <job>-<index>.<service>."""
    pod, _, domain = socket.getfqdn().partition(".")
    job, _, index = pod.rpartition("-")
    return f"{job}-0.{domain}" if domain and index == environ.get("JOB_COMPLETION_INDEX") else "", ""


ENGINES = (
    Engine(
        "Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", slurm_master,
        "srun python -m workers",
    ),
    Engine(
        "Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", kubernetes_master,
        "an Indexed Job whose pods have WORLD_SIZE",
    ),
    Engine(
        "SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        lambda environ: (environ.get("SKYPILOT_NODE_IPS", "").partition("\n")[0].strip(), ""),  # the head first
        "a task that runs python -m workers on each node",
    ),
    Engine(
        "dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        lambda environ: (environ.get("DSTACK_MASTER_NODE_IP", ""), ""),
        "a task with nodes, which runs python -m workers on each",
    ),
)  # fmt: skip
