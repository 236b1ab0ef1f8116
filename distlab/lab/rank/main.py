"""Run one rank, from the refusal of settings to the experiment's end."""

import hashlib
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distlab.contract import Mode
from distlab.lab.cluster import ClusterError, link
from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.cluster.departure import Succession
from distlab.lab.cluster.join import Cluster, derive_name, init_process_group, join
from distlab.lab.cluster.launch import LauncherPipe
from distlab.lab.cluster.membership import Membership
from distlab.lab.cluster.messages import Verdict
from distlab.lab.cluster.rejoin import LeftRun, find_left_run, publish, rejoin
from distlab.lab.cluster.watchdog import Watchdog
from distlab.lab.config import Config, ConfigError, user_code
from distlab.lab.config.launchers import started_by
from distlab.lab.config.settings import is_path, lesson_file
from distlab.lab.lab import Lab, RunHooks
from distlab.lab.measure.traffic import Ledger
from distlab.lab.rank import preflight
from distlab.lab.rank.finish import Sections, finish_run, let_leave, move, write_failure_report
from distlab.lab.rank.link_speed import measure_link
from distlab.lab.rank.machine_load import read_load
from distlab.lab.rank.mode_loader import (
    check_cards,
    import_and_freeze,
    lesson,
    load,
    load_for,
    nccl_gave_up,
    pick_device,
    with_names_of_today,
)
from distlab.lab.rank.preflight import refuse, warnings
from distlab.lab.report import records
from distlab.lab.report.log import mistake
from distlab.lab.report.progress import Heartbeat, Work
from distlab.lab.report.rank_log import RankLog
from distlab.lab.report.run_folder import FolderInUse, Journal, Outcome, claim, has_claimed, put_aside, ranks_beyond
from distlab.lab.report.table import WIDTH, log_line
from distlab.lab.verify.run_all import everything, expected
from distlab.lab.workload import data
from distlab.lab.workload.user_model import is_own, reads_text
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.transport.process_group import TcpBackend
from distlab.techniques.transport.store import Prefixed

ALONE_S = 60.0  # timeout of collectives with a single rank
UNSEEN = (
    "wire bytes are not visible: NCCL bypasses sockets where it can (NCCL_DEBUG=INFO shows how), so only called bytes"
    " are checked"
)

if TYPE_CHECKING:
    from distlab.lab.rank.fault_injection import FaultInjector


def be_rank(config: Config, started_at: float, parent: LauncherPipe, engine: str = "") -> int:
    """Join the others, run the experiment, and return the run's verdict as an exit code; `started_at` in Unix time,
    `engine` a line on which launcher numbered this rank."""
    mode = load_for(config)
    config = with_names_of_today(config, mode)
    if mode.takes_back and (left := find_left_run(config)) is not None:
        return rejoin_run(left, config, mode, started_at, parent, engine)
    # 1. Refuse settings that cannot run.
    refuse(config, mode, link.refusals(config))
    mode, device = mode.mistaken(config.bug), pick_device(config, engine)
    journal, printed = begin_log(config, mode, parent, engine)
    import_and_freeze(config, mode)
    # 2. Find the other ranks; from then on each watches all others.
    parent.start_waiting()
    try:
        cluster = join(
            config, source_version(config), partial(journal.say, at="normal"), checksums(config),
            elastic=mode.takes_back,
        )  # fmt: skip
    except ClusterError as error:
        journal.say(log_line("broken", str(error)))
        return 3
    parent.joined(cluster.record_death)
    run = RankRun(config, mode, device, cluster, journal, parent, started_at, printed)
    run.watch.start()
    try:
        # 3. Lock the run's folder for this run, and begin its records.
        lock_folder(run.folder, cluster, config)
        separate = preflight.find_separate_disks(run.exchange, run.folder, cluster.token, config)
        run.begin_records()
        if separate is not None:
            journal.write(records.Unshared(separate.hosts))
        # 4. Open the process group of all ranks, and other communication of an experiment.
        run.register_transport()
        check_cards(config, device, run.exchange)
        init_process_group(cluster, config)
        injector = fault_injector_of(run)
        lab = run.open_lab(injector)
        if separate is not None:
            lab.say(separate.sentence, "folder", at="normal")
        measure_link(lab)
        if injector is not None:
            injector.begin()
        # 5. Run the experiment, judge what all ranks wrote, and agree on the verdict.
        code = run.run_experiment(lab)
    except BaseException as error:
        return run.watch.fail(user_code.exited(error))
    # 6. Leave once all others know that this rank is done.
    run.leave()
    return code


