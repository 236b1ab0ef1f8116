"""Open MPI: ranks by `mpirun` on one machine, and on three, which a stand-in for ssh reaches; a rank is killed.

mpirun tells a rank its number and not where rank 0 is, so across machines MASTER_ADDR is given.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.drill import SMALL, Drill, judged, timed, until
from benchmarks.engines.nodes import TOP, Nodes, install

NODES, JOB_S, BEGINS_S = 3, 180.0, 60.0
HOSTS = ",".join(f"node{node}:2" for node in range(NODES))
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Its options, the host, the command.
SSH = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\ncase $host in\n'


def drills(folder: Path) -> list[Drill]:
    """All on the same nodes."""
    install("mpirun", "openmpi-bin")
    with Nodes(NODES, folder) as nodes:
        stand_in(nodes, folder / "ssh")
        return [
            timed("openmpi: mpirun of dp on one machine", one_machine, nodes, folder),
            timed("openmpi: mpirun of fsdp, two ranks on each of three", three_machines, nodes, folder),
            timed("openmpi: a rank is killed under mpirun", rank_killed, nodes, folder),
        ]


def stand_in(nodes: Nodes, path: Path) -> None:
    """A program that enters a node where ssh would."""
    entries = [f'node{node}) exec {shlex.join(nodes.command(node, ["sh", "-c"]))} "$*" ;;' for node in range(NODES)]
    path.write_text(SSH + "\n".join([*entries, "esac", ""]))
    path.chmod(0o755)


def one_machine(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold of four ranks on one machine, which need no MASTER_ADDR."""
    return passed(nodes, folder, "one", ["-np", "4", "--oversubscribe"], {"RUN_MODE": "dp"})


def three_machines(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold of two ranks on each of three machines."""
    return passed(nodes, folder, "three", across(folder), {"RUN_MODE": "fsdp", "LAB_VARIANT": "zero3"})


def across(folder: Path) -> list[str]:
    """What tells mpirun of the three machines; over ssh `--host` and MASTER_ADDR are enough."""
    return ["-np", "6", "--host", HOSTS, "--mca", "plm_rsh_agent", str(folder / "ssh"), "-x", "MASTER_ADDR=node0"]


def passed(nodes: Nodes, folder: Path, run: str, words: Sequence[str], variables: dict[str, str]) -> list[str]:
    """What does not hold of a run that nothing happens to."""
    code = mpirun(nodes, folder, run, words, SMALL | variables).wait(JOB_S)
    if code:
        return [f"mpirun ended with {code}"]
    found = judged(folder / run)
    size = int(words[1])
    wrong = [] if found["world_size"] == size else [f"a world of {found['world_size']}"]
    return wrong + ([] if found["verdict"] == "pass" else [found["verdict"]])


def rank_killed(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold after a rank on the last machine was killed: mpirun ends all others at once, by SIGTERM."""
    settings = SMALL | {"RUN_MODE": "dp", "LAB_VARIANT": "bucketed", "LAB_STEPS": "100000", "LAB_PROOF": "0"}
    process = mpirun(nodes, folder, "killed", across(folder), settings)
    if not until(lambda: "timed steps" in (folder / "killed.out").read_text(), BEGINS_S):
        return ["it did not begin"]
    os.kill(nodes.ranks(NODES - 1)[0], signal.SIGKILL)
    code = process.wait(JOB_S)
    wrong = [] if code == 128 + signal.SIGKILL else [f"mpirun ended with {code}"]
    said = (folder / "killed.out").read_text()
    wrong += [] if "was stopped by SIGTERM" in said else ["no rank says that it was stopped"]
    left = [pid for node in range(NODES) for pid in nodes.ranks(node)]
    return wrong + ([f"ranks are left: {left}"] if left else [])


def mpirun(
    nodes: Nodes, folder: Path, run: str, words: Sequence[str], variables: dict[str, str]
) -> "subprocess.Popen[bytes]":
    """Ranks, started on the first machine."""
    settings = variables | {"LAB_RUN_ID": run, "LAB_RUNS_DIR": str(folder), "LAB_THREADS": "1"}
    passed_on = [word for name, value in settings.items() for word in ("-x", f"{name}={value}")]
    python = str(TOP / ".venv" / "bin" / "python")
    command = ["mpirun", *words, *passed_on, "--tag-output", python, "-m", "workers"]
    return nodes.start(0, command, folder / f"{run}.out", ROOT)
