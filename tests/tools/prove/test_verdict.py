"""Each decision on the records of all ranks: the first wrong tensor, the difference of the losses, and the findings."""

import math
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.lab.report.reading import from_line
from distlab.lab.report.records import Check
from distlab.lab.workload.reference import Snapshot
from distlab.tools.prove.compare import GRADIENTS, LOSSES, WEIGHTS, Deviation, Draw
from distlab.tools.prove.explain import UNEXPLAINED
from distlab.tools.prove.locate import WHOLE, LocatedTensor, Rows
from distlab.tools.prove.reference import Buffers, Dense
from distlab.tools.prove.verdict import (
    AllRecords,
    Grid,
    RankRecords,
    checks_of,
    loss_sentence,
    modules,
    norm,
    norm_by_shard,
    own_norm,
    reason,
    report_all,
    update,
)

pytestmark = pytest.mark.timeout(60)


def t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# One process: a.w of two rows and b.w of one, tied to c.w, with the backward pass from b to a.
START = {"a.w": t(1.0, 2.0), "b.w": t(3.0)}
STEPS = [
    Snapshot(4.0, {"a.w": t(3.0, 4.0), "b.w": t(12.0)}, {"a.w": t(0.5, 1.0), "b.w": t(2.0)}, {}, 13.0),
    Snapshot(-8.0, {"a.w": t(1.0, 1.0), "b.w": t(1.0)}, {"a.w": t(0.25, 0.5), "b.w": t(1.5)}, {}, 2.0),
]
CANONICAL = {"a.w": "a.w", "b.w": "b.w", "c.w": "b.w"}
RIGHT = [Deviation(step, kind, name, 0, 0.0, 1.0, 1.0) for step in (0, 1) for kind in (GRADIENTS, WEIGHTS)
         for name in ("a.w", "b.w")]  # fmt: skip


def off(
    step: int, kind: str, name: str, rank: int, by: float = 5.0, allowed: float = 1.0, times: float | None = None
) -> Deviation:
    return Deviation(step, kind, name, rank, by, allowed, times)


def mine(*deviations: Deviation, loss_parts: Sequence[float | None] = (2.0, -4.0), **fields: Any) -> RankRecords:
    whole = {"a.w": WHOLE, "b.w": WHOLE}
    made = RankRecords([*RIGHT, *deviations], whole, {}, list(loss_parts), [], Buffers({}, {}, {}), by_strategy=False)
    return made._replace(**fields)


def run_of(*ranks: RankRecords, clip: float | None = None, axes: dict[str, int] | None = None) -> AllRecords:
    file: Any = SimpleNamespace(found={} if clip is None else {"clip": clip})
    split: Any = None
    grid = Grid(axes or {"dp": len(ranks)})
    return AllRecords(file, split, grid, Dense(START, STEPS, ["b.w", "a.w"]), CANONICAL, ranks)


@pytest.mark.parametrize(
    ("of_ranks", "first"),
    [
        ([[]], None),
        ([[off(0, GRADIENTS, "a.w", 0, by=1.0)]], None),  # as much as is allowed
        ([[off(1, GRADIENTS, "b.w", 0), off(0, WEIGHTS, "a.w", 0)]], (0, WEIGHTS, "a.w", 0)),
        ([[off(1, WEIGHTS, "b.w", 0), off(1, GRADIENTS, "a.w", 0)]], (1, GRADIENTS, "a.w", 0)),
        ([[off(1, GRADIENTS, "a.w", 0), off(1, GRADIENTS, "b.w", 0)]], (1, GRADIENTS, "b.w", 0)),
        ([[off(1, GRADIENTS, "a.w", 0), off(1, GRADIENTS, "c.w", 0)]], (1, GRADIENTS, "c.w", 0)),
        ([[], [off(1, GRADIENTS, "a.w", 2), off(1, GRADIENTS, "a.w", 1)]], (1, GRADIENTS, "a.w", 1)),
    ],
)
def test_the_first_wrong_tensor(of_ranks: list[list[Deviation]], first: tuple[int, str, str, int] | None) -> None:
    """The first step, gradients before weights, in the order of the backward pass, of the lowest rank."""
    found = run_of(*(mine(*deviations) for deviations in of_ranks)).first()
    assert (found and found[:4]) == first


