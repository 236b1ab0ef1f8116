"""The supervisor of one rank of a check: joins the others, runs the script, reads its reports, ends with the run.

A script's reports go to rank 0 through the store, in batches four times a second, and into `rank<r>.calls` on this
disk. Rank 0 decides when the run is over. The store belongs to the supervisors: the script has another one, on a port
that rank 0 draws (under torchrun the agent's), so that none of its connections is the lab's.
"""

import hashlib
import json
import os
import platform
import shlex
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distlab.lab.cluster import ClusterError
from distlab.lab.cluster.address import interface_of
from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.cluster.departure import Succession
from distlab.lab.cluster.join import Cluster, derive_name, join
from distlab.lab.cluster.launch import LauncherPipe, free_port
from distlab.lab.cluster.messages import Verdict
from distlab.lab.cluster.watchdog import Watchdog
from distlab.lab.config import Config
from distlab.lab.config.launchers import started_by
from distlab.lab.rank.finish import Sections, everything_written, publish_verdict, write_failure_report
from distlab.lab.rank.main import lock_folder, source_version
from distlab.lab.report import records
from distlab.lab.report.run_folder import Journal, Outcome
from distlab.lab.report.table import wrapped
from distlab.lab.report.units import counted
from distlab.lab.report.verdict import judge
from distlab.techniques.transport.store import Prefixed
from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.check.judge.failures import nothing_distributed
from distlab.tools.check.judge.report import log_lines, records_of, spans_of
from distlab.tools.check.start.fork_servers import ForkServer
from distlab.tools.check.start.script import PROVING, STORE_KEY, Job
from distlab.tools.check.start.script_process import OF_TORCHRUN, ScriptMonitor, fork_script
from distlab.tools.check.watch.reporter import now

FORWARD_S = 0.25
SAME_CLOCK_S = 60.0  # closer clocks are one machine's; those of two differ more, except by chance
RELEASE_S = 5.0  # to end an ended script's process


