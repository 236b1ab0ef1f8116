"""Whole server runs: their proofs, their checks of the protocol, and refused settings."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.experiments import server
from distlab.experiments.server import MODE
from distlab.experiments.server import run as run_server
from distlab.experiments.server.checks import Rounds, Workers, run_in_one_process
from distlab.lab.config import Config, ConfigError
from distlab.lab.rank.preflight import refuse
from distlab.lab.report.reading import from_line
from distlab.lab.report.records import Table, select
from distlab.lab.report.verdict import judge
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import build_model
from distlab.lab.workload.reference import train
from distlab.techniques.parameter_server.server import (
    Client,
    Link,
    Local,
    ParameterServer,
    Recorder,
    Remote,
    Server,
    Threads,
    Worker,
)
from tests.labs import TINY, failed, failed_with, one_rank, run_experiment
from tests.warm_ranks import Ranks

CPU = torch.device("cpu")
TINY_MLP = {"LAB_MODEL": "mlp", "LAB_WIDTH": "8", "LAB_DEPTH": "2"}


def config_of(**settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "server"} | settings)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (4, {"LAB_MODEL": "line", "LAB_STEPS": "6", "LAB_LOCAL_STEPS": "3", "LAB_STALENESS": "0"}),
        (8, TINY_MLP | {"LAB_SLOW_RANK": "1:0.5", "LAB_LOCAL_STEPS": "3"}),
        (3, {"LAB_OPTIMIZER": "adamw", "LAB_CLIP": "0.1", "LAB_MICROBATCHES": "2", "LAB_DEPTH": "1"}),
    ],
)
def test_every_world_size_passes(ranks: Ranks, tmp_path: Path, world_size: int, settings: dict[str, str]) -> None:
    run, by_rank = run_experiment(ranks, world_size, tmp_path, RUN_MODE="server", **settings)
    assert failed(run) == set() and run["verdict"] == "pass"
    proven = {(check["variant"], check["name"]) for check in run["checks"] if check["tolerance"] <= 1e-12}
    assert {(name, "weights") for name in ("dp", "sync")} < proven
    assert {(name, "weights at H = 1") for name in ("local_sgd", "diloco")} < proven
    if "LAB_CLIP" in settings:
        assert {skip["variant"] for skip in run["skipped"]} == {"downpour"}
        assert {("sync", "optimizer state"), ("diloco", "weights at H = 4 as trained")} < proven
        return
    names = {"losses", "gradients", "weights", "samples", "order of events"}  # with the drawn order of events
    names |= {"who may start", "budget", "updates", "final weights"}  # with any order
    names |= {"staleness"} if "LAB_STALENESS" in settings else set()
    assert {("downpour", what) for what in names} < proven
    (row,) = server_rows(by_rank)
    assert sum(map(int, row[1].split(", "))) == int(settings.get("LAB_STEPS", 4)) * world_size
    wire = [entry for entry in run["comparisons"] if entry["name"] == "wire bytes of the run"]
    assert {entry["variant"] for entry in wire if entry["decides"]} == {"downpour"}


def server_rows(by_rank: Any) -> list[list[str]]:
    """Return the rows of the server's table, which begin with the variant and the steps per worker."""
    return next(table.rows for _, table in select(by_rank, Table) if table.title.startswith("The server's record"))


def test_fast_workers_take_over_a_stragglers_steps(ranks: Ranks, tmp_path: Path) -> None:
    """At a fiftieth of its speed rank 1 gets few steps; with LAB_STALENESS=0 it gets half of them."""
    settings = {"RUN_MODE": "server", "LAB_VARIANT": "downpour", "LAB_PROOF": "0", "LAB_SLOW_RANK": "1:0.02"}
    settings |= {"LAB_STEPS": "12", "LAB_LOCAL_STEPS": "1"}
    for bound, most in (({}, 6), ({"LAB_STALENESS": "0"}, 12)):
        run, by_rank = run_experiment(ranks, 2, tmp_path / str(most), **settings | bound)
        assert run["verdict"] == "pass", failed(run)
        (row,) = server_rows(by_rank)
        fast, slow = map(int, row[1].split(", "))
        assert fast + slow == 24
        assert slow == most if bound else slow < most


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_CHECKPOINT_EVERY": "5"}, "server makes none"),
        ({"LAB_RESUME": "auto", "LAB_RUN_ID": "x"}, "server makes none"),
        (
            {"LAB_VARIANT": "downpour", "LAB_OPTIMIZER": "adamw"},
            "LAB_VARIANT='downpour' cannot run: LAB_OPTIMIZER=adamw",
        ),
        ({"LAB_VARIANT": "downpour", "LAB_CLIP": "1"}, "LAB_CLIP bounds the norm"),
        ({"LAB_BATCH": "3"}, "every rank needs a sample"),
        ({"LAB_BUG": "stale_unbounded", "WORLD_SIZE": "1"}, "it takes 2 ranks"),
        ({"LAB_BUG": "stale_unbounded", "LAB_VARIANT": "sync,dp"}, "it takes downpour"),
        ({"LAB_BUG": "stale_unbounded"}, "LAB_STALENESS unset"),
        ({"LAB_BUG": "stale_unbounded", "LAB_STALENESS": "0"}, "takes LAB_STALENESS + 1 + LAB_LOCAL_STEPS = 5"),
        ({"LAB_BUG": "stale_unbounded", "LAB_CLIP": "1"}, "downpour cannot run: LAB_CLIP bounds the norm"),
        (
            {"LAB_BUG": "stale_unbounded", "LAB_OPTIMIZER": "adamw"},
            "downpour cannot run: LAB_OPTIMIZER=adamw would normalise",
        ),
        ({"LAB_VARIANT": "ssp"}, "LAB_VARIANT=downpour LAB_STALENESS=2 LAB_LOCAL_STEPS=1 is the same"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(config_of(**settings), MODE)
    (fault,) = refused.value.faults
    assert words in fault


def test_default_settings_are_never_refused() -> None:
    for world_size in range(1, 9):
        refuse(Config.read({"RUN_MODE": "server", "WORLD_SIZE": str(world_size)}), MODE)


@pytest.mark.parametrize("settings", [{}, {"LAB_CLIP": "1"}, {"LAB_OPTIMIZER": "adamw"}])
def test_skipped_variants_are_not_predicted(settings: dict[str, str]) -> None:
    skipped = {"downpour"} if settings else set()
    assert {each.variant for each in MODE.predict(config_of(**settings))} == set(MODE.requested(()).names) - skipped


def test_one_worker_with_one_local_step_equals_one_process() -> None:
    """Compare the reference of local SGD with the baseline, so that H = 1 is compared with dp itself."""
    config = config_of(**TINY_MLP, LAB_LOCAL_STEPS="1", WORLD_SIZE="1")
    batches = Batches(config, proof=True, device=CPU, dtype=torch.float64)
    one = Workers(build_model(config, 1).double(), config, batches)
    losses, weights = run_in_one_process(one, Rounds(1, lr=1.0, momentum=0.0), steps=3)
    dense = list(train(build_model(config, 1).double(), batches, config, 3))
    assert losses == pytest.approx([snapshot.loss for snapshot in dense], abs=1e-14)
    wanted = torch.cat([weight.flatten() for weight in dense[-1].weights.values()])
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-14)


