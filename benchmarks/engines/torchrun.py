"""torchrun's elastic agents: a rank is killed, and a node with its agent, and the run goes on where it had saved.

Three agents, one on each node, meet over c10d. A killed rank is started again by its agent, and all three train to the
weights of a run that nobody disturbed, to the bit. A killed node leaves two: in float64 their losses are those of the
three, since who computes a sample does not matter.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.engines.drill import Drill, judged, saved, timed, unlike
from benchmarks.engines.nodes import Nodes
from distlab.lab.report.reading import read_run
from distlab.lab.report.records import Losses

NODES, ENDS_S = 3, 240.0
LOSSES_APART = 1e-12  # in float64: sums in another order
RUN = {
    "RUN_MODE": "dp", "LAB_VARIANT": "bucketed", "LAB_MODEL": "mlp", "LAB_WIDTH": "32", "LAB_DEPTH": "2",
    "LAB_BATCH": "12", "LAB_STEPS": "1500", "LAB_CHECKPOINT_EVERY": "100", "LAB_DTYPE": "float64",
    "LAB_JOIN_TIMEOUT_S": "30",
}  # fmt: skip


def drills(folder: Path) -> list[Drill]:
    """Each is made on nodes of its own: agents of the one before may still close their store."""
    found = []
    for what, drill in (
        ("torchrun: three nodes, and nothing happens", undisturbed),
        ("torchrun: a rank is killed", rank_killed),
        ("torchrun: a node dies with its agent", node_killed),
    ):
        with Nodes(NODES, folder) as nodes:
            found.append(timed(what, drill, nodes, folder))
    return found


def undisturbed(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold of the run that the others are compared to."""
    codes = ended(static(nodes, folder))
    return [] if codes == [0] * NODES else [f"exit codes {codes}"]


def static(nodes: Nodes, folder: Path) -> list["subprocess.Popen[bytes]"]:
    """The run that the others are compared to."""
    meeting = [f"--nnodes={NODES}", "--master-addr=node0", "--master-port=29500"]
    return [agent(nodes, node, folder, "whole", {}, *meeting, f"--node-rank={node}") for node in range(NODES)]


def elastic(nodes: Nodes, folder: Path, run: str) -> list["subprocess.Popen[bytes]"]:
    """The same under agents that start a rank again, and go on with two nodes."""
    meeting = [
        f"--nnodes=2:{NODES}", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400",
        f"--rdzv-id={run}", "--rdzv-conf=last_call_timeout=5",
    ]  # fmt: skip
    return [agent(nodes, node, folder, run, {"LAB_RESUME": "auto"}, *meeting) for node in range(NODES)]


def rank_killed(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold after the rank on the last node was killed."""
    agents = elastic(nodes, folder, "rank")
    if not saved(folder / "rank"):
        return ["no checkpoint"]
    for pid in nodes.ranks(NODES - 1):
        os.kill(pid, signal.SIGKILL)
    codes = ended(agents)
    if codes != [0] * NODES:
        return [f"exit codes {codes}"]
    size = judged(folder / "rank")["world_size"]
    return ([] if size == NODES else [f"{size} ranks at the end"]) + unlike(folder / "rank", folder / "whole")


def node_killed(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold after the last node went."""
    agents = elastic(nodes, folder, "node")
    if not saved(folder / "node"):
        return ["no checkpoint"]
    nodes.kill(NODES - 1)
    codes = ended(agents)[: NODES - 1]
    if codes != [0] * (NODES - 1):
        return [f"exit codes {codes} of the nodes that are left"]
    run = judged(folder / "node")
    wrong = [] if run["world_size"] == NODES - 1 else [f"{run['world_size']} ranks at the end"]
    wrong += [] if run.get("resumed") else ["it was not resumed"]
    ours, theirs = losses(folder / "node"), losses(folder / "whole")
    apart = max((abs(a - b) for a, b in zip(ours, theirs, strict=False)), default=float("inf"))
    wrong += [] if len(ours) == len(theirs) else [f"{len(ours)} losses in place of {len(theirs)}"]
    return wrong + ([] if apart <= LOSSES_APART else [f"losses are {apart:.1e} apart"])


def agent(
    nodes: Nodes, node: int, folder: Path, run: str, variables: Mapping[str, str], *words: str
) -> "subprocess.Popen[bytes]":
    """One node's agent, with one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *words, "-m", "workers"]
    settings = RUN | {"LAB_RUN_ID": run, "LAB_RUNS_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return nodes.start(node, command, folder / f"{run}-node{node}.out", settings | dict(variables))


def ended(agents: list["subprocess.Popen[bytes]"]) -> list[int]:
    """The agents' exit codes; -1 of one that does not end in time."""
    deadline, codes = time.monotonic() + ENDS_S, []
    for each in agents:
        try:
            codes.append(each.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(-1)
    return codes


def losses(run: Path) -> list[float]:
    """The loss curve of the variant, from step 0 on."""
    return next(
        record.numbers
        for record in read_run(run)[0]
        if isinstance(record, Losses) and record.variant == RUN["LAB_VARIANT"]
    )
