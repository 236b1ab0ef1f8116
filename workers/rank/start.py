"""One rank, from what it refuses before it joins to the experiment's end."""

import hashlib
import platform
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from workers.cluster import link
from workers.cluster.exchange import Exchange
from workers.cluster.parent import Parent
from workers.cluster.rendezvous import Cluster, ClusterError, init_process_group, join
from workers.cluster.sealed import drawn
from workers.cluster.succession import Succession
from workers.cluster.verdict import Verdict
from workers.cluster.watch import Watch
from workers.config import Config, ConfigError
from workers.config.values import is_path, lesson_file
from workers.contract import Mode
from workers.lab import Lab
from workers.measure.ledger import Ledger
from workers.parallel.dialling import Dialling
from workers.parallel.store import Prefixed
from workers.passes.claims import expected
from workers.passes.measure import everything
from workers.passes.statements import hold_what_is_shared
from workers.rank import one_folder
from workers.rank.again import meet_nobody, rejoin
from workers.rank.device import pick_device
from workers.rank.end import bury, conclude, let_leave, move, publish_for, take_in
from workers.rank.estimate import warnings
from workers.rank.imports import import_and_freeze
from workers.rank.known_amount import check_ledger
from workers.rank.known_cases import check_meters
from workers.rank.known_messages import check_transport
from workers.rank.known_sums import check_sums
from workers.rank.lesson import lesson
from workers.rank.link_rate import measure_link
from workers.rank.live import shown
from workers.rank.modes import load_for
from workers.rank.refusals import refuse
from workers.rank.sections import Sections
from workers.rank.stranger import check_stranger
from workers.rank.verdicts import check_verdicts
from workers.rank.way_back import WayBack, described, find
from workers.report import records
from workers.report.claim import Taken, claim, has_claimed
from workers.report.journal import Journal, put_aside, ranks_beyond
from workers.report.log import mistake
from workers.report.outcome import Outcome
from workers.report.progress import Heartbeat, Work
from workers.workload import text
from workers.workload.own import is_own, reads_text


def be_rank(config: Config, started_at: float, parent: Parent, engine: str = "") -> int:
    """Join the others, run the experiment, and return the run's verdict as an exit code; `started_at` in Unix time,
    `engine` a line that tells who says which rank this is."""
    mode = load_for(config)
    way = find(config) if mode.takes_back else None
    if way is not None:  # the folder is there already, and its own
        config = config.model_copy(update={"run_id": None})
    refuse(config, mode, link.refusals(config))
    mode = mode.mistaken(config.bug)
    device = pick_device(config)
    journal = Journal()
    parent.tell_unheard(journal.unheard)
    told = mistake({"mistake": mistake_of(config, mode)}) if config.rank == 0 else []
    for line in told:
        journal.say(line)
    if engine:
        journal.say(f"engine     {engine}")
    for line in warnings(config, mode) if config.rank == 0 else []:
        journal.say(f"estimate   {line}")
    parent.begin_to_wait()
    try:
        if way is None:
            cluster = join(config, source_version(config), journal.say, contents(config))
        else:
            cluster = rejoin(config, way, journal.say)
    except ClusterError as error:
        journal.say(f"broken     {error}")
        return 3
    parent.joined()
    folder = config.runs_dir / cluster.run_id
    outcome = Outcome(folder, cluster.token.hex())
    begin = partial(journal.begin, folder, cluster.rank, partial(start_record, config, cluster, mode))
    leave = partial(ended, journal=journal, begin=begin, outcome=outcome, cluster=cluster)
    watch = Watch(cluster, config, journal.say, leave)
    if way is None:
        watch.start()  # else it begins once this rank has a way to the others: `let_leave`
    work = Work()
    lab: Lab | None = None
    try:
        hold(folder, cluster, config)
        exchange = Exchange(
            Prefixed("lab", cluster.store),
            cluster.rank,
            cluster.world_size,
            config.collective_timeout_s,
            watch.main.waiting,
        )
        apart = one_folder.apart(exchange, folder, cluster.token.hex(), config) if way is None else None
        begin()
        if cluster.rank == 0:
            put_aside(folder, ranks_beyond(folder, cluster.world_size))  # of an attempt with more ranks
            watch.on_period = Heartbeat(journal, work, started_at).beat
        journal.write(expected(config, mode))
        if apart is not None:
            journal.write(records.Unshared(apart.hosts))
        if config.live:
            mode = shown(config, mode, cluster, watch, journal, started_at)
        run_key = bytes.fromhex(drawn(cluster.seal.key, f"run {cluster.token.hex()}"))
        if config.backend == "tcp":
            Dialling(cluster.members[cluster.rank].ip, run_key, cluster.turned_away).register()
        if way is None:
            init_process_group(cluster, config)
        else:
            mode = meet_nobody(mode)
        world = dist.group.WORLD
        assert world is not None
        watch.main.follow(world)
        ledger = Ledger(cluster.rank, cluster.world_size, exchange.everyone, store_port=cluster.store_port)
        lab = Lab(config, mode, device, world, exchange, ledger, journal, watch.main.at)
        if config.checkpoint_every is not None:  # a save meets none of the training's calls
            lab.side_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.collective_timeout_s))
        lab.let_leave = partial(let_leave, watch, exchange, journal, parent)
        lab.own_ip, lab.secret = cluster.members[cluster.rank].ip, run_key
        lab.turned_away = cluster.turned_away
        if mode.takes_back:
            run = described(config, cluster.run_id, cluster.token.hex())
            lab.way_back = way or WayBack(folder, cluster.rank, run, cluster.members)
            lab.take_in = partial(take_in, watch, exchange, journal, lab.way_back)
        lab.work = work
        sections = Sections(exchange, journal, told)
        lab.move = partial(move, watch, exchange, sections)
        lab.finished = sections.finished
        greet(lab, cluster, folder)
        if apart is not None:
            lab.say(apart.told, "folder")
        if lab.rank == 0:
            journal.write(lesson(config, mode))
        if way is None:
            check_verdicts(lab)
            if config.backend == "tcp" and cluster.world_size > 1:
                check_sums(lab)
                check_stranger(lab)
            check_ledger(lab)
            check_transport(lab)
            measure_link(lab)
        import_and_freeze(config, mode)
        check_meters(lab)
        if config.faults is not None and way is None:
            from workers.rank.drills import (
                Drills,
            )  # torch's checkpoints come with it, which other runs need not wait for

            Drills(lab, cluster).begin()
        if way is None:
            hold_what_is_shared(lab)
        (mode.run or everything)(lab)
        lab.at(config.steps, "report")
        write_dropped(journal, cluster)
        journal.write(records.End(lab.rank, started_at, lab.first_step_at, time.time(), watch.cpu_seconds))
        code = conclude(lab, outcome, sections, watch.agree)
    except BaseException as error:
        if lab is not None and lab.rescue is not None and not isinstance(error, ConfigError | ClusterError):
            lab.rescue()
        return watch.fail(error)
    watch.finish()
    if exchange.host in watch.goodbye.outlived:
        publish_for(exchange.host, outcome, journal)
    dist.destroy_process_group()
    return code