def test_a_wrong_mean_fails_losses_and_weights_at_every_h(ranks: Ranks, tmp_path: Path) -> None:
    settings = TINY_MLP | {"LAB_VARIANT": "local_sgd,diloco", "LAB_LOCAL_STEPS": "2", "LAB_BUG": "mean_of_workers"}
    run, _ = run_experiment(
        ranks, 3, tmp_path, RUN_MODE="server", LAB_OPTIMIZER="adamw", LAB_DTYPE="float64", **settings
    )
    failed_of = {(check["variant"], check["name"]) for check in run["checks"] if not check["passed"]}
    at_h = {f"{what} at {h}" for what in ("losses", "weights") for h in ("H = 1", "H = 2", "H = 2 as trained")}
    for name in ("local_sgd", "diloco"):
        assert {(name, what) for what in at_h | {"timed losses"}} <= failed_of


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "diloco": (server, "DILOCO", lambda _: (0.7, 0.5)),
    "local_sgd": (server, "AVERAGE", lambda _: (0.9, 0.0)),
}


@pytest.mark.parametrize("variant", FAULTS)
def test_a_wrong_outer_step_fails_the_run(ranks: Ranks, tmp_path: Path, variant: str) -> None:
    found = failed_with(ranks, tmp_path, __name__, variant, RUN_MODE="server", LAB_VARIANT=variant)
    assert "outer step" in found


def run_ten_steps(group: dist.ProcessGroup, name: str, fault: str) -> list[float] | str:
    """Take ten steps of one update each with a real server; rank 2 ends early, or repeats a number."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    workers = range(1, group.size()) if group.rank() == 0 else [group.rank()]
    links = {
        rank: Link(dist.PrefixStore(f"{rank}", store), at_server=group.rank() == 0, timeout_s=5) for rank in workers
    }
    rules = ParameterServer(torch.zeros(4), range(group.size()), lr=1.0, budget=10, staleness=1)
    server_ = Server(rules, 5, Recorder(range(group.size())))
    client = Local(server_, 0) if group.rank() == 0 else Remote(links[group.rank()], torch.zeros(4))
    threads = Threads(server_, links if group.rank() == 0 else {})
    weights, number = torch.zeros(4), 0
    try:
        while client.start(1, weights):
            if group.rank() == 2 and fault == "end":
                return "ended"  # which closes its link
            number += 1
            client.push(number if group.rank() != 2 or fault != "repeat" else 7, torch.ones(4), 0.0)
        client.finish(weights)
        threads.join()
    except ValueError as error:
        return str(error)
    except RuntimeError:
        return "no answer"
    return weights.tolist()


def test_the_server_continues_without_a_lost_worker(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3, run_ten_steps, f"{tmp_path} whole", "") == [[-10.0] * 4] * 3
    others, same, ended = ranks(3, run_ten_steps, f"{tmp_path} end", "end")
    assert ended == "ended" and others == same == [-9.0] * 4, "more than its open update is lost"


def test_a_repeated_update_fails_the_run(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(3, run_ten_steps, f"{tmp_path} repeat", "repeat")
    assert found[0] == "rank 2 pushes update 7 after 0" and found[2] == "no answer"


def run_chatty_rank(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> list[str]:
    class Chatty(Worker):
        """A worker that sends additional bytes."""

        def train(self, client: Client, most: int) -> None:
            super().train(client, most)
            dist.all_reduce(torch.zeros(100_000), group=group)

    mode = replace(MODE, run=partial(run_server, worker=Chatty))
    return one_rank(group, settings, folder, mode)


def test_additional_bytes_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    settings = TINY | TINY_MLP | {"RUN_MODE": "server", "LAB_VARIANT": "downpour", "LAB_PROOF": "0", "WORLD_SIZE": "2"}
    lines = ranks(2, run_chatty_rank, settings | {"MASTER_ADDR": "127.0.0.1"}, str(tmp_path), timeout_s=100)
    run = judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})
    assert failed(run) == {"wire bytes of the run"}
