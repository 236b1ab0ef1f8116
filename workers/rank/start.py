"""One rank, from what it refuses before it joins to the experiment's end."""

import gc
import hashlib
import importlib
import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workers.cluster import link
from workers.cluster.exchange import Exchange
from workers.cluster.rendezvous import Cluster, ClusterError, init_process_group, join
from workers.cluster.watch import Watch
from workers.config import MAX_WORLD_SIZE, Config, ConfigError
from workers.config.values import suggest
from workers.lab import Lab
from workers.measure.ledger import Ledger
from workers.rank.device import pick_device
from workers.rank.end import bury, conclude, let_leave
from workers.rank.link_rate import measure_link
from workers.report import records
from workers.report.journal import Journal, put_aside


def be_rank(config: Config, started_at: float) -> int:
    """Join the others, run the experiment, and return the run's verdict as an exit code; `started_at` in Unix time."""
    experiment = importlib.import_module(f"experiments.{config.run_mode}")
    refuse(config, experiment, link.faults(config))
    device = pick_device(config)
    journal = Journal()
    try:
        cluster = join(config, source_version(), journal.say)
    except ClusterError as error:
        journal.say(f"broken     {error}")
        return 3
    folder = config.runs_dir / cluster.run_id
    watch = Watch(
        cluster, config, journal.say, lambda verdict, survivors: bury(verdict, survivors, journal, cluster.rank)
    )
    watch.start()
    lab: Lab | None = None
    try:
        journal.open(folder, cluster.rank)
        if cluster.rank == 0:
            put_aside(folder, range(cluster.world_size, MAX_WORLD_SIZE))  # of an attempt with more ranks
        journal.write(start_record(config, cluster, experiment.title(config)))
        init_process_group(cluster, config)
        world = dist.group.WORLD
        assert world is not None
        watch.follow(world)
        exchange = Exchange(
            dist.PrefixStore("lab", cluster.store),
            cluster.rank,
            cluster.world_size,
            config.collective_timeout_s,
            watch.waiting,
        )
        ledger = Ledger(cluster.rank, cluster.world_size, exchange.everyone, store_port=config.master_port)
        lab = Lab(config, device, world, exchange, ledger, journal, watch.at)
        if config.checkpoint_every is not None:  # a save meets none of the training's calls
            lab.side_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.collective_timeout_s))
        lab.let_leave = partial(let_leave, watch, exchange, journal)
        greet(lab, cluster, folder)
        measure_link(lab)
        gc.freeze()  # what is imported stays: a collection need not walk its 180,000 objects again and again
        experiment.run(lab)
        lab.at(config.steps, "report")
        journal.write(records.End(lab.rank, started_at, lab.first_step_at, time.time(), watch.cpu_seconds))
        code = conclude(lab, folder, experiment.BUGS.get(config.bug))
    except BaseException as error:
        if lab is not None and lab.saver is not None and not isinstance(error, ConfigError | ClusterError):
            from workers.checkpoint.rescue import rescue

            rescue(lab.saver)
        return watch.fail(error)
    watch.finish()
    dist.destroy_process_group()
    return code


def refuse(config: Config, experiment: Any, of_this_rank: Sequence[str] = ()) -> None:
    """Raise ConfigError with all that the mode cannot run: a variant, a bug or sizes that it does not know; and faults `of_this_rank`."""
    faults = [
        f"LAB_VARIANT={name!r} is not a variant of {config.run_mode}{suggest(name, experiment.VARIANTS)}, "
        f"allowed: {', '.join(experiment.VARIANTS) or 'none, leave it unset'}"
        for name in config.variant
        if name not in experiment.VARIANTS
    ]
    if config.bug is not None and config.bug not in experiment.BUGS:
        allowed = list(experiment.BUGS)
        faults.append(
            f"LAB_BUG={config.bug!r} is not a bug of {config.run_mode}{suggest(config.bug, allowed)}, "
            f"allowed: {', '.join(allowed)}"
        )
    faults += experiment.refuse(config)
    faults += unwritable(config)
    faults += of_this_rank
    if config.resume is not None or config.checkpoint_every is not None:
        from workers.checkpoint import finding  # a run without checkpoints need not wait for it

        faults += finding.faults(config)
    if faults:
        raise ConfigError(faults)


def unwritable(config: Config) -> list[str]:
    """Why no run can be written where LAB_RUNS_DIR and LAB_RUN_ID say."""
    runs = config.runs_dir
    nearest = next(folder for folder in [runs, *runs.absolute().parents] if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return [
            f"LAB_RUNS_DIR={str(runs)!r} cannot be written by user {os.getuid()}: change its owner or name another folder"
        ]
    goes_on = config.resume == "auto" and config.run_id is not None and (runs / config.run_id).is_dir()
    if config.run_id is not None and (runs / config.run_id).exists() and not goes_on:
        return [f"LAB_RUN_ID={config.run_id!r} exists already in {runs}: choose another or remove it"]
    return []


def source_version() -> str:
    """A hash of the sources of workers/ and experiments/: ranks of different code must not train together."""
    top = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted([*top.glob("workers/**/*.py"), *top.glob("experiments/**/*.py")]):
        digest.update(str(path.relative_to(top)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def start_record(config: Config, cluster: Cluster, title: str) -> records.Start:
    versions = {
        "lab": source_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
    settings = json.loads(config.model_dump_json(by_alias=True))
    here = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LAB_RUNS_DIR", "LAB_RUN_ID"}
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
        settings,
        repeat,
        versions,
        title,
    )


def greet(lab: Lab, cluster: Cluster, folder: Path) -> None:
    start = lab.journal.records[0]
    assert isinstance(start, records.Start)
    where = f" · {folder}" if lab.rank == 0 else f" · {start.host} ({cluster.members[lab.rank].ip}) · {lab.device}"
    lab.say(
        f"rank {lab.rank} of {lab.world_size} · {start.run_mode} · {lab.config.backend} · {start.title}{where}",
        all_ranks=True,
    )
