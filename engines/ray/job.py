"""Run distlab under Ray: one actor per rank, spread over the nodes; returns the worst exit code.

    python -m engines.ray.job --ranks 4 fsdp LAB_STEPS=100

RAY_ADDRESS names the cluster. Python must find the lab on every node: installed there, or in a folder that
all nodes share, which checkpoints need too.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distlab.lab.cluster.launch import worst
from distlab.lab.config import ConfigError, commands

ROOM_S = 300.0  # until the cluster has resources for all ranks


@ray.remote(num_cpus=1, max_restarts=0)  # a single rank cannot restart: if it is lost the others end too
class Rank:
    """An actor that runs the process of one rank."""

    def address(self) -> str:
        """Return its node's address."""
        return str(ray.util.get_node_ip_address())

    def run(self, folder: str, variables: dict[str, str]) -> int:
        """Run the rank and print its lines, which Ray shows at the driver; returns the exit code."""
        process = subprocess.Popen(
            [sys.executable, "-m", "workers"], cwd=folder, env=os.environ | variables,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        for line in process.stdout or ():
            print(line, end="", flush=True)
        return process.wait()


def main(words: Sequence[str]) -> int:
    """Run the ranks; returns the exit code."""
    typed = parser().parse_intermixed_args(words)
    try:
        settings = dict(commands.settings(typed.settings))
    except ConfigError as error:
        for fault in error.faults:
            print(f"refused    {fault}", file=sys.stderr)
        return 2
    ray.init(log_to_driver=True)
    room = placement_group([{"CPU": 1}] * typed.ranks, strategy="SPREAD")
    try:
        ray.get(room.ready(), timeout=ROOM_S)
    except ray.exceptions.GetTimeoutError:
        print(f"refused    --ranks {typed.ranks}: the cluster had no free CPU for each within {ROOM_S:g} s")
        return 2
    codes = started(room, typed.ranks, settings)
    for rank, code in enumerate(codes):
        print(f"rank {rank}: exit code {code}")
    return worst(codes)


def started(room: PlacementGroup, ranks: int, settings: dict[str, str]) -> list[int]:
    """Run all ranks and return their exit codes; rank 0 is on the first actor's node."""
    actors = [
        Rank.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=rank)
        ).remote()
        for rank in range(ranks)
    ]
    first = ray.get(actors[0].address.remote())
    shell = {name: value for name, value in os.environ.items() if name.startswith("LAB_") or name == "RUN_MODE"}
    shared = shell | settings | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": first}
    return list(
        ray.get([actor.run.remote(str(Path.cwd()), shared | {"RANK": str(rank)}) for rank, actor in enumerate(actors)])
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m engines.ray.job", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--ranks", type=int, default=4, help="number of ranks (default 4)")
    made.add_argument("settings", nargs="*", metavar="MODE|NAME=VALUE", help="the mode, and its settings")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