def contents(config: Config) -> dict[str, str]:
    """Checksums of what all ranks read, by what they are called in a sentence."""
    found = text.digest(config)[:12] if reads_text(config.model) else ""
    return {"the sha256 of the text": found} if found else {}


def hold(folder: Path, cluster: Cluster, config: Config) -> None:
    """Keep the folder to this run as long as this process lives; raises ConfigError where another run has it."""
    try:
        claim(folder, cluster.token.hex(), goes_on=config.resume == "auto")
    except Taken:
        raise ConfigError(
            [f"LAB_RUN_ID={cluster.run_id!r} is that of another run in {config.runs_dir}: choose another"]
        ) from None


def ended(
    verdict: Verdict, succession: Succession, journal: Journal, begin: Callable[[], None], outcome: Outcome,
    cluster: Cluster,
) -> None:  # fmt: skip
    """The cluster broke: what has come until then that was not believed, then the last words.

    The folder may be there and the records not begun, as all ranks wait for each other in between; a run that was
    refused there leaves none.
    """
    if not succession.given_up:
        if verdict.exit_code != 2 and has_claimed(outcome.folder, cluster.token.hex()):
            begin()
        write_dropped(journal, cluster)
    bury(verdict, succession, journal, outcome)


def write_dropped(journal: Journal, cluster: Cluster) -> None:
    """Write down what came to this rank and was not believed, if anything did."""
    if cluster.dropped.total:
        journal.write(records.Dropped(dict(cluster.dropped.by_fault), dict(cluster.dropped.by_source)))


def source_version(config: Config) -> str:
    """A hash of the sources of workers/ and experiments/, and of a mode from elsewhere: ranks of different code must
    not train together."""
    top = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted([*top.glob("workers/**/*.py"), *top.glob("experiments/**/*.py")]):
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
    here = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LAB_RUNS_DIR", "LAB_RUN_ID"}
    here |= {"LAB_LIVE", "LAB_LIVE_PORT"}  # who looks changes nothing
    repeat = {
        "RUN_MODE": config.run_mode,
        "WORLD_SIZE": str(config.world_size),
        "LAB_SEED": str(config.seed),
    } | config.environ()
    if config.resume == "auto":  # it means this very run, and a repeated one is another
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
        mistake_of(config, mode),
        says_claims=True,
    )


def mistake_of(config: Config, mode: Mode) -> dict[str, str]:
    """The mistake that is made on purpose, as the records have it; nothing where none is."""
    made = mode.mistakes.get(config.bug or "")
    return {"name": config.bug or "", "what": made.what, "check": made.check} if made else {}


def greet(lab: Lab, cluster: Cluster, folder: Path) -> None:
    start = lab.journal.records[0]
    assert isinstance(start, records.Start)
    where = f" · {folder}" if lab.rank == 0 else f" · {start.host} ({cluster.members[lab.rank].ip}) · {lab.device}"
    lab.say(
        f"rank {lab.rank} of {lab.world_size} · {start.run_mode} · {lab.config.backend} · {start.title}{where}",
        all_ranks=True,
    )
