"""Run whole experiments on the pool of ranks: like a run, but without containers and heartbeats."""

import dataclasses
import fcntl
import hashlib
import importlib
import math
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from distlab.contract import Mode
from distlab.experiments.comm import benchmark
from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.cluster.join import join
from distlab.lab.cluster.launch import free_port
from distlab.lab.cluster.membership import Membership
from distlab.lab.cluster.messages import Verdict
from distlab.lab.cluster.watchdog import Watchdog
from distlab.lab.config import Config
from distlab.lab.lab import Lab, RunHooks
from distlab.lab.measure.traffic import Ledger
from distlab.lab.rank.main import log_by_records, places_of, why_unseen
from distlab.lab.rank.mode_loader import load_for
from distlab.lab.rank.preflight import refuse
from distlab.lab.report import records
from distlab.lab.report.reading import from_line, read_run, to_line
from distlab.lab.report.run_folder import Journal
from distlab.lab.report.verdict import judge, passes
from distlab.lab.verify.run_all import everything, expected
from distlab.lab.workload.model import Model
from distlab.techniques.collectives.sharded_tensor import LocalShard
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.transport.store import KeyedStore
from tests.controls import uncontrolled
from tests.warm_ranks import Ranks, side_groups

TINY = {"LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_HEADS": "4", "LAB_SEQ": "8", "LAB_STEPS": "4"}


def run_experiment(
    ranks: Ranks, world_size: int, folder: Path, until: str = "", **environ: str
) -> tuple[dict[str, Any], dict[int, list[records.Record]]]:
    """Run RUN_MODE on `world_size` ranks of the pool, or only `until` the check of this name has failed; returns
    run.json and the records of each rank."""
    settings = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"} | TINY | environ
    config = Config.read(settings | {"RANK": "0"})
    mode = load_for(config)
    refuse(config, mode)
    lines = ranks(world_size, one_rank, settings, str(folder), None, until, timeout_s=100)
    by_rank = {rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)}
    run = judge(by_rank)
    assert not (found := uncontrolled(run, mode)), f"no injected bug and no test makes these fail: {found}"
    return run, by_rank


class Ran(NamedTuple):
    """A finished run: run.json, the records of each rank, and the folder with its logs."""

    judged: dict[str, Any]
    records: dict[int, list[records.Record]]
    folder: Path


class Runs:
    """The runs of a test session, `runs(3, RUN_MODE="dp").judged`: equal settings run once, on the first worker that
    requests them, and other workers read the folder. `until` is as in `run_experiment`."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._read: dict[str, Ran] = {}

    def __call__(self, world_size: int, until: str = "", **environ: str) -> Ran:
        name = hashlib.sha256(repr((world_size, until, *sorted(environ.items()))).encode()).hexdigest()[:16]
        if name not in self._read:
            self._read[name] = self._made(name, world_size, until, environ)
        return self._read[name]

    def _made(self, name: str, world_size: int, until: str, environ: dict[str, str]) -> Ran:
        with (self._folder / name).open("a+") as made:  # contains the path of the run's folder when the run is complete
            fcntl.flock(made, fcntl.LOCK_EX)  # during one run, whose time the pool limits
            made.seek(0)
            folder = Path(made.read() or tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
            if not made.tell():
                ran = Ran(*run_experiment(self._ranks, world_size, folder, until, **environ), folder)
                made.write(str(folder))
                return ran
        records = read_run(folder)
        return Ran(judge(records), records, folder)


def failed_with(ranks: Ranks, folder: Path, faults: str, fault: str, **environ: str) -> set[str]:
    """Return the failed checks of a tiny run of two ranks with a fault; FAULTS of the module `faults` has its owner, its
    name and its replacement."""
    own = folder / "-".join([fault, *environ.values()])  # in a folder that is used twice ranks would read old answers
    own.mkdir()
    settings = TINY | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LAB_MODEL": "mlp"} | environ
    lines = ranks(2, one_faulty_rank, faults, fault, settings, str(own))
    return failed(judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)}))


def one_faulty_rank(
    group: dist.ProcessGroup, faults: str, fault: str, settings: dict[str, str], folder: str
) -> list[str]:
    """Run one rank of such a run; returns its records as lines."""
    owner, name, wrong = importlib.import_module(faults).FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrong(getattr(owner, name)))
        return one_rank(group, settings, folder)


def one_rank(
    group: dist.ProcessGroup, settings: dict[str, str], folder: str, mode: Mode | None = None, until: str = ""
) -> list[str]:
    """Run the experiment on one rank, with a Lab on the pool's group; returns its records as lines."""
    lab = lab_of(group, settings, folder, mode, until)
    try:
        with suppress(Decided), pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmark, "REPEATED_BYTES", 0)  # one call per round: tests do not need the time of 16
            (lab.mode.run or everything)(lab)
    finally:
        disconnect()
    lab.journal.write(records.End(group.rank(), 0.0, lab.first_step_at, 0.0, 0.0))
    return [to_line(record) for record in lab.journal.records]


class Decided(Exception):
    """Raised when the check that a run is made for has failed, because the rest of the run is not needed."""