@pytest.mark.parametrize(
    ("axes", "loss_parts", "by_strategy", "losses"),
    [
        ({"dp": 2}, [(2.0, -4.0), (2.0, -4.0)], False, [0.0, 0.0]),
        ({"dp": 2}, [(2.0, -4.0), (1.0, -1.0)], False, [1.0, 3.0]),  # 3 for 4, -5 for -8
        ({"dp": 2}, [(3.0, -9.0), (2.0, None)], False, [1.0, 1.0]),
        ({"dp": 1, "tp": 2}, [(4.0, -8.0), (4.0, -8.0)], False, [0.0, 0.0]),  # all see the whole
        ({"dp": 1, "tp": 2}, [(1.0, -8.0), (3.0, 0.0)], False, [0.0, 0.0]),  # parts of it
        ({"dp": 1, "tp": 2}, [(4.0, -8.0), (4.0, -8.0)], True, [4.0, 8.0]),  # a strategy's add up
        ({"dp": 2}, [(None, -8.0), (None, None)], False, [None, 0.0]),
        ({"dp": 2}, [(math.nan, -8.0), (1.0, None)], False, [math.inf, 0.0]),
    ],
)
def test_losses_of_all_ranks(
    axes: dict[str, int], loss_parts: list[tuple[float | None, ...]], by_strategy: bool, losses: list[float | None]
) -> None:
    of_ranks = [mine(loss_parts=each, by_strategy=by_strategy) for each in loss_parts]
    assert run_of(*of_ranks, axes=axes).losses() == losses


@pytest.mark.parametrize(
    ("loss_parts", "deviations", "wrong"),
    [
        ((4.0, -8.0), (), False), ((4.0, -8.0 + 7e-11), (), False), ((4.0, -8.0 - 9e-11), (), True),
        ((None, None), (), False), ((4.0, -8.0), (off(0, GRADIENTS, "a.w", 0),), True),
    ],
)  # fmt: skip
def test_a_loss_or_a_tensor_makes_it_wrong(
    loss_parts: tuple[float | None, ...], deviations: tuple[Deviation, ...], wrong: bool
) -> None:
    """Losses may differ by 1e-11 of the largest, 8; with a clip of 50 also by 3 steps x 0.01 x 50 x 1e-6."""
    run = run_of(mine(*deviations, loss_parts=loss_parts))
    assert run.is_wrong() is wrong
    assert run.loss_tolerance() == pytest.approx(8e-11, abs=0.0)
    assert run_of(mine(), clip=50.0).loss_tolerance() == pytest.approx(8e-11 + 1.5e-6, abs=0.0)


def test_a_gradient_that_is_missing_on_all_ranks() -> None:
    fields = [each for each in RIGHT if (each.step, each.kind, each.name) != (1, GRADIENTS, "b.w")]
    lacking = mine()._replace(deviations=fields)
    assert run_of(lacking).without_gradient() == ["b.w"]
    assert run_of(lacking, mine()).without_gradient() == []
    tied = mine(off(1, GRADIENTS, "c.w", 0, by=0.0))
    assert run_of(tied._replace(deviations=tied.deviations[-1:] + fields)).without_gradient() == []


def test_the_index_of_a_rank_along_each_axis() -> None:
    grid = Grid({"dp": 3, "tp": 2})
    assert grid.neighbours(3) == {"dp": [1, 3, 5], "tp": [2, 3]}
    assert (grid.index(3, "dp"), grid.index(3, "tp"), grid.index(3, "pp"), grid.size) == (1, 1, 0, 6)


# The findings.

LOSS_OFF = (
    "the loss of step 0 is 4 in one process, but the ranks returned 3, none: they must add up to it over dp (loss *"
    " share of each microbatch)"
)


def findings_of(run: AllRecords, tensors: Sequence[LocatedTensor | None] = (), errors: Sequence[str] = ()) -> list[Any]:
    """Return the findings as (check, sentence, ranks), and the notes."""
    lines: list[Any] = []
    report_all(run, run.first(), tensors, errors, lambda kind, *of: lines.append((kind, *of)))
    return [each[1:] if each[0] == "finding" else each for each in lines if each[0] != "record"]


ALONE_OFF = LOSS_OFF.replace("3, none", "2")
SLOW = LocatedTensor(WHOLE, t(0.75, 1.5))
MOVED = off(0, WEIGHTS, "a.w", 1)


