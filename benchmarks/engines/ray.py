"""Ray: ranks as actors over three nodes by engines/ray/job.py; a rank is killed.

Ray is installed beside the lab, in an environment of the drill's own that sees the lab's packages.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.engines.drill import SMALL, Drill, judged, timed, until
from benchmarks.engines.nodes import Nodes

RAY = "ray==2.60.0"
NODES, READY_S, JOB_S, BEGINS_S, NAMED_S = 3, 120.0, 180.0, 90.0, 15.0
# A node's own files of a session; the others find the head's by its address.
OWN_TMP = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_raylet_start_wait_time_s": "120"}
HEAD = {"RAY_ADDRESS": "10.77.0.10:6379"}


def drills(folder: Path) -> list[Drill]:
    """All on one cluster."""
    install(folder / "venv")
    with Nodes(NODES, folder) as nodes:
        up(nodes, folder)
        return [
            timed("ray: a rank an actor, on three nodes", three_nodes, nodes, folder),
            timed("ray: a rank is killed", rank_killed, nodes, folder),
        ]


def install(where: Path) -> None:
    """Ray, and by a path what this interpreter has."""
    subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
    packages = where / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "distlab.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([str(where / "bin" / "pip"), "install", "-q", RAY], check=True, stderr=subprocess.DEVNULL)


def up(nodes: Nodes, folder: Path) -> None:
    """A head on the first node, and the others to it."""
    (folder / "tmp").mkdir()
    ray(nodes, folder, 0, "--head", "--port=6379", "--include-dashboard=false")
    for node in range(1, NODES):
        ray(nodes, folder, node, "--address=10.77.0.10:6379")
    if not until(lambda: alive(nodes, folder) == NODES, READY_S):
        raise OSError(f"{alive(nodes, folder)} of {NODES} nodes are up")


def ray(nodes: Nodes, folder: Path, node: int, *words: str) -> None:
    """Start Ray on a node."""
    command = [
        str(folder / "venv" / "bin" / "ray"), "start", "--block", f"--node-ip-address=10.77.0.{10 + node}",
        "--num-cpus=1", "--object-store-memory=100000000", f"--temp-dir={folder}/tmp", *words,
    ]  # fmt: skip
    own = ["sh", "-c", OWN_TMP, f"{folder}/tmp"] if node else []
    nodes.start(node, [*own, *command], folder / f"ray{node}.out", QUIET)


def alive(nodes: Nodes, folder: Path) -> int:
    """How many nodes the head knows."""
    program = "import ray; ray.init(log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"
    words = [str(folder / "venv" / "bin" / "python"), "-c", program]
    try:
        return int(nodes.run(0, *words, variables=QUIET | HEAD).split()[-1])
    except subprocess.CalledProcessError:
        return 0


def job(nodes: Nodes, folder: Path, run: str, *words: str) -> "subprocess.Popen[bytes]":
    """The job, as a user starts it on the head."""
    settings = SMALL | {"LAB_RUN_ID": run, "LAB_RUNS_DIR": str(folder)}
    command = [str(folder / "venv" / "bin" / "python"), "-m", "engines.ray.job", "--ranks", str(NODES), *words]
    return nodes.start(0, command, folder / f"{run}.out", QUIET | HEAD | settings)


def three_nodes(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold of a run that nothing happens to."""
    code = job(nodes, folder, "three", "dp").wait(JOB_S)
    if code:
        return [f"the job ended with {code}"]
    found = judged(folder / "three")
    hosts = {line.split()[-4] for line in (folder / "three.out").read_text().splitlines() if line.endswith("· cpu")}
    wrong = [] if len(hosts) == NODES - 1 else [f"ranks were on {sorted(hosts)}"]
    wrong += [] if found["world_size"] == NODES else [f"a world of {found['world_size']}"]
    return wrong + ([] if found["verdict"] == "pass" else [found["verdict"]])


def rank_killed(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold after the rank on the last node was killed."""
    process = job(nodes, folder, "killed", "dp", "LAB_VARIANT=bucketed", "LAB_STEPS=100000", "LAB_PROOF=0")
    if not until(lambda: "timed steps" in (folder / "killed.out").read_text(), BEGINS_S):
        return ["it did not begin"]
    killed = nodes.rank_number(NODES - 1, "RANK")
    for pid in nodes.ranks(NODES - 1):
        os.kill(pid, signal.SIGKILL)
    code = process.wait(NAMED_S)
    lost = [entry["rank"] for entry in judged(folder / "killed")["lost"]]
    wrong = [] if code == 3 else [f"the job ended with {code}"]
    return wrong + ([] if lost == [killed] else [f"lost are {lost}, killed was {killed}"])
