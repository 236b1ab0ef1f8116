"""The arithmetic of `make fit`: the memory of dp and zero3 by hand, and a verdict that can fail. tests/compose tests
the kill."""

from pathlib import Path

import pytest

from distlab.cli import fit
from distlab.lab.config import Config
from distlab.lab.report.records import Losses, Lost, Ranks, Record
from distlab.techniques.sharded.costs import WHOLE_LAYERS
from tests.lab.report.made_up import bent, good_run, plus, written

SMALL = {"LAB_WIDTH": "16", "LAB_HEADS": "2", "LAB_DEPTH": "3", "LAB_SEQ": "5", "LAB_BATCH": "4", "WORLD_SIZE": "2"}


def test_memory_needs_follow_the_paper() -> None:
    assert fit.dp_need(1000, 7).nbytes == 16_000 + 7
    layers = [100, 300, 300, 100]
    step = 16 * 800 / 4 + WHOLE_LAYERS * 4 * 300 + 7
    assert fit.zero3_need(layers, 4, 7).nbytes == step
    start = 4 * 800 + 4 * 800 / 4 + 4 * 10
    assert fit.zero3_need([10] * 80, 4, 0).nbytes == start > 16 * 800 / 4 + WHOLE_LAYERS * 4 * 10


def test_activations_of_one_rank_exclude_weights() -> None:
    one, half = (fit.activations(Config.read(SMALL | {"WORLD_SIZE": size})) for size in ("1", "2"))
    assert one - 4 == 2 * (half - 4) > 0  # the loss itself is a scalar


def test_base_memory_is_that_of_torch() -> None:
    assert 50e6 < fit.base() < 2e9


def variant(records: Ranks, name: str, shift: float = 0.0) -> Ranks:
    """Return the run as one of this variant, with its losses moved by `apart`."""

    def change(record: Record) -> Record | None:
        if isinstance(record, Losses):
            return Losses(name, [value + shift for value in record.numbers]) if record.variant == "naive" else None
        return record

    return bent(records, change)


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    good = good_run()
    killed = Lost(1, 0, "killed by the OOM killer: its container's limit is LAB_MEMORY")
    made = {
        "free": variant(good, "bucketed"),
        "dp": plus(good, killed),
        "silent": plus(good, Lost(1, 0, "no heartbeat for 2.6 s")),
        "fsdp": variant(good, "zero3", 1e-5),
        "elsewhere": variant(good, "zero3", 0.01),
    }
    return {name: written(tmp_path / name, records) for name, records in made.items()}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("free dp fsdp", []),
        ("free free fsdp", ["dp was not killed by the OOM killer"]),
        ("free silent fsdp", ["dp was not killed by the OOM killer"]),
        ("free dp dp", ["fsdp did not pass", "dp and fsdp did not train to the same losses"]),
        ("free dp elsewhere", ["dp and fsdp did not train to the same losses"]),
        ("fsdp dp fsdp", ["dp and fsdp did not train to the same losses"]),
    ],
)
def test_the_verdict_names_each_failed_condition(runs: dict[str, Path], names: str, expected: list[str]) -> None:
    folders = [runs[name] for name in names.split()]
    assert fit.unmet(*folders) == expected
    assert fit.main(["judge", *map(str, folders)]) == bool(expected)


def test_impossible_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main(["limits"]) == 2
    assert fit.main(["judge", *[str(tmp_path / "absent")] * 3]) == 2
    printed = capsys.readouterr().err
    assert "usage" in printed
    assert "absent is not the folder of a run" in printed