@pytest.mark.parametrize(
    ("run", "tensors", "errors", "sentences"),
    [
        (run_of(mine(), mine()), (), (), []),
        (run_of(mine(rows={"a.w": Rows(0, [1])}), mine(rows={})), (), (),
         [("all is trained", "no rank trains b.w", [0, 1]),
          ("all is trained", "no rank trains rows 0 to 0 of a.w", [0, 1])]),
        (run_of(mine(rows={"a.w": Rows(0, []), "b.w": WHOLE})), (), (),
         [("losses", ALONE_OFF, [0]), ("all is trained", "no rank trains rows 0 to 1 of a.w", [0])][::-1]),
        (run_of(mine()._replace(deviations=RIGHT[:1] + RIGHT[2:4] + RIGHT[4:5]), mine()._replace(deviations=[])), (), (),
         [("all is trained", "no rank has a gradient of b.w", [0, 1])]),
        (run_of(mine()._replace(deviations=[])), (), (),
         [("all is trained", "no rank has a gradient of a.w, nor of 1 more", [0]),
          ("losses", ALONE_OFF, [0])]),
        (run_of(mine(), mine(misfits={"a.w": "is odd", "b.w": "is even", "c.w": "is"})), (), (),
         [("ranks begin with the model", "a.w on rank 1 is odd, and 2 more", [1])]),
        (run_of(mine(), mine(misfits={"a.w": "is odd"})), (), (),
         [("ranks begin with the model", "a.w on rank 1 is odd", [1])]),
        (run_of(mine(loss_parts=(3.0, -8.0)), mine(loss_parts=(None, None))), (), (), [("losses", LOSS_OFF, [0, 1])]),
        (run_of(mine(loss_parts=(3.0, -8.0)), mine(loss_parts=(None, None))), (), ("", "it does", "it too"),
         [("losses", f"{LOSS_OFF}; the forward pass first differs on rank 1: it does", [1, 2])]),
        # Weights that are off make the losses of later steps wrong, not of the same.
        (run_of(mine(), mine(MOVED, loss_parts=(2.0, -5.0))), [None, SLOW], (),
         [("weights", "weights of a.w on rank 1 changed 0.5 x as much as one process's, though their gradient is right:"
           " another learning rate (step 0, the only wrong one, on rank 1)", [1])]),
        (run_of(mine(off(1, WEIGHTS, "b.w", 0)), mine(off(1, WEIGHTS, "b.w", 1), off(1, WEIGHTS, "a.w", 1))),
         [LocatedTensor(WHOLE, None), None], (),
         [("weights", "weights of b.w (tied to c.w) on rank 0 are missing (step 1, 2 of 2 parameters are wrong, on"
           " ranks 0 and 1)", [0, 1])]),
    ],
)  # fmt: skip
def test_the_findings(run: AllRecords, tensors: Any, errors: tuple[str, ...], sentences: list[Any]) -> None:
    assert findings_of(run, tensors, errors) == sentences


@pytest.mark.parametrize(
    ("why", "where"), [(UNEXPLAINED, "; the forward pass first differs on rank 1: it does"), ("2 x", "")]
)
def test_an_unexplained_gradient_gets_the_first_wrong_module_and_the_loss(
    why: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlab.tools.prove.verdict.reason", lambda *_: why)
    run = run_of(mine(off(0, GRADIENTS, "a.w", 0), loss_parts=(3.0, -8.0)), mine(loss_parts=(None, None)))
    assert findings_of(run, [SLOW, None], ["", "it does"]) == [
        ("gradients", f"gradients of a.w on rank 0 are {why} (step 0, the only wrong one, on rank 0){where}", [0]),
        ("losses", f"{LOSS_OFF}; the forward pass first differs on rank 1: it does", [1]),
    ]


def test_a_note_on_dropout_if_any_rank_draws() -> None:
    drawing = mine(drawn=[Draw("drop", 0, 1, 1)])
    assert [each[:2] for each in findings_of(run_of(mine(), drawing))] == [("said", "dropout")]
    names = [each.name for each in checks_of(run_of(mine(), drawing), defaultdict(list), [], 1.0)]
    assert names[2:] == ["ranks begin with the model", "all is trained", "dropout by axis"]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (LocatedTensor(WHOLE, t(1.0, 2.0)), "did not change"),
        (SLOW, "changed 0.5 x as much as one process's"),  # by 0.25 of 0.5, and by 0.5 of 1
        (LocatedTensor(WHOLE, t(0.75, 1.0)), "differ by 5 after a step of plain SGD at 0.01"),
        (LocatedTensor(Rows(0, [1]), t(1.5)), "changed 0.5 x"),
        (LocatedTensor(WHOLE, None), "are missing"),
    ],
)
def test_wrong_weights_are_explained(tensor: LocatedTensor, words: str) -> None:
    assert update(run_of(mine(), mine(MOVED)), MOVED, [None, tensor]).startswith(words)


