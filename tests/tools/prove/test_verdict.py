"""Each decision on what all ranks have brought: which tensor is first, by how much losses are off, and what is said."""

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
    Everything,
    Grid,
    Mine,
    loss_sentence,
    modules,
    norm,
    norm_by_shard,
    own_norm,
    reason,
    tell,
    update,
    written,
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


def mine(*offs: Deviation, shares: Sequence[float | None] = (2.0, -4.0), **given: Any) -> Mine:
    whole = {"a.w": WHOLE, "b.w": WHOLE}
    made = Mine([*RIGHT, *offs], whole, {}, list(shares), [], Buffers({}, {}, {}), by_strategy=False)
    return made._replace(**given)


def brought(*ranks: Mine, clip: float | None = None, axes: dict[str, int] | None = None) -> Everything:
    theirs: Any = SimpleNamespace(found={} if clip is None else {"clip": clip})
    dealing: Any = None
    grid = Grid(axes or {"dp": len(ranks)})
    return Everything(theirs, dealing, grid, Dense(START, STEPS, ["b.w", "a.w"]), CANONICAL, ranks)


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
def test_the_first_that_is_wrong(of_ranks: list[list[Deviation]], first: tuple[int, str, str, int] | None) -> None:
    """Of the first step, gradients before weights, in the order of the backward pass, of the lowest rank."""
    found = brought(*(mine(*offs) for offs in of_ranks)).first()
    assert (found and found[:4]) == first


@pytest.mark.parametrize(
    ("axes", "shares", "by_strategy", "losses"),
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
    axes: dict[str, int], shares: list[tuple[float | None, ...]], by_strategy: bool, losses: list[float | None]
) -> None:
    of_ranks = [mine(shares=each, by_strategy=by_strategy) for each in shares]
    assert brought(*of_ranks, axes=axes).losses() == losses


@pytest.mark.parametrize(
    ("shares", "offs", "wrong"),
    [
        ((4.0, -8.0), (), False), ((4.0, -8.0 + 7e-11), (), False), ((4.0, -8.0 - 9e-11), (), True),
        ((None, None), (), False), ((4.0, -8.0), (off(0, GRADIENTS, "a.w", 0),), True),
    ],
)  # fmt: skip
def test_losses_or_a_tensor_decide(shares: tuple[float | None, ...], offs: tuple[Deviation, ...], wrong: bool) -> None:
    """Losses may be off by 1e-11 of the largest, 8; with a clip of 50 by 3 steps x 0.01 x 50 x 1e-6, too."""
    all_ = brought(mine(*offs, shares=shares))
    assert all_.is_wrong() is wrong
    assert all_.loss_tolerance() == pytest.approx(8e-11, abs=0.0)
    assert brought(mine(), clip=50.0).loss_tolerance() == pytest.approx(8e-11 + 1.5e-6, abs=0.0)


def test_a_gradient_that_no_rank_gave_in_some_step() -> None:
    given = [each for each in RIGHT if (each.step, each.kind, each.name) != (1, GRADIENTS, "b.w")]
    lacking = mine()._replace(offs=given)
    assert brought(lacking).without_gradient() == ["b.w"]
    assert brought(lacking, mine()).without_gradient() == []
    tied = mine(off(1, GRADIENTS, "c.w", 0, by=0.0))
    assert brought(tied._replace(offs=tied.offs[-1:] + given)).without_gradient() == []


def test_where_a_rank_stands_on_each_axis() -> None:
    grid = Grid({"dp": 3, "tp": 2})
    assert grid.neighbours(3) == {"dp": [1, 3, 5], "tp": [2, 3]}
    assert (grid.index(3, "dp"), grid.index(3, "tp"), grid.index(3, "pp"), grid.size) == (1, 1, 0, 6)


# What is said.

LOSS_OFF = (
    "the loss of step 0 is 4 in one process, and the ranks returned 3, none: these are to add up to it over dp (loss *"
    " share of each microbatch)"
)


def told(all_: Everything, tensors: Sequence[LocatedTensor | None] = (), parted: Sequence[str] = ()) -> list[Any]:
    """Findings as (check, sentence, ranks), and what else is said."""
    said: list[Any] = []
    tell(all_, all_.first(), tensors, parted, lambda kind, *of: said.append((kind, *of)))
    return [each[1:] if each[0] == "finding" else each for each in said if each[0] != "record"]


