"""Each decision of a comparison with one process: which tensors differ by how much, and which ranks may draw equally."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.workload.reference import Snapshot
from distlab.tools.prove import compare
from distlab.tools.prove.compare import (
    GRADIENTS,
    WEIGHTS,
    Deviation,
    Draw,
    Draws,
    Passes,
    Step,
    compared,
    difference_and_factor,
    differs,
    how_wrong,
    tolerance,
    untrained,
    wrong_draws,
)
from distlab.tools.prove.locate import WHOLE, LocatedTensor, Rows
from distlab.tools.prove.reference import Dense
from distlab.tools.prove.verdict import Grid

pytestmark = pytest.mark.timeout(60)


def t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# One process has [w] of two rows and [b]; this rank has the second row of [w], and [b].
STEPS = [
    Snapshot(1.0, {"w": t(4.0, -8.0), "b": t(0.5)}, {"w": t(100.0, 1.0), "b": t(3.0)}, {}, 2.0),
    Snapshot(1.0, {"w": t(3.0, 16.0), "b": t(0.0)}, {"w": t(-200.0, 1.0), "b": t(2.0)}, {}, 5.0),
]
NAMES = {"mine.w": "w", "mine.b": "b"}
SECOND = Rows(0, [1])
MINE = [
    Step(1.0, {"mine.w": LocatedTensor(SECOND, t(-7.0)), "mine.b": LocatedTensor(WHOLE, t(0.5))},
         {"mine.w": LocatedTensor(SECOND, t(1.25)), "mine.b": LocatedTensor(WHOLE, t(3.0))}),
    Step(1.0, {"mine.w": LocatedTensor(SECOND, t(16.0)), "mine.b": LocatedTensor(WHOLE, None)},
         {"mine.w": LocatedTensor(SECOND, t(3.0)), "mine.b": LocatedTensor(WHOLE, t(math.nan))}),
]  # fmt: skip


@pytest.mark.parametrize("clip", [None, 10.0])
def test_each_tensor_of_each_step_is_compared_with_one_process(clip: float | None) -> None:
    """1e-11 of the largest of its kind; with clipping plus 1e-6 / norm of it; for weights times the learning rate."""
    rate = 0.01 if clip else 1.0

    def bound(largest: float, norm: float, rate: float) -> Any:
        return pytest.approx((1e-11 * largest + (1e-6 / norm * largest if clip else 0.0)) * rate, rel=1e-9, abs=0.0)

    assert compared(3, MINE, Dense({}, STEPS, []), NAMES, clip) == [
        (0, GRADIENTS, "mine.w", 3, 1.0, bound(8.0, 2.0, 1.0), 0.875),
        (0, GRADIENTS, "mine.b", 3, 0.0, bound(8.0, 2.0, 1.0), 1.0),
        (0, WEIGHTS, "mine.w", 3, 0.25, bound(100.0, 2.0, rate), 1.25),
        (0, WEIGHTS, "mine.b", 3, 0.0, bound(100.0, 2.0, rate), 1.0),
        (1, GRADIENTS, "mine.w", 3, 0.0, bound(16.0, 5.0, 1.0), 1.0),
        (1, GRADIENTS, "mine.b", 3, 0.0, bound(16.0, 5.0, 1.0), None),
        (1, WEIGHTS, "mine.w", 3, 2.0, bound(200.0, 5.0, rate), 3.0),
        (1, WEIGHTS, "mine.b", 3, math.inf, bound(200.0, 5.0, rate), None),
    ]


@pytest.mark.parametrize(
    ("wanted", "norm", "clip", "allowed"),
    [
        ([t(-4.0, 2.0), t(3.0)], 2.0, None, 4e-11), ([t(0.25)], 2.0, None, 1e-11), ([], 2.0, None, 1e-11),
        ([torch.zeros(0), t(5.0)], 2.0, None, 5e-11), ([t(-4.0)], 8.0, 1.0, 4e-11 + 1e-6 / 8 * 4),
        ([t(4.0)], 0.0, 1.0, 4e-11 + 4.0),  # a norm below the epsilon counts as the epsilon
    ],
)  # fmt: skip
def test_tolerance_of_rounding_and_of_a_clips_epsilon(
    wanted: list[Tensor], norm: float, clip: float | None, allowed: float
) -> None:
    assert tolerance(wanted, Snapshot(0.0, {}, {}, {}, norm), clip) == pytest.approx(allowed, rel=1e-9, abs=0.0)


@pytest.mark.parametrize(("off", "wrong"), [(0.0, False), (2.0, False), (2.0000001, True), (math.inf, True)])
def test_a_difference_over_the_tolerance_is_wrong(off: float, wrong: bool) -> None:
    assert Deviation(0, GRADIENTS, "w", 0, off, 2.0, None).is_wrong is wrong


@pytest.mark.parametrize(
    ("found", "dense", "off"),
    [
        (LocatedTensor(WHOLE, t(2.0, 4.0)), t(1.0, 2.0), (2.0, 2.0)),
        (LocatedTensor(SECOND, t(2.0)), t(1.0, 2.0), (0.0, 1.0)),
        (LocatedTensor(WHOLE, None), t(0.0, 2.0), (math.inf, None)),
        (LocatedTensor(WHOLE, None), t(0.0, 0.0), (0.0, None)),
        (LocatedTensor(SECOND, None), t(1.0, 0.0), (0.0, None)),  # this rank's row of it is zero
        (LocatedTensor(WHOLE, t(0.0, 0.0)), None, (0.0, None)),
        (LocatedTensor(WHOLE, t(0.0, 1.0)), None, (math.inf, None)),
        (LocatedTensor(WHOLE, None), None, (0.0, None)),
        (LocatedTensor(WHOLE, t(math.nan, 2.0)), t(1.0, 2.0), (math.inf, None)),
        (LocatedTensor(WHOLE, t(1.0)), t(1.0, 2.0), (math.inf, None)),
    ],
)
def test_a_missing_gradient_is_infinitely_wrong_unless_it_is_zero(
    found: LocatedTensor, dense: Tensor | None, off: tuple[float, float | None]
) -> None:
    assert difference_and_factor(found, dense) == off


UNTRAINED: list[tuple[list[dict[str, Rows]], list[tuple[str, list[int]]]]] = [
    ([{"a": Rows(0, [0, 1]), "b": WHOLE}, {"a": Rows(0, [3, 2])}], []),
    ([{"a": Rows(0, [0, 1])}, {"a": Rows(0, [3])}], [("b", []), ("a", [2])]),
    ([{"a": Rows(1, [1]), "b": WHOLE}], [("a", [0])]),
    ([{"a": Rows(0, [1]), "b": WHOLE}, {"a": WHOLE}], []),
    ([{"a": Rows(0, [0, 1]), "b": WHOLE}, {"tied": Rows(0, [2, 3])}], []),
    ([{"b": WHOLE}], [("a", [])]),
]


@pytest.mark.parametrize(("rows", "missing"), UNTRAINED)
def test_rows_that_no_rank_has_are_missing(rows: list[dict[str, Rows]], missing: list[tuple[str, list[int]]]) -> None:
    dense = Dense({"a": torch.zeros(4, 2), "b": torch.zeros(3)}, [], [])
    assert untrained(rows, {"a": "a", "b": "b", "tied": "a"}, dense) == missing


# Which ranks draw equally: 0 1 and 2 3 are neighbours along tp, 0 2 and 1 3 along dp.

SAME_DRAW = "they draw the same random numbers for different samples; give each its own seed"
DIVERGE = "they draw different random numbers for the same activations, so they diverge; give them one seed"
EQUAL = "they draw the same random numbers for different parts of the activations; give each its own seed"


def draws(*of_ranks: tuple[int, int]) -> list[list[Draw]]:
    """Return the draws of two dropouts, one of them called twice; its second call has these (state, input_hash)."""
    return [
        [Draw("first", 0, rank // 2, rank // 2), Draw("twice", 0, rank // 2, rank // 2), Draw("twice", 1, *own)]
        for rank, own in enumerate(of_ranks)
    ]


@pytest.mark.parametrize(
    ("by_rank", "faults"),
    [
        (draws((5, 6), (5, 6), (7, 8), (7, 8)), []),
        (draws((5, 6), (9, 9), (7, 8), (7, 8)), []),  # other draws for other parts
        (draws((5, 6), (5, 9), (7, 8), (7, 8)), [(f"dropout twice on ranks 0 and 1, neighbours along tp: {EQUAL}", [0, 1])]),
        (draws((5, 6), (5, 6), (7, 8), (9, 8)), [(f"dropout twice on ranks 2 and 3, neighbours along tp: {DIVERGE}", [2, 3])]),
        (draws((5, 6), (7, 6), (5, 8), (9, 9)),
         [(f"dropout twice on ranks 0 and 1, neighbours along tp: {DIVERGE}", [0, 1]),
          (f"dropout twice on ranks 0 and 2, neighbours along dp: {SAME_DRAW}", [0, 2])]),
        ([draws((5, 6))[0], [], [], []], []),  # modules that the other ranks do not have
        ([draws((5, 6))[0], [], draws((5, 6))[0], []],
         [(f"dropout first and 1 more on ranks 0 and 2, neighbours along dp: {SAME_DRAW}", [0, 2])]),
    ],
)  # fmt: skip
def test_ranks_that_draw_equally_or_differently_by_mistake(
    by_rank: list[list[Draw]], faults: list[tuple[str, list[int]]]
) -> None:
    assert sorted(wrong_draws(by_rank, Grid({"dp": 2, "tp": 2}).neighbours)) == sorted(faults)


class Dropping(nn.Module):
    """Draws twice in a module, once outside any, and in an attention; not in evaluation, and not if p is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Dropout(0.25))

    def forward(self, x: Tensor) -> Tensor:
        query = x.view(1, 1, 2, 2)
        twice = self.outer(self.outer(x) + 1)
        F.dropout(x, 0.25, training=False)
        F.dropout(x, 0.0)
        F.scaled_dot_product_attention(query, query, query)
        attended = F.scaled_dot_product_attention(query, query, query, dropout_p=0.25)
        return F.dropout(input=twice, p=0.5) + attended.flatten()