def clipped(*factors: tuple[str, float | None], rank: int = 1) -> list[Deviation]:
    return [off(0, GRADIENTS, name, rank, times=times) for name, times in factors]


@pytest.mark.parametrize(
    ("clip", "deviations", "words"),
    [
        # 2 x of all is a norm half as long as 13; by 0.5 twice as long.
        (6.5, clipped(("a.w", 2.0), ("b.w", 2.0)), "2 x one process's, as all on this rank: the norm that clips them"
         " to 6.5 is 0.5 x one process's norm 13"),
        (6.5, clipped(("a.w", 0.5), ("b.w", 0.5)), "0.5 x one process's, as all on this rank: the norm that clips them"
         " to 6.5 is 2 x one process's norm 13"),
        (26.0, clipped(("a.w", 0.5), ("b.w", 0.5)), "0.5 x one process's, as all on this rank: the norm that clips"
         " them to 26 is 4 x one process's norm 13"),  # clips where one process does not
        (6.5, clipped(("a.w", 0.5), ("b.w", 0.75)), ""),
        (6.5, clipped(("a.w", 0.5)), ""),  # one alone is no norm
        (6.5, clipped(("a.w", None), ("b.w", None)), ""),
        (None, clipped(("a.w", 2.0), ("b.w", 2.0)), ""),
    ],
)  # fmt: skip
def test_a_wrong_norm_for_clipping(clip: float | None, deviations: list[Deviation], words: str) -> None:
    right = mine()._replace(deviations=[])
    run = run_of(right, right._replace(deviations=deviations), clip=clip)
    assert norm(run, deviations[0], deviations) == words


def test_a_norm_of_each_ranks_own_part() -> None:
    """Rank 1 has b.w, 12 of 13, whose norm clips it by 12 instead; rank 0 has a.w, 5 of 13."""
    zero, one = clipped(("a.w", 13 / 5), ("c.w", 13 / 5), rank=0), clipped(("b.w", 13 / 12), ("c.w", 13 / 12))
    dense = Dense(START, [STEPS[0]._replace(gradients={"a.w": t(1.5, 2.0), "b.w": t(6.0)})], ["b.w", "a.w"])
    ranks = [mine(rows={"a.w": WHOLE})._replace(deviations=zero), mine(rows={"b.w": WHOLE})._replace(deviations=one)]
    run = run_of(*ranks, clip=6.5)._replace(dense=dense)
    assert (own_norm(run, zero[0]), own_norm(run, one[0])) == (2.5, 6.0)
    assert norm(run, one[0], [*zero, *one]) == (
        "1.083 x one process's, as all on this rank: the norm that clips them to 6.5 is 0.9231 x one"
        " process's norm 13, different on each rank; it is that of this rank's own part alone: sum the squares over the"
        " ranks that have the other parts"
    )

    far = clipped(("b.w", 1.01 * 13 / 12), ("c.w", 1.01 * 13 / 12))
    assert "own part" not in norm(run, far[0], far)
    assert own_norm(run._replace(ranks=[mine()]), zero[0]) == 6.5


BY_SHARD = (
    "rows 0 to 0 2.6 x, rows 1 to 1 1.083 x one process's: each rank's shard is clipped by its own norm (5, 12; that"
    " of all is 13); sum the squares of the shards' norms over the ranks before the root"
)


@pytest.mark.parametrize(
    ("clip", "rows", "sentence"),
    [
        (6.5, (3 * 13 / 5, 4 * 13 / 12), BY_SHARD),  # 5 and 12 are sides of 13
        (None, (3 * 13 / 5, 4 * 13 / 12), ""), (6.5, (6.0, 8.0), ""), (6.5, (-6.0, 8.0), ""),
        (6.5, (6.0, 4.0), ""),  # 6.5 and 13 are sides of more
    ],
)  # fmt: skip
def test_shards_that_are_clipped_by_their_own_norms(clip: float | None, rows: tuple[float, ...], sentence: str) -> None:
    found = LocatedTensor(WHOLE, t(*rows))
    assert norm_by_shard(run_of(mine(), mine(), clip=clip), off(0, GRADIENTS, "a.w", 1), found) == sentence