ALONE_OFF = LOSS_OFF.replace("3, none", "2")
SLOW = LocatedTensor(WHOLE, t(0.75, 1.5))
MOVED = off(0, WEIGHTS, "a.w", 1)


@pytest.mark.parametrize(
    ("all_", "tensors", "parted", "sentences"),
    [
        (brought(mine(), mine()), (), (), []),
        (brought(mine(rows={"a.w": Rows(0, [1])}), mine(rows={})), (), (),
         [("all is trained", "no rank trains b.w", [0, 1]),
          ("all is trained", "no rank trains rows 0 to 0 of a.w", [0, 1])]),
        (brought(mine(rows={"a.w": Rows(0, []), "b.w": WHOLE})), (), (),
         [("losses", ALONE_OFF, [0]), ("all is trained", "no rank trains rows 0 to 1 of a.w", [0])][::-1]),
        (brought(mine()._replace(offs=RIGHT[:1] + RIGHT[2:4] + RIGHT[4:5]), mine()._replace(offs=[])), (), (),
         [("all is trained", "no rank gave the gradient of b.w", [0, 1])]),
        (brought(mine()._replace(offs=[])), (), (),
         [("all is trained", "no rank gave the gradient of a.w, nor of 1 more", [0]),
          ("losses", ALONE_OFF, [0])]),
        (brought(mine(), mine(misfits={"a.w": "is odd", "b.w": "is even", "c.w": "is"})), (), (),
         [("ranks begin with the model", "a.w on rank 1 is odd, and 2 more", [1])]),
        (brought(mine(), mine(misfits={"a.w": "is odd"})), (), (),
         [("ranks begin with the model", "a.w on rank 1 is odd", [1])]),
        (brought(mine(shares=(3.0, -8.0)), mine(shares=(None, None))), (), (), [("losses", LOSS_OFF, [0, 1])]),
        (brought(mine(shares=(3.0, -8.0)), mine(shares=(None, None))), (), ("", "it does", "it too"),
         [("losses", f"{LOSS_OFF}; the forward pass parts first on rank 1: it does", [1, 2])]),
        # Weights that are off make the losses of later steps wrong, not of the same.
        (brought(mine(), mine(MOVED, shares=(2.0, -5.0))), [None, SLOW], (),
         [("weights", "weights of a.w on rank 1 moved 0.5 x as far as one process's, though their gradient is right:"
           " another learning rate (step 0, alone, on rank 1)", [1])]),
        (brought(mine(off(1, WEIGHTS, "b.w", 0)), mine(off(1, WEIGHTS, "b.w", 1), off(1, WEIGHTS, "a.w", 1))),
         [LocatedTensor(WHOLE, None), None], (),
         [("weights", "weights of b.w (tied to c.w) on rank 0 are missing (step 1, the first of 2 of 2 parameters, on"
           " ranks 0 and 1)", [0, 1])]),
    ],
)  # fmt: skip
def test_what_is_found(all_: Everything, tensors: Any, parted: tuple[str, ...], sentences: list[Any]) -> None:
    assert told(all_, tensors, parted) == sentences


@pytest.mark.parametrize(
    ("why", "where"), [(UNEXPLAINED, "; the forward pass parts first on rank 1: it does"), ("2 x", "")]
)
def test_a_gradient_without_a_reason_is_followed_back_and_the_loss_of_its_step_told(
    why: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlab.tools.prove.verdict.reason", lambda *_: why)
    all_ = brought(mine(off(0, GRADIENTS, "a.w", 0), shares=(3.0, -8.0)), mine(shares=(None, None)))
    assert told(all_, [SLOW, None], ["", "it does"]) == [
        ("gradients", f"gradients of a.w on rank 0 are {why} (step 0, alone, on rank 0){where}", [0]),
        ("losses", f"{LOSS_OFF}; the forward pass parts first on rank 1: it does", [1]),
    ]


def test_that_nothing_is_dropped_is_said_where_any_rank_draws() -> None:
    drawing = mine(drawn=[Draw("drop", 0, 1, 1)])
    assert [each[:2] for each in told(brought(mine(), drawing))] == [("said", "dropout")]
    names = [each.name for each in written(brought(mine(), drawing), defaultdict(list), [], 1.0)]
    assert names[2:] == ["ranks begin with the model", "all is trained", "dropout by axis"]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (LocatedTensor(WHOLE, t(1.0, 2.0)), "have not moved"),
        (SLOW, "moved 0.5 x as far as one process's"),  # by 0.25 of 0.5, and by 0.5 of 1
        (LocatedTensor(WHOLE, t(0.75, 1.0)), "differ by 5 after a step of plain SGD at 0.01"),
        (LocatedTensor(Rows(0, [1]), t(1.5)), "moved 0.5 x"),
        (LocatedTensor(WHOLE, None), "are missing"),
    ],
)
def test_how_weights_are_off(tensor: LocatedTensor, words: str) -> None:
    assert update(brought(mine(), mine(MOVED)), MOVED, [None, tensor]).startswith(words)