def rejoin_run(
    left: LeftRun, config: Config, mode: Mode, started_at: float, parent: LauncherPipe, engine: str
) -> int:  # fmt: skip
    """Join a run again that continued without this rank, and run like `be_rank`.

    It takes no part in the common start of all ranks, nor in fault injection, which its previous process had; until its
    mode admits it, it has its own process group.
    """
    config = config.model_copy(update={"run_id": None})  # the folder exists already, and is its own
    refuse(config, mode, link.refusals(config))
    mode, device = mode.mistaken(config.bug), pick_device(config)
    journal, printed = begin_log(config, mode, parent, engine)
    import_and_freeze(config, mode)
    parent.start_waiting()
    try:
        cluster = rejoin(left, config, source_version(config), partial(journal.say, at="normal"))
    except ClusterError as error:
        journal.say(log_line("broken", str(error)))
        return 3
    parent.joined()
    run = RankRun(config, mode, device, cluster, journal, parent, started_at, printed, rejoined=True)
    run.watch.start()
    try:
        lock_folder(run.folder, cluster, config)
        run.begin_records()
        run.register_transport()
        run.mode = init_group_alone(run.mode)
        lab = run.open_lab()
        code = run.run_experiment(lab)
    except BaseException as error:
        return run.watch.fail(user_code.exited(error))
    run.leave()
    return code


