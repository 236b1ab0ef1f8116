"""Docker Swarm: a stack of four ranks over three engines; a rank is killed, and an engine.

What ranks leave is in the volume of their engine: the run is in that of rank 0's, and checkpoints have no place.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.engines.docker import RANKS, clear, docker, ended, logs, runs, stack, states, swarm
from benchmarks.engines.drill import SMALL, Drill, judged, timed, until
from benchmarks.engines.nodes import Nodes

NODES, JOB_S, NAMED_S = 3, 240.0, 10.0
SHORT = SMALL | {"RUN_MODE": "dp", "LAB_VARIANT": "bucketed", "LAB_THREADS": "1"}
LONG = SHORT | {"LAB_STEPS": "100000", "LAB_PROOF": "0"}


def drills(folder: Path) -> list[Drill]:
    """All on one swarm; the last one costs it an engine."""
    with Nodes(NODES, folder) as nodes, swarm(nodes, folder):
        found = [
            timed("swarm: a stack over three engines", four_ranks, folder),
            timed("swarm: checkpoints without a common disk", refused, folder),
            timed("swarm: a rank is killed", rank_killed, folder),
            timed("swarm: an engine dies", engine_killed, nodes, folder),
        ]
    clear(folder)
    return found


def four_ranks(folder: Path) -> list[str]:
    """What does not hold of a run that nothing happens to."""
    with stack(folder, "four", SHORT):
        if not until(lambda: ended(folder), JOB_S):
            return [f"the tasks are {states(folder)}"]
        used = docker(folder, 0, "stack", "ps", "--format", "{{.Node}}", "distlab").split()
        wrong = [] if states(folder) == ["Complete"] * RANKS else [f"the tasks are {states(folder)}"]
    wrong += [] if len(set(used)) == NODES else [f"ranks were on {sorted(set(used))} alone"]
    where = runs(folder, "four")
    if len(where) != 1:
        return [*wrong, f"{len(where)} volumes hold a verdict"]
    found = judged(where[0])
    wrong += [] if found["world_size"] == RANKS else [f"a world of {found['world_size']}"]
    return wrong + ([] if found["verdict"] == "pass" else [found["verdict"]])


def refused(folder: Path) -> list[str]:
    """What does not hold where checkpoints are asked for, and engines share no disk."""
    with stack(folder, "apart", SHORT | {"LAB_CHECKPOINT_EVERY": "2"}):
        if not until(lambda: ended(folder), JOB_S):
            return [f"the tasks are {states(folder)}"]
        said = [logs(folder, rank) for rank in range(RANKS)]
    sentences = [line for text in said for line in text.splitlines() if "LAB_CHECKPOINT_EVERY" in line]
    refusals = {line for line in sentences if line.startswith("refused    ")}
    wrong = [] if len(sentences) == RANKS and len(refusals) == 1 else [f"said of it: {sentences}"]
    return wrong + (["a traceback"] if any("Traceback" in text for text in said) else [])


def rank_killed(folder: Path) -> list[str]:
    """What does not hold after rank 2 was killed."""
    with stack(folder, "killed", LONG):
        if not running(folder):
            return [f"the tasks are {states(folder)}"]
        places = {rank: place_of(folder, rank) for rank in range(RANKS)}
        node, container = places[2]
        docker(folder, node, "kill", "--signal", "KILL", container)
        return named(folder, "killed", {2}, {rank: node for rank, (node, _) in places.items()})


def engine_killed(nodes: Nodes, folder: Path) -> list[str]:
    """What does not hold after an engine died that had neither rank 0 nor the swarm's manager."""
    with stack(folder, "gone", LONG):
        if not running(folder):
            return [f"the tasks are {states(folder)}"]
        places = {rank: place_of(folder, rank)[0] for rank in range(RANKS)}
        node = max(set(places.values()) - {0, places[0]})
        nodes.kill(node)
        return named(folder, "gone", {rank for rank in places if places[rank] == node}, places)


def running(folder: Path) -> bool:
    """Whether the ranks come to train."""
    return until(lambda: "timed steps" in logs(folder, 0), JOB_S)


def place_of(folder: Path, rank: int) -> tuple[int, str]:
    """The node that a rank is on, and its container there."""
    for node in range(NODES):
        found = docker(folder, node, "ps", "--quiet", "--filter", f"name=distlab_rank{rank}").split()
        if found:
            return node, found[0]
    raise OSError(f"no engine runs rank {rank}")


def named(folder: Path, run: str, lost: set[int], places: Mapping[int, int]) -> list[str]:
    """What does not hold of the verdict on the ranks that were killed just now, of ranks on these nodes."""
    began = time.monotonic()
    left = [rank for rank in range(RANKS) if rank not in lost]
    if not until(lambda: ended(folder, left), JOB_S):
        return [f"the tasks are {states(folder)}"]
    took = time.monotonic() - began
    wrong = [] if took < NAMED_S else [f"the others ended after {took:.1f} s"]
    where = runs(folder, run)
    if len(where) != 1:
        return [*wrong, f"{len(where)} volumes hold a verdict"]
    verdict = judged(where[0])
    found = {entry["rank"] for entry in verdict["lost"]}
    wrong += [] if found == lost else [f"lost are {sorted(found)}, killed were {sorted(lost)}"]
    unseen = {each["rank"]: each["host"] for each in verdict["unseen"]}
    apart = {rank: f"node{node}" for rank, node in places.items() if node != places[0]}
    return wrong + ([] if unseen == apart else [f"unseen are {unseen}, on other engines were {apart}"])