def test_nothing_is_dropped_and_each_draw_is_recorded() -> None:
    functions = F.dropout, F.scaled_dot_product_attention
    model, seen, x = Dropping(), Draws(), t(1.0, 2.0, 3.0, 4.0)
    query = x.view(1, 1, 2, 2)
    wanted = x + 1 + F.scaled_dot_product_attention(query, query, query).flatten()
    with seen.installed():
        seen.watch(model)
        torch.manual_seed(1)
        assert torch.equal(model(x), wanted)
        first = seen.drawn
        torch.manual_seed(2)
        model(x)
    assert (F.dropout, F.scaled_dot_product_attention) == functions
    assert [(each.module, each.turn) for each in first[:4]] == [
        ("outer.0", 0), ("outer.0", 1), ("the model", 0), ("the model", 1),
    ]  # fmt: skip
    assert len({each.state for each in first}) == 8, "each draw advances the generator"
    assert [each.input_hash for each in first[:4]] == [each.input_hash for each in first[4:]]
    assert first[0].input_hash != first[1].input_hash


# The first module of a forward pass that differs.


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        (t(1.0, -100.0), t(1.0, -100.0), False), (t(1.00005, -100.0), t(1.0, -100.0), False),
        (t(1.0003, -100.0), t(1.0, -100.0), True), (t(1.0, -100.0003), t(1.0, -100.0), True),
        (t(1.0), t(1.0, -100.0), False), (t(1.0, 2.0).view(2, 1), t(9.0, 9.0), False), (None, t(1.0), False),
        (t(1.0), None, False), (torch.tensor([1]), torch.tensor([2]), False), (t(1e-15), t(0.0), True),
    ],
)  # fmt: skip
def test_outputs_that_differ_by_more_than_rounding(one: Tensor | None, other: Tensor | None, parts: bool) -> None:
    """1e-6 of the largest, and of each number; tensors that cannot be compared do not differ."""
    assert differs(one, other) is parts


