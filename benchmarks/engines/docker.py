"""A swarm of Docker engines on nodes: a `dockerd` on each, with the image of this checkout and a volume of its own.

An engine runs in a process namespace, so that all of its containers end with it.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.engines.drill import until
from benchmarks.engines.nodes import TOP, Nodes

RANKS = 4
READY_S, LOAD_S = 60.0, 300.0
IMAGE = "distlab:latest"  # as the stack names it
# /run is the engine's own: sockets and the networks' namespaces of several would meet there.
ENGINE = (
    "mount -t tmpfs tmpfs /run && mkdir /run/lock && exec dockerd --data-root {at}/data --exec-root {at}/exec"
    " --host unix://{at}/docker.sock --pidfile {at}/pid"
)


@contextmanager
def swarm(nodes: Nodes, folder: Path) -> Iterator[None]:
    """An engine on each node, with the image, all of one swarm."""
    for node in range(nodes.count):
        at = folder / f"node{node}"
        at.mkdir()
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", ENGINE.format(at=at)]
        nodes.start(node, words, folder / f"dockerd{node}.out")
    with saved_image(folder) as image:
        for node in range(nodes.count):
            if not until((folder / f"node{node}" / "docker.sock").exists, READY_S):
                raise OSError(f"the engine of node{node} did not start")
            docker(folder, node, "load", "--quiet", "--input", str(image), timeout_s=LOAD_S)
    docker(folder, 0, "swarm", "init", "--advertise-addr", "10.77.0.10")
    token = docker(folder, 0, "swarm", "join-token", "--quiet", "worker").strip()
    for node in range(1, nodes.count):
        docker(folder, node, "swarm", "join", "--token", token, "10.77.0.10:2377")
    yield


def clear(folder: Path) -> None:
    """Remove what engines kept of images and containers, some GB; what ranks left in volumes stays."""
    for path in folder.glob("node*/data/*"):
        if path.is_dir() and path.name != "volumes":
            shutil.rmtree(path)


@contextmanager
def saved_image(folder: Path) -> Iterator[Path]:
    """The image in a file, made by this machine's own engine."""
    path = folder / "image.tar"
    for words in (("build", "--quiet", "--tag", IMAGE, str(TOP)), ("save", "--output", str(path), IMAGE)):
        subprocess.run(["docker", *words], stdout=subprocess.DEVNULL, timeout=2 * LOAD_S, check=True)
    yield path
    path.unlink()


def docker(
    folder: Path, node: int, *words: str, variables: Mapping[str, str] | None = None, timeout_s: float = 60
) -> str:
    """What the client says, of the engine on a node; raises where it fails or takes too long."""
    command = ["docker", "--host", f"unix://{folder}/node{node}/docker.sock", *words]
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)} | dict(variables or {})
    done = subprocess.run(command, cwd=TOP, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise OSError(f"docker {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def stack(folder: Path, run: str, variables: dict[str, str]) -> Iterator[None]:
    """The stack as a user deploys it, until it has gone; what its ranks said stays."""
    words = ("stack", "deploy", "-c", "engines/swarm/stack.yaml", "distlab")
    (folder / f"{run}.out").write_text(docker(folder, 0, *words, variables=variables | {"LAB_RUN_ID": run}))
    try:
        yield
    finally:
        for rank in range(RANKS):
            with suppress(OSError):  # its engine has died
                (folder / f"{run}-rank{rank}.out").write_text(logs(folder, rank))
        docker(folder, 0, "stack", "rm", "distlab")
        until(lambda: not docker(folder, 0, "network", "ls", "--quiet", "--filter", "name=distlab_ranks"), READY_S)


def logs(folder: Path, rank: int) -> str:
    return docker(folder, 0, "service", "logs", "--raw", f"distlab_rank{rank}")


def states(folder: Path) -> list[str]:
    """Of each rank's task the state that Swarm knows, such as Running, Complete or Failed."""
    told = docker(folder, 0, "stack", "ps", "--format", "{{.Name}} {{.CurrentState}}", "distlab")
    return [line.split()[1] for line in sorted(told.splitlines())]


def ended(folder: Path, ranks: Sequence[int] = range(RANKS)) -> bool:
    """Whether the tasks of these ranks are over."""
    now = states(folder)
    return len(now) == RANKS and all(now[rank] in ("Complete", "Failed", "Rejected") for rank in ranks)


def runs(folder: Path, run: str) -> list[Path]:
    """The volumes that hold a run's verdict."""
    found = folder.glob(f"node*/data/volumes/distlab_runs/_data/{run}/run.json")
    return [path.parent for path in found]
