"""Slurm: ranks over three nodes, two on each; a rank is killed, and a node, and the job goes on where it had saved.

One controller and four daemons of Debian's packages, each on a node of its own; a fourth node is the spare. The jobs
are engines/slurm/job.sh, as a user submits it.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.engines.drill import SMALL, Drill, judged, saved, timed, unlike, until
from benchmarks.engines.nodes import TOP, Nodes, install

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES, NAMED_S = 4, 5.0
READY_S, JOB_S = 30.0, 180.0
LONG = SMALL | {
    "RUN_MODE": "dp", "LAB_VARIANT": "bucketed", "LAB_STEPS": "1500", "LAB_CHECKPOINT_EVERY": "100",
}  # fmt: skip
# cred_expire: else a job that comes back waits for two minutes.
CONF = """ClusterName=distlab
SlurmctldHost=node0
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
MpiDefault=none
NodeName=node[0-{last}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def drills(folder: Path) -> list[Drill]:
    """All on one cluster; the last one costs it a node."""
    install("slurmctld", *PACKAGES)
    with Nodes(NODES, folder) as nodes, cluster(nodes, folder):
        return [
            timed("slurm: srun of dp on three nodes", three_nodes, nodes, folder),
            timed("slurm: srun of fsdp, two ranks per node", six_ranks, nodes, folder),
            timed("slurm: a rank is killed under srun", rank_killed, nodes, folder),
            timed("slurm: a node dies under sbatch", node_killed, nodes, folder),
        ]


@contextmanager
def cluster(nodes: Nodes, folder: Path) -> Iterator[None]:
    """munge for all nodes, the controller on the first, a daemon on each; until all are idle."""
    for name in ("munge", "state", *(f"node{node}" for node in range(NODES))):
        (folder / name).mkdir()
    munge = folder / "munge"
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o600)
    for path in (munge, munge / "key"):
        shutil.chown(path, "munge", "munge")
    munged = subprocess.Popen(
        ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "--foreground", "--force",
         f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
         f"--seed-file={munge}/seed", f"--log-file={munge}/log"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: (munge / "socket").exists(), READY_S)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, last=NODES - 1))
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        nodes.start(0, ["slurmctld", "-D"], folder / "slurmctld.out")
        for node in range(NODES):
            nodes.start(node, ["slurmd", "-D", "-N", f"node{node}"], folder / f"slurmd{node}.out")
        until(lambda: states(nodes) == {"idle"}, READY_S)
        yield
    finally:
        munged.kill()
        munged.wait()


def states(nodes: Nodes) -> set[str]:
    """What the nodes do, as sinfo says; nothing before the controller answers."""
    try:
        return set(nodes.run(0, "sinfo", "--noheader", "--Format=StateCompact:.20").split())
    except subprocess.CalledProcessError:
        return set()


def three_nodes(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold of a rank on each of three nodes."""
    return passed(nodes, folder, "three", 3, "-N3", "-n3", RUN_MODE="dp", **SMALL)


def six_ranks(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold of two ranks on each of three nodes."""
    return passed(nodes, folder, "six", 6, "-N3", "-n6", RUN_MODE="fsdp", LAB_VARIANT="zero3", **SMALL)


def passed(nodes: Nodes, folder: Path, run: str, world_size: int, *words: str, **variables: str) -> list[str]:
    """What does not hold of a run that nothing happens to."""
    process = srun(nodes, folder, run, *words, **variables)
    code = process.wait(JOB_S)
    if code:
        return [f"srun ended with {code}"]
    found = judged(folder / run)
    sizes = [] if found["world_size"] == world_size else [f"a world of {found['world_size']}"]
    return sizes + ([] if found["verdict"] == "pass" else [found["verdict"]])


def rank_killed(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold after one of three ranks was killed."""
    process = srun(nodes, folder, "killed", "-N3", "-n3", **LONG | {"LAB_STEPS": "100000", "LAB_PROOF": "0"})
    if not saved(folder / "killed"):
        return ["no checkpoint"]
    last = [node for node in range(NODES) if nodes.rank_number(node, "SLURM_PROCID") == 2]
    for pid in [pid for node in last for pid in nodes.ranks(node)]:
        os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    code = process.wait(JOB_S)
    took = time.monotonic() - killed_at
    print(f"srun ended {took:.1f} s after the kill", flush=True)
    wrong = [] if code in (3, 137) else [f"srun ended with {code}"]
    wrong += [] if took < NAMED_S else [f"srun ended after {took:.1f} s"]
    lost = [entry["rank"] for entry in judged(folder / "killed")["lost"]]
    return wrong + ([] if lost == [2] else [f"lost are {lost}"])


def node_killed(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold of a job that loses a node, beside one that does not."""
    for run in ("whole", "broken"):
        job = sbatch(nodes, folder, run)
        if run == "broken":
            if not saved(folder / run):
                return ["no checkpoint"]
            nodes.kill(last_of(nodes, job))
        if not until(partial(ended, nodes, job), JOB_S):
            return [f"the job {run} did not end in {JOB_S:g} s"]
    return unlike(folder / "broken", folder / "whole")


def last_of(nodes: Nodes, job: str) -> int:
    """The last node that a job runs on, where its highest rank is."""
    busy = nodes.run(0, "squeue", "-h", "-j", job, "-o", "%N").strip()
    return int(nodes.run(0, "scontrol", "show", "hostnames", busy).split()[-1].removeprefix("node"))


def ended(nodes: Nodes, job: str) -> bool:
    """Whether a job is no longer in the queue."""
    return not nodes.run(0, "squeue", "-h", "-j", job)


def srun(nodes: Nodes, folder: Path, run: str, *words: str, **variables: str) -> "subprocess.Popen[bytes]":
    """A step of ranks, started on the first node."""
    settings = variables | {"LAB_RUN_ID": run, "LAB_RUNS_DIR": str(folder)}
    python = str(TOP / ".venv" / "bin" / "python")
    return nodes.start(0, ["srun", "--label", *words, python, "-m", "workers"], folder / f"{run}.out", settings)


def sbatch(nodes: Nodes, folder: Path, run: str) -> str:
    """A job of three nodes by the lab's own script; returns its number."""
    settings = LONG | {"LAB_RUN_ID": run, "LAB_RUNS_DIR": str(folder)}
    words = ("sbatch", "--parsable", "--nodes=3", f"--output={folder / run}.out", "engines/slurm/job.sh")
    return nodes.run(0, *words, variables=settings).strip()
