"""The parts of a proof: where a rank's tensor is in the model, how a wrong one is explained, what is refused."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from distlab.lab.config import Config
from distlab.tools.check.start.command import ProofOptions
from distlab.tools.prove import reference, user_file
from distlab.tools.prove.explain import Context, in_parts, solve_counts, why
from distlab.tools.prove.locate import WHOLE, LocatedTensor, Misfit, Rows, locate_in_dense
from distlab.tools.prove.proof import ByteCounter
from distlab.tools.prove.reference import BatchSplit, one_process
from distlab.tools.prove.script_ledger import Ledger
from distlab.tools.prove.user_file import Refused, UserFile, load
from distlab.tools.prove.verdict import Grid


def user_file_of(environ: dict[str, str] | None = None, **found: object) -> UserFile:
    config = Config.read({"WORLD_SIZE": "2"} | (environ or {}), options=ProofOptions)
    assert config.own(ProofOptions).hang_after_s == 5
    return UserFile(found, config)


def test_whole_sharded_and_interleaved_tensors_are_located_by_their_values() -> None:
    dense = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    assert locate_in_dense(dense.clone(), dense) == WHOLE
    assert locate_in_dense(dense[2:5], dense) == Rows(0, [2, 3, 4])
    assert locate_in_dense(dense[:, [1, 3]], dense) == Rows(1, [1, 3])
    assert torch.equal(Rows(1, [1, 3]).of(dense), dense[:, [1, 3]])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.zeros(6, 4), "begins with other weights"),
        (torch.zeros(3, 2), "sharded along several dims"),
        (torch.zeros(5), "has shape"),
        (torch.zeros(2, 4), "row 0 along dim 0 that is not in the model"),
    ],
)
def test_a_tensor_that_is_no_part_of_the_model_is_refused(found: torch.Tensor, words: str) -> None:
    with pytest.raises(Misfit, match=words):
        locate_in_dense(found.double(), torch.arange(24.0, dtype=torch.float64).view(6, 4))


PARTS = {
    (use, shard, index): torch.randn(
        7, 3, generator=torch.Generator().manual_seed(10 * shard + index), dtype=torch.float64
    )
    for use in ("w",)
    for shard in range(3)
    for index in range(2)
}
CONTEXT = Context(
    1, 1, {"dp": 3}, {"dp": [0, 1, 2]}, {(0, 0): 4, (0, 1): 2, (1, 0): 3, (1, 1): 3, (2, 0): 5, (2, 1): 1}, 3
)


@pytest.mark.parametrize(
    ("weigh", "words"),
    [
        (lambda s, i: 3.0, "3.000 x one process's: summed over the 3 ranks of dp once too often"),
        (lambda s, i: 1 / 3, "divided by the 3 ranks of dp once too often"),
        (lambda s, i: 2.0, "the 2 microbatches"),
        (lambda s, i: 1 / 9, "scaled twice by the 3 ranks of dp"),
        (lambda s, i: 18.0, "the 18 loss terms"),
        (lambda s, i: 0.7, "0.7 x one process's"),
        (lambda s, i: float(s == 1), "this rank's own samples alone: never summed over the 3 ranks of dp"),
        (lambda s, i: float(s != 2), "without the samples of shard 2"),
        (lambda s, i: [2.0, 1.0, 3.0][s], "weighted by rank: shard 0 counts 2.000 times, shard 1 counts once"),
        (lambda s, i: float(i == 1), "the last microbatch alone"),
        (lambda s, i: float(i == 0), "without microbatch 1 of shard 0"),
        (lambda s, i: float(s == 1 and i == 0), "some of this rank's own microbatches alone"),
        (lambda s, i: 1.0 + i, "weighted by microbatch: microbatch 0 once, microbatch 1 2.000 times"),
        (lambda s, i: 1 / CONTEXT.terms[s, i], "a mean of the microbatches' means"),
        (lambda s, i: 1.0 + s + 10 * i, "weighted: microbatch 0 of shard 0 once"),
    ],
)  # fmt: skip
def test_a_wrong_gradient_is_explained_by_its_parts(weigh: object, words: str) -> None:
    found = sum(weigh(shard, index) * each for (_, shard, index), each in PARTS.items())  # type: ignore[operator]
    assert isinstance(found, torch.Tensor)
    counts = solve_counts(found, PARTS)
    assert counts is not None
    assert words in in_parts(CONTEXT, counts)


def test_means_of_ranks_with_different_numbers_of_terms() -> None:
    context = CONTEXT._replace(terms={(shard, index): 2 + shard for shard in range(3) for index in range(2)})
    found = sum(each / (2 + shard) for (_, shard, _), each in PARTS.items())
    assert isinstance(found, torch.Tensor)
    counts = solve_counts(found, PARTS)
    assert counts is not None and "a mean of the ranks' means" in in_parts(context, counts)


def test_a_gradient_that_is_no_sum_of_samples_is_explained_by_neighbours_or_rows() -> None:
    whole = torch.stack(list(PARTS.values())).sum(0)
    half = torch.randn(7, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    two = CONTEXT._replace(rank=0, axes={"tp": 2}, neighbours={"tp": [0, 1]})
    both = [LocatedTensor(WHOLE, half), LocatedTensor(WHOLE, whole - half)]
    assert "those of ranks 0 and 1 add up to one process's, but were never summed over tp" in why(
        two, both, whole, PARTS
    )
    some = whole.clone()
    some[2:4] = half[2:4]
    assert "wrong in only 2 of 7 rows along dim 0, the first is row 2" in why(
        two, [LocatedTensor(WHOLE, some)] * 2, whole, PARTS
    )
    bias = {part: each[:, 0] for part, each in PARTS.items()}
    wrong = whole[:, 0].clone()
    wrong[5] += 1
    assert "1 of 7 rows along dim 0, the first is row 5" in why(
        two, [LocatedTensor(WHOLE, wrong)] * 2, whole[:, 0], bias
    )
    assert why(two, [LocatedTensor(WHOLE, half)] * 2, whole, PARTS) == "no sum of the samples' gradients"
    assert why(two, [LocatedTensor(WHOLE, whole * 0)], whole, PARTS) == "zero"
    assert "missing" in why(two, [LocatedTensor(WHOLE, None)], whole, PARTS)
    assert "not finite" in why(two, [LocatedTensor(WHOLE, whole / 0)], whole, PARTS)


def test_shards_and_microbatches_are_uneven_unless_the_file_wants_them_even() -> None:
    for batch in (5, 16, 19):
        sizes = BatchSplit(user_file_of(), 3).sizes(batch)
        assert sum(map(sum, sizes)) == batch and all(size > 0 for each in sizes for size in each)
    assert BatchSplit(user_file_of(even=True), 2).sizes(8) == [[2, 2], [2, 2]]
    with pytest.raises(Refused, match="no multiple of 2 shards x 2 microbatches"):
        BatchSplit(user_file_of(even=True), 2).sizes(10)
    with pytest.raises(Refused, match="smaller than its 3 shards"):
        BatchSplit(user_file_of(), 3).sizes(2)


def test_a_model_on_a_gpu_is_proven_there() -> None:
    """With fake tensors, which have a device but no values; tensors of two devices cannot be combined."""
    with FakeTensorMode():
        model = nn.Linear(2, 3)
        model.weight, model.bias = (nn.Parameter(torch.empty(each.shape, device="cuda")) for each in model.parameters())
        user_file.jittered(model, 1)
        own = user_file_of(batch=lambda seed, step: (torch.zeros(4, 2), torch.zeros(4, 3)))
        inputs, targets, _ = BatchSplit(own, 2, torch.device("cuda:0")).whole(0)
        assert {each.device.type for each in (*model.parameters(), inputs, targets)} == {"cuda"}


def test_padding_is_no_term_and_a_batch_of_padding_is_refused() -> None:
    padded = torch.full((4, 3), -100)
    padded[1, 0] = 5
    assert user_file_of().terms(padded) == 1
    assert user_file_of(terms=lambda targets: 7).terms(padded) == 7
    with pytest.raises(Refused, match="no loss term"):
        BatchSplit(user_file_of(batch=lambda seed, step: (torch.zeros(4, 3), torch.full((4, 3), -100))), 2).whole(0)


def test_a_mesh_is_completed_or_refused() -> None:
    assert user_file_of(mesh={"dp": -1, "tp": 2}).axes(6) == {"dp": 3, "tp": 2}
    assert user_file_of(mesh=lambda size: {"pp": size}).axes(3) == {"pp": 3}
    assert user_file_of().axes(4) == {"dp": 4}
    with pytest.raises(Refused, match="mesh is dp -1 x tp 2, which does not give WORLD_SIZE=3 ranks"):
        user_file_of(mesh={"dp": -1, "tp": 2}).axes(3)
    grid = Grid({"dp": 3, "tp": 2})
    assert grid.neighbours(3) == {"dp": [1, 3, 5], "tp": [2, 3]}
    assert (grid.index(3, "dp"), grid.index(3, "tp"), grid.index(3, "pp")) == (1, 1, 0)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def train_step(model, batch): ...", r"train_step\(model, batch\) cannot be called as train_step\(model, opt"),
        ("model = 3", r"model is a int: expected a function model\(seed\)"),
        ("def strategy(model, mesh, config): ...\ndef prepare(model, group): ...", "defines strategy and prepare"),
        ("x = 1", "defines none of"),
    ],
)
def test_a_file_without_usable_functions_is_refused(source: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine_that_is_refused.py"
    file.write_text(source)
    with pytest.raises(Refused, match=words):
        load(file, user_file_of().config)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            "1 is a SyncBatchNorm, which torch runs on GPUs only",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
            "1 is a BatchNorm1d, whose output depends on the other samples",
        ),
        (lambda: nn.LSTM(2, 2, num_layers=2, dropout=0.1), "applies dropout inside C"),
        (nn.Identity, "no trainable parameter"),
    ],
)
def test_a_model_that_cannot_be_proven_is_refused(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(Refused, match=words):
        user_file.refuse(model())
    user_file.refuse(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval()))


def test_ranks_with_different_starts_are_refused() -> None:
    with pytest.raises(Refused, match=r"model\(1\) differs on rank 2 from rank 0"):
        user_file.refuse_different_starts([["1", "2"], ["1", "2"], ["9", "2"]], 1)
    with pytest.raises(Refused, match=r"batch\(1, 0\) differs on rank 1"):
        user_file.refuse_different_starts([["1", "2"], ["1", "3"]], 1)


def test_a_loss_without_parameters_is_refused() -> None:
    nothing = user_file_of(loss=lambda model, inputs, targets: torch.zeros((), requires_grad=True))
    with pytest.raises(Refused, match="depends on no parameter"):
        one_process(nothing, BatchSplit(nothing, 2))
    with pytest.raises(Refused, match=r"returned shape \[2\]: expected a sum"):
        user_file_of(loss=lambda model, inputs, targets: torch.zeros(2)).loss(
            nn.Identity(), torch.zeros(1), torch.zeros(1)
        )


def buffers(start: dict[str, torch.Tensor], **end: torch.Tensor) -> reference.Buffers:
    own = start | {name: start[name] + 5 for name in start if name == "seen"}
    return reference.Buffers(start, start | end, own)


def test_a_buffer_that_one_process_does_not_change_must_stay_equal() -> None:
    mask, seen = torch.tensor([0.0, -math.inf, math.nan]), torch.zeros((), dtype=torch.int64)
    start = {"mask": mask, "seen": seen}
    alone = buffers(start, seen=seen + 12)
    assert list(reference.wrong_buffers([buffers(start, seen=seen + 12), buffers(start, seen=seen + 5)], alone)) == []
    assert list(reference.changed_buffers([buffers(start, seen=seen + 12), buffers(start, seen=seen + 5)], alone)) == [
        "seen is changed by the steps: as by one process from their own samples on rank 1"
    ]
    right = buffers(start, seen=seen + 5)
    ((sentence, ranks),) = reference.wrong_buffers([right, buffers(start, mask=mask + 1, seen=seen + 5)], alone)
    assert sentence.startswith("buffer mask changes on rank 1, but not in one process; if train_step updates it")
    assert ranks == [1]
    other = {"mask": torch.ones(3), "seen": seen}
    ((sentence, ranks),) = reference.wrong_buffers([buffers(other, seen=seen + 5), right], alone)
    assert sentence.startswith("buffer mask begins with other values on rank 0 than the model's (1, 1, 1, not 0, -inf")
    assert ranks == [0]


def test_a_changed_buffer_must_be_one_processs_or_follow_from_the_ranks_samples() -> None:
    start = {"seen": torch.zeros((), dtype=torch.int64)}
    alone, seen = buffers(start, seen=torch.tensor(12)), torch.tensor(10)
    ((sentence, ranks),) = reference.wrong_buffers(
        [buffers(start, seen=torch.tensor(5)), buffers(start, seen=seen)], alone
    )
    assert sentence == (
        "buffer seen ends as 10 on rank 1, but one process ends with 12, or 5 from this rank's samples alone: it changed"
        " 2 x as much (on rank 1)"
    )
    assert ranks == [1]
    ((sentence, _),) = reference.wrong_buffers([buffers(start)], alone)
    assert sentence.endswith("or 5 from this rank's samples alone (on rank 0)")  # it never changed
    user_file_of = buffers(start, seen=seen)._replace(uncompared="it is rank 0's")
    assert list(reference.wrong_buffers([user_file_of], alone)) == []
    assert next(reference.changed_buffers([user_file_of], alone)).endswith(
        "others; not compared on rank 0: it is rank 0's"
    )
    wide = torch.zeros(3)
    assert (
        not reference.near(wide[:2], wide)
        and not reference.near(wide + 1e-9, wide)
        and reference.near(wide + 1e-12, wide)
    )


def test_a_sharded_buffer_may_differ_but_may_not_change() -> None:
    alone = buffers({"slopes": torch.arange(6.0)})
    part = {"slopes": torch.arange(3.0)}
    assert list(reference.wrong_buffers([buffers(part), buffers({})], alone)) == []
    assert len(list(reference.wrong_buffers([buffers(part, slopes=torch.ones(3))], alone))) == 1


@pytest.mark.parametrize(("name", "patch"), [("dropout", Ledger._dropout), ("batch_norm", Ledger._batch_norm)])
def test_a_patched_function_has_torchs_names_of_arguments(name: str, patch: Callable[..., Any]) -> None:
    """A model may call it by keyword."""
    named = [
        each.name
        for each in list(inspect.signature(patch).parameters.values())[2:]
        if each.kind == each.POSITIONAL_OR_KEYWORD
    ]
    assert named == list(inspect.signature(getattr(nn.functional, name)).parameters)[: len(named)]


# The bytes that a proof counts as the file's own.

ENDS = ("a", 1000), ("b", 2000)


class Counters:
    """A Telling, a Recorder and a Waits in one, with made-up counters."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.bytes: int | None = 0
        self.depth = 0

    def say(self, *values: Any) -> None:
        self.said.append(values)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def hidden(self) -> bool:
        return self.depth > 0

    def sent(self) -> dict[Any, int]:
        return {} if self.bytes is None else {ENDS: self.bytes}


def test_the_bytes_of_steps_count_and_the_proofs_own_do_not() -> None:
    counters = Counters()
    counter = ByteCounter(counters, counters, counters)  # type: ignore[arg-type]
    assert counters.bytes is not None
    counters.bytes += 1  # before the first step
    for _ in range(2):
        with counter.step():
            counters.bytes += 100
            with counter.unseen():
                counters.bytes += 10
                with counter.unseen():  # taken away once
                    counters.bytes += 20
        with counter.unseen():
            counters.bytes += 1000  # between two steps
    counter.report()
    assert counters.said[-1] == ("wire", 2, [(*ENDS, 200)])
    assert [values for values in counters.said if values[0] == "counting"] == [
        ("counting", False), *[("counting", True), ("counting", False)] * 2
    ]  # fmt: skip


def test_without_counters_there_are_no_bytes() -> None:
    counters = Counters()
    counters.bytes = None
    counter = ByteCounter(counters, counters, counters)  # type: ignore[arg-type]
    with counter.step():
        pass
    counter.report()
    assert counters.said[-1] == ("wire", 1, [])