@pytest.mark.parametrize(("clip", "factor"), [(None, 1.0), (26.0, 1.0), (6.5, 0.5)])
def test_contributions_are_clipped_as_in_one_process(
    clip: float | None, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("distlab.tools.prove.verdict.contributions", lambda *_: {("a.w", 0, 0): t(3.0, 4.0)})
    monkeypatch.setattr(
        "distlab.tools.prove.verdict.why", lambda _scene, _found, wanted, parts: seen.append((wanted, parts))
    )
    split: Any = SimpleNamespace(num_shards=0)
    reason(run_of(mine(), clip=clip)._replace(split=split), off(0, GRADIENTS, "a.w", 0), [])
    ((wanted, parts),) = seen
    assert wanted.tolist() == [3.0, 4.0]
    assert parts[("a.w", 0, 0)].tolist() == [3.0 * factor, 4.0 * factor]


def test_a_check_has_the_worst_ratio_to_its_tolerance() -> None:
    worst = off(1, GRADIENTS, "a.w", 0, by=6.0, allowed=2.0)
    run = run_of(mine(worst, off(0, GRADIENTS, "b.w", 0, by=9.0, allowed=9.0), off(0, WEIGHTS, "a.w", 0, by=0.5)))
    found = list(checks_of(run, {GRADIENTS: ["g"], WEIGHTS: [], LOSSES: ["l"], "ranks begin with the model": ["x", "y"],
                                "all is trained": []}, [0.25, 0.75, 0.5], 0.125))  # fmt: skip
    assert [(each.name, each.max_abs_diff, each.tolerance, each.detail, each.unit) for each in found] == [
        ("losses", 0.75, 0.125, "l", ""), ("gradients", 6.0, 2.0, "g", ""), ("weights", 0.5, 1.0, "", ""),
        ("ranks begin with the model", 2, 0, "x; y", "findings"), ("all is trained", 0, 0, "", "findings"),
    ]  # fmt: skip


def test_checks_are_recorded_too() -> None:
    lines: list[Any] = []
    run = run_of(mine(loss_parts=(None, None)))
    report_all(run, None, (), (), lambda kind, *of: lines.append((kind, *of)))
    checks = [from_line(each[1]) for each in lines if each[0] == "record"]
    assert [each.name for each in checks if isinstance(each, Check)] == [
        "gradients", "weights", "ranks begin with the model", "all is trained",
    ]  # fmt: skip
    assert lines[-1] == ("said", "losses", "not compared: train_step returned no loss on any rank")


def test_the_table_of_modules() -> None:
    deviations = [
        off(1, GRADIENTS, "a.w", 1, times=2.0), off(1, GRADIENTS, "a.w", 0, by=7.0, times=0.25),
        off(1, GRADIENTS, "c.w", 0, by=0.5, times=1.0), off(0, GRADIENTS, "b.w", 0, by=0.0),
    ]  # fmt: skip
    table = modules(run_of(mine()._replace(deviations=deviations)), deviations[0])
    assert table.title == "Gradients of step 1 by module, in the order of the backward pass"
    assert table.rows == [
        ["c", "right", "", "", "", "0.5"],
        ["a", "wrong", "w", "ranks 0 and 1", "0.25, 2", "7"],
    ]
    deep = run_of(mine()._replace(deviations=[off(1, GRADIENTS, "deep.er.w", 0)]))._replace(
        canonical={"deep.er.w": "a.w"}
    )
    assert modules(deep, deviations[0]).rows[0][:3] == ["deep.er", "wrong", "w"]
    mixed = modules(run_of(mine()._replace(deviations=[deviations[1], off(1, GRADIENTS, "a.w", 1)])), deviations[0])
    assert mixed.rows == [["a", "wrong", "w", "ranks 0 and 1", "", "7"]]


def test_only_some_ranks_losses_are_shown() -> None:
    run = run_of(*(mine(loss_parts=(0.0, float(rank))) for rank in range(9)))
    assert loss_sentence(run, 1).startswith(
        "the loss of step 1 is -8 in one process, but the ranks returned 0, 1, 2, 3, 4, 5, 6, 7: they"
    )
    assert UNEXPLAINED not in loss_sentence(run, 1)