def clipped(*factors: tuple[str, float | None], rank: int = 1) -> list[Deviation]:
    return [off(0, GRADIENTS, name, rank, times=times) for name, times in factors]


@pytest.mark.parametrize(
    ("clip", "offs", "words"),
    [
        # 2 x of all is a norm half as long as 13; by 0.5 twice as long.
        (6.5, clipped(("a.w", 2.0), ("b.w", 2.0)), "2 x one process's, as all of this rank's: the norm that clips them"
         " to 6.5 is 0.5 times as long as one process's 13"),
        (6.5, clipped(("a.w", 0.5), ("b.w", 0.5)), "0.5 x one process's, as all of this rank's: the norm that clips them"
         " to 6.5 is 2 times as long as one process's 13"),
        (26.0, clipped(("a.w", 0.5), ("b.w", 0.5)), "0.5 x one process's, as all of this rank's: the norm that clips"
         " them to 26 is 4 times as long as one process's 13"),  # clips where one process does not
        (6.5, clipped(("a.w", 0.5), ("b.w", 0.75)), ""),
        (6.5, clipped(("a.w", 0.5)), ""),  # one alone is no norm
        (6.5, clipped(("a.w", None), ("b.w", None)), ""),
        (None, clipped(("a.w", 2.0), ("b.w", 2.0)), ""),
    ],
)  # fmt: skip
def test_a_norm_that_clips_by_another_factor(clip: float | None, offs: list[Deviation], words: str) -> None:
    right = mine()._replace(offs=[])
    all_ = brought(right, right._replace(offs=offs), clip=clip)
    assert norm(all_, offs[0], offs) == words


def test_a_norm_of_a_ranks_own_part_and_another_on_each_rank() -> None:
    """Rank 1 has b.w, 12 of 13, whose norm clips it by 12 instead; rank 0 has a.w, 5 of 13."""
    zero, one = clipped(("a.w", 13 / 5), ("c.w", 13 / 5), rank=0), clipped(("b.w", 13 / 12), ("c.w", 13 / 12))
    dense = Dense(START, [STEPS[0]._replace(gradients={"a.w": t(1.5, 2.0), "b.w": t(6.0)})], ["b.w", "a.w"])
    ranks = [mine(rows={"a.w": WHOLE})._replace(offs=zero), mine(rows={"b.w": WHOLE})._replace(offs=one)]
    all_ = brought(*ranks, clip=6.5)._replace(dense=dense)
    assert (own_norm(all_, zero[0]), own_norm(all_, one[0])) == (2.5, 6.0)
    assert norm(all_, one[0], [*zero, *one]) == (
        "1.083 x one process's, as all of this rank's: the norm that clips them to 6.5 is 0.9231 times as long as one"
        " process's 13, another on each rank; it is that of this rank's own part alone: sum its square over the ranks"
        " that have the other parts"
    )

    far = clipped(("b.w", 1.01 * 13 / 12), ("c.w", 1.01 * 13 / 12))
    assert "own part" not in norm(all_, far[0], far)
    assert own_norm(all_._replace(ranks=[mine()]), zero[0]) == 6.5


BY_SHARD = (
    "rows 0 to 0 2.6 x, rows 1 to 1 1.083 x one process's: each rank's shard is clipped by its own norm (5, 12 where that"
    " of all is 13); sum the squares of the shards' norms over the ranks before the root"
)


@pytest.mark.parametrize(
    ("clip", "rows", "told"),
    [
        (6.5, (3 * 13 / 5, 4 * 13 / 12), BY_SHARD),  # 5 and 12 are sides of 13
        (None, (3 * 13 / 5, 4 * 13 / 12), ""), (6.5, (6.0, 8.0), ""), (6.5, (-6.0, 8.0), ""),
        (6.5, (6.0, 4.0), ""),  # 6.5 and 13 are sides of more
    ],
)  # fmt: skip
def test_shards_that_are_clipped_by_norms_of_their_own(clip: float | None, rows: tuple[float, ...], told: str) -> None:
    found = LocatedTensor(WHOLE, t(*rows))
    assert norm_by_shard(brought(mine(), mine(), clip=clip), off(0, GRADIENTS, "a.w", 1), found) == told