class RankSupervisor:
    """The supervisor of one rank."""

    def __init__(self, config: Config, job: Job, started_at: float, engine: str, server: ForkServer | None) -> None:
        self.config, self.job, self.started_at = config, job, started_at
        self.channel = fork_script(
            job._replace(reruns=None), server
        )  # first: nothing else of this process may be in the script's
        self.reruns = job.reruns(config, job, server) if job.reruns is not None and not config.rank else None
        self.parent = LauncherPipe()
        self.journal = Journal(config.log)
        self._say = partial(self.journal.say, at="normal")
        self.parent.on_output_lost(self.journal.output_failed)
        if engine:
            self._say(f"engine     {engine}")
        self._num_forwarded = 0
        self._ended_s = 0.0  # the time when the run was over

    def run(self) -> int:
        self.parent.start_waiting()
        try:
            cluster = join(self.config, source_version(self.config), self._say, contents(self.job))
        except ClusterError as error:
            self._kill()
            self.journal.say(f"broken     {error}")
            return 3
        self.parent.joined(cluster.record_death)
        folder = self.config.runs_dir / cluster.run_id
        outcome = Outcome(folder, cluster.token)
        watch = Watchdog(cluster, self.config, self.journal.say, partial(self._record_failure, outcome=outcome))
        watch.reports_waits = False  # a supervisor waits only for rank 0, which reports the scripts' waits
        watch.start()
        try:
            lock_folder(folder, cluster, self.config)
            self.journal.open(folder, cluster.rank)
            self.journal.write(start_record(self.config, self.job, cluster))
            exchange = Exchange(
                Prefixed("lab", cluster.store), cluster.rank, cluster.world_size,
                self.config.collective_timeout_s,
            )  # fmt: skip
            self._start(exchange, cluster, folder)
            code = self._follow(watch, exchange, cluster, folder, outcome)
        except BaseException as error:
            self._kill()
            watch.fail(error)
        watch.finish()
        return code

    def _start(self, exchange: Exchange, cluster: Cluster, folder: Path) -> None:
        """Agree on the script's port, and start it."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = self.config.master_port if agent else exchange.share("port", free_port() if cluster.rank == 0 else None)
        hosts = exchange.everyone("hosts", socket.gethostname())
        local_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[cluster.rank]]
        local_rank = self.config.local_rank if self.config.local_rank is not None else local_ranks.index(cluster.rank)
        variables = {
            "RANK": cluster.rank, "WORLD_SIZE": cluster.world_size, "LOCAL_RANK": local_rank, "MASTER_PORT": port,
            "MASTER_ADDR": self.config.master_addr, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            STORE_KEY: derive_name(cluster.key, f"script of {cluster.token}"),
        }  # fmt: skip
        if not agent:
            variables |= {
                "LOCAL_WORLD_SIZE": len(local_ranks),
                "ROLE_RANK": cluster.rank,
                "ROLE_WORLD_SIZE": cluster.world_size,
            }
            # Unique per job, since scripts name files by it: torchrun's "none" let a run resume another's files.
            variables |= OF_TORCHRUN | {"TORCHELASTIC_RUN_ID": cluster.run_id}
        if self.job.watch is not None:
            variables[PROVING] = json.dumps(
                {
                    "folder": str((folder / "script").resolve()), "role": "ranks", "rank": cluster.rank,
                    "world_size": cluster.world_size, "double": self.job.double,
                }
            )  # fmt: skip
        interface = interface_of(cluster.members[cluster.rank].ip)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:  # as the lab's own runs set it
            variables["GLOO_SOCKET_IFNAME"] = interface
        if not os.access(self.job.folder, os.W_OK) and self.config.local_rank is None:
            variables["DISTLAB_FOLDER"] = scratch(exchange, folder, self.job)
        typed = shlex.join(self.job.typed)
        if cluster.rank == 0:
            what = f"{typed} · {counted(cluster.world_size, 'ranks')} · {folder}"
            self.journal.say("\n".join(wrapped(self.job.command, what)), "normal")
        self.channel.begin({name: str(value) for name, value in variables.items()})

    def _follow(self, watch: Watchdog, exchange: Exchange, cluster: Cluster, folder: Path, outcome: Outcome) -> int:
        """Read, forward and watch until rank 0 ends the run; then collect the results."""
        coordinator = None
        if cluster.rank == 0:
            coordinator = Coordinator(
                cluster.world_size, self.job.hang_after_s, self.config.collective_timeout_s, self.journal.say,
                self.job.mesh, reports_end=self.job.runner is not None,
            )  # fmt: skip
        received = dict.fromkeys(range(cluster.world_size), 0)
        with (folder / f"rank{cluster.rank}.calls").open("wb") as calls_file:
            monitor = ScriptMonitor(self.channel)
            while True:
                lines = monitor.lines(FORWARD_S)
                calls_file.writelines(line + b"\n" for line in lines)
                watch.main.at(0, self.job.script.name)
                if coordinator is None:
                    self._forward(exchange, lines)
                    self._ended_s = now()
                    if exchange.store.check(["over"]):
                        well = exchange.store.get("over") == b"well"
                        break
                else:
                    coordinator.receive(0, lines, now())
                    for rank in range(1, cluster.world_size):
                        coordinator.receive(rank, fetch(exchange.store, rank, received), now())
                    self._ended_s = now()
                    coordinator.evaluate(self._ended_s)
                    if coordinator.over:
                        well = all(state.exit_code is not None for state in coordinator.states)
                        exchange.store.set("over", "well" if well else "cut")
                        break
        self.channel.release(RELEASE_S if well else 0.0)
        if coordinator is not None and self.reruns is not None:
            findings, coordinator.compared = self.reruns.compare(folder, coordinator, self._say)
            coordinator.findings += findings
        return self._close(watch, exchange, coordinator, outcome)

    def _forward(self, exchange: Exchange, lines: list[bytes]) -> None:
        if lines:
            exchange.store.set(f"reports/{exchange.rank}/{self._num_forwarded}", b"\n".join(lines).decode())
            self._num_forwarded += 1

    def _close(self, watch: Watchdog, exchange: Exchange, coordinator: Coordinator | None, outcome: Outcome) -> int:
        """Write the findings, and agree on the verdict."""
        sections = Sections(exchange, self.journal)
        if coordinator is not None:
            if coordinator.completed and not coordinator.findings and self.job.runner is None:
                coordinator.findings += nothing_distributed(coordinator.states)
            for record in records_of(coordinator):
                self.journal.write(record)
            for text in log_lines(coordinator):
                self.journal.say(text)
            for rank, how in coordinator.lost.items():
                self.journal.write(records.Lost(rank, coordinator.states[rank].steps, how))
        ended_s = float(exchange.share("ended at", self._ended_s))  # rank 0 ended the run
        ended_s = ended_s if abs(ended_s - self._ended_s) < SAME_CLOCK_S else self._ended_s
        spans, cut = spans_of((outcome.folder / f"rank{exchange.rank}.calls").read_bytes().splitlines(), ended_s)
        began_s = min(filter(None, exchange.everyone("begin", spans[0][2] if spans else None)), default=0.0)
        drawn = [[kind, label, start - began_s, end - began_s] for kind, label, start, end in spans]
        self.journal.write(records.Timeline(self.job.script.name, 0, drawn))
        if cut:
            shown = f"the first {len(spans)} calls of rank {exchange.rank}; its .calls file has {cut} more"
            self.journal.write(records.Said("timeline", shown))
        self.journal.write(records.End(exchange.rank, self.started_at, None, time.time(), watch.cpu_seconds))
        if not sections.collect("records"):
            code = int(exchange.share("verdict"))
            watch.agree(lambda: None)
            return code
        by_rank = everything_written(sections, outcome.folder)
        return publish_verdict(judge(by_rank), by_rank, sections, outcome, watch.agree)

    def _kill(self) -> None:
        self.channel.kill()
        if self.reruns is not None:
            self.reruns.close()

    def _record_failure(self, verdict: Verdict, succession: Succession, outcome: Outcome) -> None:
        self._kill()
        write_failure_report(verdict, succession, self.journal, outcome)


def fetch(store: dist.Store, rank: int, received: dict[int, int]) -> list[bytes]:
    lines: list[bytes] = []
    while store.check([key := f"reports/{rank}/{received[rank]}"]):
        lines += store.get(key).split(b"\n")
        store.delete_key(key)
        received[rank] += 1
    return lines


def scratch(exchange: Exchange, folder: Path, job: Job) -> str:
    """Return a working folder if the script's is read-only: links to the script's neighbours, and space."""
    place = folder / "scratch"
    if exchange.rank == 0:
        place.mkdir(exist_ok=True)
        for each in job.folder.iterdir():
            if not (place / each.name).exists():
                (place / each.name).symlink_to(each)
    exchange.barrier("the scratch folder")
    return str(place.resolve())


def contents(job: Job) -> dict[str, str]:
    """Return what must be equal on all ranks."""
    digest = hashlib.sha256(job.script.read_bytes()).hexdigest()[:12]
    return {"the sha256 of the script": digest, "the arguments of the script": json.dumps(list(job.words))[:400]}


def start_record(config: Config, job: Job, cluster: Cluster) -> records.Start:
    """Return this rank's identity, and the command that repeats the check."""
    import torch

    versions: dict[str, Any] = {
        "lab": source_version(config), "python": platform.python_version(), "torch": torch.__version__,
        "system": platform.platform(),
    }  # fmt: skip
    omitted = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LAB_RUNS_DIR", "LAB_RUN_ID", "RUN_MODE"}
    repeat = {"WORLD_SIZE": str(config.world_size)} | config.environ()
    return records.Start(
        cluster.rank, cluster.run_id, job.command, cluster.world_size, socket.gethostname(), config.written(),
        {name: value for name, value in repeat.items() if name not in omitted}, versions,
        shlex.join(job.typed), started_by=started_by(),
    )  # fmt: skip
