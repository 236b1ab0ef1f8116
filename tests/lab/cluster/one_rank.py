"""A rank that joins, sends heartbeats and calls all_reduce, for tests of the cluster.

Its environment is that of a rank; its arguments are a version, the number of steps, and its action at step 2: nothing,
`raise`, `sleep` (for 6 s, before the collective), `leave_late`, `stall` (its server gets no core for 2 s), or `deaf` (it
drops all messages of the server). With `agree` all wait for a line of their input and acknowledge a verdict, which rank 0
publishes. It prints a line per step.
"""

import sys
import time

import torch
import torch.distributed as dist

from distlab.lab.cluster import ClusterError
from distlab.lab.cluster.departure import Succession
from distlab.lab.cluster.join import Cluster, init_process_group, join
from distlab.lab.cluster.messages import Verdict
from distlab.lab.cluster.rank_server import RankServer
from distlab.lab.cluster.watchdog import Watchdog
from distlab.lab.config import Config

STEP_S = 0.05


def say(text: str) -> None:
    print(text, flush=True)


def main(version: str, steps: int, action: str) -> int:
    say("imported")  # times count from here: on a busy machine torch takes seconds to import
    config = Config.read()
    try:
        cluster = join(config, version, say)
    except ClusterError as error:
        say(f"refused: {error}")
        return 3
    say(f"joined {cluster.run_id} " + " ".join(f"{member.rank}@{member.ip}" for member in cluster.members.values()))

    def on_verdict(verdict: Verdict, succession: Succession) -> None:
        lost = [entry.rank for entry in verdict.lost]
        say(f"verdict {verdict.exit_code} lost {lost} survivors {succession.survivors}")

    watch = Watchdog(cluster, config, say, on_verdict)
    phases, started = set[str](), time.monotonic()
    watch.on_period = lambda step, phase: phases.add(phase)
    watch.start()
    try:
        train(watch, cluster, config, steps, action)
    except Exception as error:
        watch.fail(error)
    if action == "agree":
        say("ready")
        sys.stdin.readline()
        try:
            watch.agree(lambda: say("published"))
        except TimeoutError as error:
            watch.fail(error)
        say("agreed")
        sys.stdin.readline()
    watch.finish()
    assert not watch.is_alive(), "a running thread would destroy the process group with it"
    say(f"phases {', '.join(sorted(phases))}")
    say(f"finished, the watch woke {watch.woken} times in {time.monotonic() - started:.3f} s")
    return 0


def train(watch: Watchdog, cluster: Cluster, config: Config, steps: int, action: str) -> None:
    init_process_group(cluster, config)
    for step in range(steps):
        watch.main.at(step, "compute")
        time.sleep(STEP_S)
        if step == 2 and action == "raise":
            raise ValueError("a made-up failure")
        if step == 2 and action == "deaf":
            watch.uplink.drops_received = True
        if step == 2 and action == "stall" and cluster.server is not None:
            stall_server(cluster.server)
        if step == 2 and action == "sleep":
            time.sleep(6.0)
        watch.main.at(step, "all_reduce")
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total[0] == cluster.world_size
        say(f"step {step}")
    if action == "leave_late":
        watch.main.at(steps, "compute")
        time.sleep(2 * config.lost_after_s)


def stall_server(server: RankServer) -> None:
    tick = server.tick

    def late(now: float) -> None:
        server.tick = tick  # type: ignore[method-assign]
        time.sleep(2.0)
        tick(now)

    server.tick = late  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