@pytest.mark.parametrize(("clip", "share"), [(None, 1.0), (26.0, 1.0), (6.5, 0.5)])
def test_what_samples_give_is_clipped_as_one_process_clips_it(
    clip: float | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("distlab.tools.prove.verdict.contributions", lambda *_: {("a.w", 0, 0): t(3.0, 4.0)})
    monkeypatch.setattr(
        "distlab.tools.prove.verdict.why", lambda _scene, _found, wanted, parts: seen.append((wanted, parts))
    )
    dealing: Any = SimpleNamespace(num_shards=0)
    reason(brought(mine(), clip=clip)._replace(dealing=dealing), off(0, GRADIENTS, "a.w", 0), [])
    ((wanted, parts),) = seen
    assert wanted.tolist() == [3.0, 4.0]
    assert parts[("a.w", 0, 0)].tolist() == [3.0 * share, 4.0 * share]


def test_checks_have_the_worst_for_what_is_allowed() -> None:
    worst = off(1, GRADIENTS, "a.w", 0, by=6.0, allowed=2.0)
    all_ = brought(mine(worst, off(0, GRADIENTS, "b.w", 0, by=9.0, allowed=9.0), off(0, WEIGHTS, "a.w", 0, by=0.5)))
    found = list(written(all_, {GRADIENTS: ["g"], WEIGHTS: [], LOSSES: ["l"], "ranks begin with the model": ["x", "y"],
                                "all is trained": []}, [0.25, 0.75, 0.5], 0.125))  # fmt: skip
    assert [(each.name, each.max_abs_diff, each.tolerance, each.detail, each.unit) for each in found] == [
        ("losses", 0.75, 0.125, "l", ""), ("gradients", 6.0, 2.0, "g", ""), ("weights", 0.5, 1.0, "", ""),
        ("ranks begin with the model", 2, 0, "x; y", "findings"), ("all is trained", 0, 0, "", "findings"),
    ]  # fmt: skip


def test_records_go_with_the_sentences() -> None:
    said: list[Any] = []
    all_ = brought(mine(shares=(None, None)))
    tell(all_, None, (), (), lambda kind, *of: said.append((kind, *of)))
    checks = [from_line(each[1]) for each in said if each[0] == "record"]
    assert [each.name for each in checks if isinstance(each, Check)] == [
        "gradients", "weights", "ranks begin with the model", "all is trained",
    ]  # fmt: skip
    assert said[-1] == ("said", "losses", "not compared: train_step returned none on any rank")


def test_by_module_what_is_off_in_the_first_step_that_is() -> None:
    offs = [
        off(1, GRADIENTS, "a.w", 1, times=2.0), off(1, GRADIENTS, "a.w", 0, by=7.0, times=0.25),
        off(1, GRADIENTS, "c.w", 0, by=0.5, times=1.0), off(0, GRADIENTS, "b.w", 0, by=0.0),
    ]  # fmt: skip
    table = modules(brought(mine()._replace(offs=offs)), offs[0])
    assert table.title == "Gradients of step 1 by module, in the order of the backward pass"
    assert table.rows == [
        ["c", "right", "", "", "", "0.5"],
        ["a", "wrong", "w", "ranks 0 and 1", "0.25, 2", "7"],
    ]
    deep = brought(mine()._replace(offs=[off(1, GRADIENTS, "deep.er.w", 0)]))._replace(canonical={"deep.er.w": "a.w"})
    assert modules(deep, offs[0]).rows[0][:3] == ["deep.er", "wrong", "w"]
    unlike = modules(brought(mine()._replace(offs=[offs[1], off(1, GRADIENTS, "a.w", 1)])), offs[0])
    assert unlike.rows == [["a", "wrong", "w", "ranks 0 and 1", "", "7"]]


def test_a_loss_of_more_ranks_than_are_shown() -> None:
    all_ = brought(*(mine(shares=(0.0, float(rank))) for rank in range(9)))
    assert loss_sentence(all_, 1).startswith(
        "the loss of step 1 is -8 in one process, and the ranks returned 0, 1, 2, 3, 4, 5, 6, 7: these"
    )
    assert UNEXPLAINED not in loss_sentence(all_, 1)