class RankRun:
    """One rank's part in a run that it has joined: its watch, folder, exchange and Lab."""

    def __init__(
        self, config: Config, mode: Mode, device: torch.device, cluster: Cluster, journal: Journal,
        parent: LauncherPipe, started_at: float, printed: Sequence[str], *, rejoined: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.mode, self.device, self.cluster = config, mode, device, cluster
        self.journal, self.parent, self.started_at = journal, parent, started_at
        self.folder = config.runs_dir / cluster.run_id
        self.outcome = Outcome(self.folder, cluster.token)
        self.watch = Watchdog(cluster, config, journal.say, self._write_failure)
        self.exchange = Exchange(
            Prefixed("lab", cluster.store), cluster.rank, cluster.world_size, config.collective_timeout_s,
            self.watch.main.waiting,
        )  # fmt: skip
        self.sections = Sections(self.exchange, journal, printed)
        self.key = bytes.fromhex(derive_name(cluster.key, f"run {cluster.token}"))  # of this run only
        self.membership: Membership | None = None
        if mode.takes_back:
            publishes = partial(publish, cluster, config, self.folder)
            bound_s = config.collective_timeout_s
            self.membership = Membership(cluster, self.watch, bound_s, publishes, rejoined=rejoined)
        self.own_ip = cluster.members[cluster.rank].ip
        self.work = Work()

    def begin_records(self) -> None:
        """Write this rank's data and its expected checks."""
        self._write_start()
        if self.cluster.rank == 0:
            put_aside(self.folder, ranks_beyond(self.folder, self.cluster.world_size))  # of an attempt with more ranks
            heartbeat = Heartbeat(self.journal, self.work, self.started_at, rewrites=self.journal.screen.seen)
            self.watch.on_period = heartbeat.beat
        self.journal.write(expected(self.config, self.mode))
        self.journal.write(read_load("start"))

    def register_transport(self) -> None:
        """Make the lab's own transport the backend of all groups of this process, with LAB_BACKEND=tcp."""
        if self.config.backend == "tcp":
            TcpBackend(self.own_ip, self.key, self.cluster.strangers.on_rejected).register()

    def open_lab(self, injector: "FaultInjector | None" = None) -> Lab:
        """Return the Lab on the default group, and record this rank's place in it."""
        world = dist.group.WORLD
        assert world is not None
        self.watch.main.follow(world)
        if self.config.backend == "nccl":
            self.watch.nccl_aborted = nccl_gave_up
        exchange, config, cluster = self.exchange, self.config, self.cluster
        unseen = why_unseen(config.backend, cluster.world_size)
        ledger = Ledger(cluster.rank, cluster.world_size, exchange.everyone, [cluster.server_at[1]], unseen=unseen)
        lab = Lab(config, self.mode, self.device, world, exchange, ledger, self.journal, self._hooks(injector))
        record_place(lab, cluster)
        if lab.rank == 0:
            self.journal.write(lesson(config, self.mode))
        return lab

    def _hooks(self, injector: "FaultInjector | None") -> RunHooks:
        watch, exchange, journal, timeout_s = self.watch, self.exchange, self.journal, self.config.collective_timeout_s
        hooks = RunHooks(
            at=watch.main.at, work=self.work, finished=self.sections.finished,
            own_ip=self.own_ip, secret=self.key, on_rejected=self.cluster.strangers.on_rejected,
            membership=self.membership,
            let_leave=partial(let_leave, watch, exchange, journal, self.parent),
            move=partial(move, watch, exchange, self.sections),
        )  # fmt: skip
        if self.config.checkpoint_every is not None:  # saves use none of the training's calls
            hooks = replace(hooks, side_group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
        if injector is not None:
            hooks = replace(hooks, on_step=injector.step)
        return hooks

    def run_experiment(self, lab: Lab) -> int:
        """Run the experiment, write its last records, and return the exit code that all ranks agree on."""
        (lab.mode.run or everything)(lab)
        lab.at(self.config.steps, "report")
        self._write_dropped()
        self.journal.write(read_load("end"))
        end = records.End(lab.rank, self.started_at, lab.first_step_at, time.time(), self.watch.cpu_seconds)
        self.journal.write(end)
        return finish_run(lab, self.outcome, self.sections, self.watch.agree)

    def leave(self) -> None:
        self.watch.finish()
        dist.destroy_process_group()

    def _write_start(self) -> None:
        self.journal.begin(self.folder, self.cluster.rank, partial(start_record, self.config, self.cluster, self.mode))

    def _write_failure(self, verdict: Verdict, succession: Succession) -> None:
        """Write the refused connections so far, then the failure report, because the cluster broke.

        The folder may exist without records, because all ranks wait for each other in between; a run that was refused
        there writes none.
        """
        if not succession.declared_dead:
            if verdict.exit_code != 2 and has_claimed(self.folder, self.cluster.token):
                self._write_start()
            self._write_dropped()
        write_failure_report(verdict, succession, self.journal, self.outcome)

    def _write_dropped(self) -> None:
        strangers = self.cluster.strangers
        if strangers.total:
            self.journal.write(records.Dropped(dict(strangers.by_fault), dict(strangers.by_source)))


def begin_log(config: Config, mode: Mode, parent: LauncherPipe, engine: str) -> tuple[Journal, list[str]]:
    """Return the journal, which has no folder yet, and the printed rows of rank 0's log."""
    journal = Journal(config.log)
    log_by_records(journal, config)
    parent.on_output_lost(journal.output_failed)
    printed = mistake({"mistake": mode.mistake_record(config.bug)}) if config.rank == 0 else []
    for line in printed:
        journal.say(line, "normal")
    if engine:
        journal.say(log_line("engine", engine), "normal")
    for line in warnings(config, mode) if config.rank == 0 else []:
        journal.say(log_line("estimate", line), "normal")
    return journal, printed


def log_by_records(journal: Journal, config: Config) -> None:
    """Let the journal write what this rank does to its log, and print rank 0's log in the width of a terminal; with
    LAB_LOG=full each rank's."""
    own, shown = RankLog(config.log), RankLog(config.log, WIDTH)
    journal.lines_of = lambda record: [line.text for line in own.lines(record)]
    if config.rank == 0 or config.log == "full":
        journal.shown_of = lambda record: [line.text for line in shown.lines(record)]


def import_for_ranks(config: Config) -> None:
    """Import in the launcher, before it forks ranks, what each needs; each imports an outside lesson itself."""
    if not is_path(config.run_mode):
        mode = load(config.run_mode)
        import_and_freeze(with_names_of_today(config, mode), mode)


def init_group_alone(mode: Mode) -> Mode:
    """Open a default group of this process alone, until the mode replaces it by that of the remaining ranks; returns
    the mode on a mesh of one rank."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=ALONE_S)
    )  # fmt: skip
    return replace(mode, axes=lambda config: {"dp": 1})  # noqa: ARG005


def fault_injector_of(run: RankRun) -> "FaultInjector | None":
    """Return the fault injection of LAB_FAULTS, if there is any."""
    if run.config.faults is None:
        return None
    from distlab.lab.rank.fault_injection import (
        FaultInjector,  # it imports torch's checkpoints, which other runs do not need
    )

    return FaultInjector(run.config, run.journal, run.cluster)


def checksums(config: Config) -> dict[str, str]:
    """Return checksums of the data that all ranks read, with the name of each for an error."""
    found = data.digest(config)[:12] if reads_text(config.model) else ""
    return {"the sha256 of the text": found} if found else {}


def lock_folder(folder: Path, cluster: Cluster, config: Config) -> None:
    """Lock the folder for this run while this process lives; raises ConfigError if another run has it."""
    try:
        claim(folder, cluster.token, goes_on=config.resume == "auto")
    except FolderInUse:
        raise ConfigError(
            [f"LAB_RUN_ID={cluster.run_id!r} is used by another run in {config.runs_dir}: choose another"]
        ) from None


def source_version(config: Config) -> str:
    """Return a hash of all sources, also of an outside mode: ranks of different code must not train together."""
    top = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted({*top.glob("**/*.py"), *top.glob("experiments/**/*.py")}):
        digest.update(str(path.relative_to(top)).encode() + path.read_bytes())
    if is_path(config.run_mode):
        lesson = lesson_file(config.run_mode)
        for path in sorted(lesson.parent.glob("**/*.py")) if lesson.name == "__init__.py" else [lesson]:
            digest.update(path.read_bytes())
    for spec in (config.model, *config.variant):
        if is_own(spec):
            digest.update(Path(spec.rpartition(":")[0]).read_bytes())
    return digest.hexdigest()[:12]


def start_record(config: Config, cluster: Cluster, mode: Mode) -> records.Start:
    versions = {
        "lab": source_version(config),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
    here = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LAB_RUNS_DIR", "LAB_RUN_ID", "LAB_LOG"}
    repeat = {
        "RUN_MODE": config.run_mode,
        "WORLD_SIZE": str(config.world_size),
        "LAB_SEED": str(config.seed),
    } | config.environ()
    if config.resume == "auto":  # it continues this run only, and a repetition is another run
        here.add("LAB_RESUME")
    repeat = {name: value for name, value in repeat.items() if name not in here}
    return records.Start(
        cluster.rank,
        cluster.run_id,
        config.run_mode,
        cluster.world_size,
        socket.gethostname(),
        config.written(),
        repeat,
        versions,
        mode.title(config),
        list(mode.by_torch),
        mode.mistake_record(config.bug),
        says_claims=True,
        idea=mode.sentence,
        stories=mode.stories,
        started_by=started_by(),
    )


def why_unseen(backend: str, world_size: int) -> str:
    """Return why the sockets' bytes are not measured; empty if they are all traffic."""
    return UNSEEN if backend == "nccl" and world_size > 1 else ""


def record_place(lab: Lab, cluster: Cluster) -> None:
    """Record this rank's place among the others."""
    lab.journal.write(records.Placed(cluster.members[lab.rank].ip, str(lab.device), *places_of(lab.mesh)))


def places_of(mesh: Mesh) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return this rank's index along each axis, the axis size, and the neighbouring ranks: the stages before and after
    in a pipeline, the next ones of a ring along every other axis."""
    axes = {axis: [mesh.index(axis), mesh.size(axis)] for axis in mesh.groups}
    neighbours: dict[str, int] = {}
    for axis, group in mesh.groups.items():
        ranks = dist.get_process_group_ranks(group)
        index, size = axes[axis]
        if axis == "pp":
            neighbours |= {"previous stage": ranks[index - 1]} if index else {}
            neighbours |= {"next stage": ranks[index + 1]} if index + 1 < size else {}
        elif size > 1:
            name = "" if len(axes) == 1 else f"{axis} "
            neighbours |= {f"{name}previous": ranks[index - 1], f"{name}next": ranks[(index + 1) % size]}
    return axes, neighbours