def linear() -> nn.Linear:
    """Return a layer with three inputs, two outputs and a bias."""
    made = nn.Linear(3, 2).double()
    made.bias.data = t(3.0, 5.0)
    return made


WANTED = t(2.0, 7.0)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (t(3.0, 5.0), "one process's plus 1 x down.bias"),
        (t(-1.5, -2.5), "one process's plus -0.5 x down.bias"),
        (WANTED * 2, "3 x one process's"),
        (t(-3.0, 0.25), "off by up to 3"),
    ],
)
def test_the_error_of_an_output_is_described(difference: Tensor, expected: str) -> None:
    assert how_wrong(difference, WANTED, linear(), "down") == expected


class File:
    """The needed part of a file: one process's model and its loss."""

    config: Any = type("Config", (), {"seed": 1})

    def model(self, _seed: int) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

    def loss(self, model: nn.Module, inputs: Tensor, _targets: None) -> None:
        model(inputs)


@pytest.mark.parametrize(
    ("biased", "expected"),
    [(None, ""), (0, "the output of 0 (Linear) is one process's plus 1 x 0.bias"),
     (2, "the output of 2 (Linear) is one process's plus 1 x 2.bias")],
)  # fmt: skip
def test_the_first_wrong_module_is_named(biased: int | None, expected: str) -> None:
    """The modules after it have other inputs; the first call of each module counts."""
    file: Any = File()
    model, mine, inputs = file.model(1), Passes(), torch.ones(3, 2)
    if biased is not None:
        model[biased].register_forward_hook(lambda layer, _, out: out + layer.bias)
    with mine.watched(model):
        model(inputs)
        model(2 * inputs)
    model(3 * inputs)
    assert list(mine.calls) == ["0", "1", "2"]
    microbatch: Any = type("First", (), {"inputs": inputs, "targets": None})
    assert compare.first_wrong_module(file, mine, microbatch) == expected