def end_once_failed(until: str, config: Config, exchange: Exchange, journal: Journal) -> None:
    """End the run if the check `until` has failed in all variants; all ranks call it at the end of a section."""
    claims = [each for each in journal.records if isinstance(each, records.Check | records.Comparison)]
    mine = [claim.variant for claim in claims if claim.name == until and not passes(claim)]
    everyones = {variant for of_rank in exchange.everyone("decision", mine) for variant in of_rank or ()}
    if shows_in_all(everyones, config.variant):
        raise Decided


def shows_in_all(variants: Collection[str], chosen: Collection[str]) -> bool:
    """Return whether a check that failed for `variants` failed for all requested ones, or for the run as a whole."""
    return set(variants) == {""} or (bool(chosen) and set(variants) >= set(chosen))


def lab_of(
    group: dist.ProcessGroup, settings: dict[str, str], folder: str, mode: Mode | None = None, until: str = ""
) -> Lab:
    """Return this rank's Lab on the pool's group, with a journal in `folder`, for `mode` or the mode of the settings. It
    raises Decided at the end of a section in which the check `until` has failed."""
    config = Config.read(settings | {"RANK": str(group.rank())})
    journal = Journal()
    journal.open(Path(folder), group.rank())
    log_by_records(journal, config)
    requested = mode or load_for(config)
    mode = mode or requested.mistaken(config.bug)
    start = records.Start(group.rank(), "test", config.run_mode, group.size(), "host", config.written(), {}, {})
    shown = {"mistake": requested.mistake_record(config.bug), "idea": mode.sentence, "stories": mode.stories}
    journal.write(replace(start, by_torch=list(mode.by_torch), **shown))
    store = dist.PrefixStore(folder, dist.distributed_c10d._get_default_store())
    exchange = Exchange(store, group.rank(), group.size(), timeout_s=30)
    unseen = why_unseen(config.backend, group.size())

    def finished(_section: str, _rows: Sequence[str] = ()) -> None:
        if until:
            end_once_failed(until, config, exchange, journal)

    hooks = RunHooks(side_group=side_groups[group.size()], finished=finished)
    store_ports = [store_port()]
    if mode.takes_back:
        hooks = dataclasses.replace(hooks, membership=(membership := membership_of(config, exchange)))
        store_ports.append(membership.cluster.server_at[1])  # its heartbeats are no traffic of the training either
    ledger = Ledger(group.rank(), group.size(), exchange.everyone, store_ports, unseen=unseen)
    lab = Lab(config, mode, torch.device("cpu"), group, exchange, ledger, journal, hooks)
    journal.write(expected(config, mode))
    journal.write(records.Placed("127.0.0.1", "cpu", *places_of(lab.mesh)))
    return lab


class PooledWatch(Watchdog):
    """A watch that does not end its process, because a rank of the pool outlives the run."""

    def _leave(self, own: Verdict, lost: set[int], *, declared_dead: bool = False) -> NoReturn:  # noqa: ARG002
        self._ending.set()
        raise SystemExit  # ends this thread


watches: list[Watchdog] = []  # of this process's last Lab with elastic membership


def disconnect() -> None:
    """End the watches of `membership_of`: their heartbeats would count as traffic of the next test."""
    while watches:
        watch = watches.pop()
        watch._ending.set()
        watch.join()
        watch._signals.close()
        watch.uplink.close()
        if watch.cluster.server is not None:
            watch.cluster.server.close()


def membership_of(config: Config, exchange: Exchange) -> Membership:
    """Return an elastic membership: a server on rank 0, to which all ranks of the pool connect."""
    port = exchange.share("port", free_port() if exchange.rank == 0 else None)
    config = config.model_copy(update={"master_port": port, "lost_after_s": 30.0, "run_id": "pool"})
    cluster = join(config, "pool", lambda _line: None, elastic=True)
    watch = PooledWatch(cluster, config, print, lambda verdict, succession: None)
    watches.append(watch)
    watch.start()
    return Membership(cluster, watch, config.collective_timeout_s, lambda: None, rejoined=False)


def store_port() -> int:
    """Return the port of the store of all ranks, whose traffic is not counted."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, KeyedStore)
    return store.port


def built(mode: Mode, name: str, model: Model, group: dist.ProcessGroup, config: Config) -> Any:
    """Return the strategy of one variant on the pool's group, with the bug of LAB_BUG."""
    (variant,) = [each for each in mode.mistaken(config.bug).variants if each.name == name]
    assert variant.build is not None
    return variant.build(model, Mesh.grid(mode.axes(config), group), config)


def failed(run: dict[str, Any]) -> set[str]:
    """Return the names of the failed checks and comparisons of a run."""
    return {claim["name"] for claim in run["checks"] + run["comparisons"] if not claim["passed"]}


def copy_state(source: dict[str, Any], target: dict[str, Any]) -> None:
    """Copy one strategy's live state into another's on the same rank, as a checkpoint does."""
    assert set(source) == set(target)
    for label, state in source.items():
        if isinstance(state, LocalShard):
            for (offset, box), (other_offset, other) in zip(state.boxes, target[label].boxes, strict=True):
                assert offset == other_offset
                other.copy_(box)
        else:
            target[label].copy_(state)


def sampling_errors(count: float, draws: int, share: float) -> float:
    """Return how many standard deviations a count of `draws` with this probability is from its expectation."""
    return abs(count - draws * share) / math.sqrt(draws * share * (1 - share))
