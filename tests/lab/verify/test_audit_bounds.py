"""What an audited step, a curve and a number of steps are compared with: each formula and each bound, by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.contract import Held
from distlab.lab.config import Config
from distlab.lab.measure.tensors import Difference, Worst
from distlab.lab.report.progress import Work
from distlab.lab.verify.audit import (
    Audit,
    ReferenceRun,
    TimedPassChecks,
    adamw,
    allowed,
    check_equal_weights,
    gathered,
    one_process,
    sgd,
    stored_difference,
)  # fmt: skip
from distlab.lab.workload.reference import Losses
from distlab.techniques.collectives.sharded_tensor import LocalShard

pytestmark = pytest.mark.timeout(60)

# How far rounding alone may lead ranks from one process: how far a twin is off, and when nothing can be compared.

NAN = math.nan


@pytest.mark.parametrize(
    ("losses", "twin", "unit", "bounds"),
    [
        ([4.0, 3.0, 2.0], [4.0, 3.5, 2.0], 0.0, [0.0, 4.0, 4.0]),  # 8 x 0.5; who comes back by chance is not exact
        ([4.0, 3.0], [4.0, 2.75], 0.0, [0.0, 2.0]),
        ([4.0, -1.0], [4.0, -1.0], 0.25, [1.0, 1.0]),  # units of the largest loss so far
        ([-4.0, 8.0], [-4.0, 8.5], 0.25, [1.0, 6.0]),
        ([4.0, NAN, 1.0], [4.0, 1.0, 1.0], 0.25, [1.0]),  # from a loss that is no number on nothing is compared
        ([1.0, 1.0], [math.inf, 1.0], 0.25, []),
        ([], [], 0.25, []),
    ],
)
def test_what_is_allowed_never_shrinks(
    losses: list[float], twin: list[float], unit: float, bounds: list[float]
) -> None:
    assert allowed(losses, twin, unit) == bounds


@pytest.mark.parametrize(
    ("dtype", "eps", "world_size", "parts"),
    [(torch.float64, 2.0**-52, 2, 6), (torch.float32, 2.0**-23, 2, 6), (torch.bfloat16, 2.0**-23, 1, 3)],
)
def test_the_bound_is_8_times_the_twins_difference_and_a_unit_of_the_root_of_all_terms(
    dtype: torch.dtype, eps: float, world_size: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 5 samples of 20 terms, a root of 10; the twin adds up in as many parts as ranks and microbatches.
    Batches that go through the one process are counted, while the others wait."""
    calls, printed, work = list[tuple[int, int]](), list[str](), Work()

    def train(
        model: nn.Module, _batches: object, _config: object, steps: int, *, masters: bool, parts: int = 1
    ) -> Losses:
        calls.append((steps, parts))
        assert masters
        for _ in range(steps):
            model(torch.ones(1, dtype=dtype))
            printed.append(work.progress_text().partition(",")[0])
        return Losses([-4.0, 3.0], {"w": torch.tensor([3.0, 4.0 if parts == 1 else 4.5])})

    monkeypatch.setattr("distlab.lab.workload.reference.losses", train)
    lab: Any = SimpleNamespace(
        model=nn.Linear(1, 1).to, work=work, rank=0, world_size=world_size, at=lambda *_: None,
        config=SimpleNamespace(steps=2, proof=True, num_microbatches=3, seed=1),
        exchange=SimpleNamespace(everyone=lambda *_: [[], [-4.0, 3.5], []]),
    )  # fmt: skip
    batches: Any = SimpleNamespace(batch=5, samples=SimpleNamespace(terms=20))
    run = one_process(lab, batches, dtype, masters=True)
    assert run is not None
    assert calls[:2] == [(2, 1), (1, parts)]
    assert printed[:2] == [f" ({done} of 2 steps while the others wait)" for done in (1, 2)]
    assert (run.losses, run.gradients) == ([-4.0, 3.0], {"w": 5.0})
    assert run.rounding["w"] - 4.0 == pytest.approx(10 * eps * 5.0, rel=1e-3 if eps > 1e-9 else 0.1)
    assert run.allowed == pytest.approx([10 * eps * 4.0, 4.0 + 10 * eps * 4.0], rel=1e-12, abs=0.0)


# An update by its formula, compared with torch's optimizers, and what each wrong line of one is off by.

SIZE, STEPS = 301, 5
TYPES = (torch.float64, torch.float32, torch.bfloat16)


def config_of(**settings: str) -> Config:
    return Config.read({"LAB_LR": "0.05"} | settings)


def drawn(dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def torch_trained(dtype: torch.dtype, **options: float) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """torch's AdamW after `STEPS` updates: its state before the last one and after, and weights, gradient, result."""
    weight = nn.Parameter(drawn(dtype, 0))
    optimizer = torch.optim.AdamW([weight], **({"lr": 0.05} | options))  # type: ignore[arg-type]
    for step in range(STEPS):
        weight.grad = drawn(dtype, step + 1)
        before = {name: value.clone() for name, value in optimizer.state[weight].items()}
        start = weight.detach().clone()
        optimizer.step()
    after = {name: value.clone() for name, value in optimizer.state[weight].items()}
    return before, after, [start, drawn(dtype, STEPS), weight.detach().clone()]


def adamw_ratios(dtype: torch.dtype, **options: float) -> dict[str, float]:
    before, after, (weight, gradient, found) = torch_trained(dtype, **options)
    offs = adamw(weight, gradient, before, found, after, STEPS - 1, 0.0, config_of(LAB_OPTIMIZER="adamw"))
    return {name: each.share for name, each in offs.items()}


@pytest.mark.parametrize("dtype", TYPES)
def test_torchs_sgd_is_within_what_rounding_allows_and_another_rate_is_not(dtype: torch.dtype) -> None:
    weight, gradient = drawn(dtype, 0), drawn(dtype, 1)
    stepped = nn.Parameter(weight.clone())
    stepped.grad = gradient.clone()
    for rate, passes in ((0.05, True), (0.1, False), (0.0, False)):
        stepped.data.copy_(weight)
        torch.optim.SGD([stepped], lr=rate).step()
        assert (sgd(weight, gradient, stepped.detach(), 0.0, config_of())["weights"].share <= 1) == passes


@pytest.mark.parametrize("dtype", TYPES)
def test_torchs_adamw_is_within_what_rounding_allows(dtype: torch.dtype) -> None:
    assert max(adamw_ratios(dtype).values()) <= 1


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"weight_decay": 0.0}, {"eps": 1e-3}], ids=str)
def test_another_rate_no_decay_or_another_epsilon_is_off_in_the_weights(options: dict[str, float]) -> None:
    ratios = adamw_ratios(torch.float32, **options)
    assert ratios["weights"] > 10
    assert ratios["optimizer"] <= 1


def test_moments_of_another_gradient_and_an_optimizer_made_anew_are_seen() -> None:
    before, after, (weight, gradient, found) = torch_trained(torch.float32)
    config = config_of(LAB_OPTIMIZER="adamw")
    other = adamw(weight, gradient * 2, before, found, after, STEPS - 1, 0.0, config)
    assert other["optimizer"].share > 10
    assert adamw(weight, gradient, {}, found, after, STEPS - 1, 0.0, config) == {"optimizer": Difference(math.inf, 0.0)}
    lacking = {name: value for name, value in after.items() if name != "exp_avg_sq"}
    assert adamw(weight, gradient, before, found, lacking, STEPS - 1, 0.0, config) == {
        "optimizer": Difference(math.inf, 0.0)
    }


U64, U32, U16 = 2.0**-52, 2.0**-23, 2.0**-7  # units of float64, float32 and bfloat16


def bound(unit: float, exact: float, size: float, uncertain: float) -> float:
    """What may be off before it is rounded, 4 roundings of its size among it, and sqrt(unit x size x that)."""
    inexact = uncertain + 4 * exact * size
    return inexact + math.sqrt(unit * size * inexact)


@pytest.mark.parametrize(
    ("dtype", "unit", "exact", "uncertain"),
    [(torch.float64, U64, U64, 0.5), (torch.float32, U32, U32, 0.0), (torch.bfloat16, U16, U32, 0.25)],
)  # fmt: skip
def test_what_a_stored_tensor_may_be_off(dtype: torch.dtype, unit: float, exact: float, uncertain: float) -> None:
    wanted = torch.tensor([3.0, -4.0], dtype=dtype)
    off = stored_difference(torch.tensor([3.0, -2.0], dtype=dtype), wanted, uncertain)
    assert tuple(off) == (2.0, pytest.approx(bound(unit, exact, 5.0, uncertain), rel=1e-6), "")
    for other in (wanted[1:], wanted.double() if dtype != torch.float64 else wanted.float(), wanted.view(1, 2)):
        assert stored_difference(other, wanted, 1.0) == Difference(math.inf, 0.0)


def one(number: float) -> Tensor:
    return torch.tensor([number], dtype=torch.float64)


def test_an_sgd_step_may_be_off_by_its_rate_of_the_gradients_rounding() -> None:
    """3 - 0.05 x 20 = 2; 0.05 x 0.5 of rounding."""
    off = sgd(one(3.0), one(20.0), one(2.25), 0.5, config_of())["weights"]
    assert tuple(off) == (0.25, pytest.approx(bound(U64, U64, 2.0, 0.025)), "")


@pytest.mark.parametrize(
    ("moments", "difference", "allows"),
    [
        # 0.1 x -2 = -0.2, of 0.1 x 0.1; 0.001 x 4 = 0.004, of 0.001 x (2 x 2 x 0.1 + 0.1^2)
        ((0.3, 0.004), 0.5, bound(U64, U64, 0.2, 0.01)), ((-0.2, 0.104), 0.1, bound(U64, U64, 0.004, 0.00041)),
    ],
)  # fmt: skip
def test_moments_may_be_off_by_their_share_of_the_gradients_rounding(
    moments: tuple[float, float], difference: float, allows: float
) -> None:
    after = {"step": torch.tensor(1.0), "exp_avg": one(moments[0]), "exp_avg_sq": one(moments[1])}
    config = config_of(LAB_OPTIMIZER="adamw")
    offs = adamw(one(1.0), one(-2.0), {}, one(1.0), after, 0, 0.1, config)
    assert tuple(offs["optimizer"]) == (pytest.approx(difference), pytest.approx(allows), "")


def test_weights_may_be_off_by_the_roundings_of_what_they_moved() -> None:
    """1 x (1 - 0.05 x 0.01) - 0.05 x 0.1 / 0.1 / (sqrt(0.004) / sqrt(0.001) + 1e-8): 0.9995 - 0.025."""
    after = {"step": torch.tensor(1.0), "exp_avg": one(0.1), "exp_avg_sq": one(0.004)}
    offs = adamw(one(1.0), one(1.0), {}, one(1.0), after, 0, 0.1, config_of(LAB_OPTIMIZER="adamw"))
    off = offs["weights"]
    assert off.value == pytest.approx(0.0255, rel=1e-6)
    assert off.allowed == pytest.approx(bound(U64, U64, 0.9745, 4 * U64 * 0.0255), rel=1e-3, abs=0.0)


@pytest.mark.parametrize(("before", "after"), [(3.0, 5.0), (5.0, 5.0), (4.0, 4.0), (3.0, 6.0)])
def test_an_optimizer_that_counts_otherwise_is_another(before: float, after: float) -> None:
    state = {"exp_avg": one(0.0), "exp_avg_sq": one(0.0)}
    first, second = ({"step": torch.tensor(count)} | state for count in (before, after))
    assert adamw(one(1.0), one(1.0), first, one(1.0), second, 4, 0.0, config_of(LAB_OPTIMIZER="adamw")) == {
        "optimizer": Difference(math.inf, 0.0)
    }


# An audited step judged: of one process the norms of the first gradients, 3 and 4, and their rounding.

REFERENCE = ReferenceRun([9.0, 9.0, 9.0], [0.5, 1.0, 2.0], {"w": 3.0, "b": 4.0}, {"w": 0.1, "b": 0.2})
BEFORE = {"w": one(1.0), "b": one(2.0)}


def audited(step: int, loss: float, wanted: float, w: float, b: float, after: dict[str, Tensor]) -> Audit:
    """What is found of a step of SGD with the gradients `w` and `b`."""
    audit: Audit = object.__new__(Audit)
    lab: Any = SimpleNamespace(config=config_of())
    audit.lab, audit.references, audit.found, audit.not_finite = lab, {"flat": REFERENCE}, {"flat": Worst()}, {}
    gradients: Any = lambda *_: (wanted, {"w": one(w), "b": one(b)})  # noqa: E731
    audit._gradient = gradients  # type: ignore[method-assign]
    states = ({name: {"weights": weight} for name, weight in of.items()} for of in (BEFORE, after))
    audit._compare("flat", step, 7, loss, *states)
    return audit


@pytest.mark.parametrize(
    ("w", "b", "grown"),
    [(3.0, -4.0, (1.0, 1.0)), (0.3, 0.4, (1.0, 1.0)), (6.0, 8.0, (2.0, 2.0)), (9.0, 4.0, (3.0, math.sqrt(97) / 5))],
)
def test_a_step_is_bounded_by_the_rounding_of_its_own_gradient(w: float, b: float, grown: tuple[float, float]) -> None:
    """Which grows with the norm of all or of its own, and does not shrink; 1 and 2 were to lose a 20th of it."""
    for name, others, rounding in (("w", {"b": one(2.0 - b / 20)}, 0.1 * grown[0]),
                                   ("b", {"w": one(1.0 - w / 20)}, 0.2 * grown[1])):  # fmt: skip
        stayed = BEFORE[name].item()
        moved = stayed - {"w": w, "b": b}[name] / 20
        audit = audited(1, 8.25, 9.0, w, b, {name: one(moved - 0.5)} | others)
        assert audit.found["flat"].found == {
            "loss": Difference(0.75, 1.0, "step 1"),
            "weights": (
                pytest.approx(0.5),
                pytest.approx(bound(U64, U64, abs(moved), 0.05 * rounding)),
                f"step 1, {name}",
            ),
        }


def test_what_of_a_step_has_no_number_or_is_missing() -> None:
    right = {"w": one(1.0 - 3 / 20), "b": one(2.0 - 4 / 20)}
    late = audited(3, 8.0, 9.0, 3.0, 4.0, dict(right))
    assert (late.not_finite, list(late.found["flat"].found)) == ({"flat": {"loss"}}, ["weights"])
    for wanted, w in ((NAN, 3.0), (9.0, math.inf)):
        none = audited(1, 8.0, wanted, w, 4.0, dict(right))
        assert (none.not_finite, none.found["flat"].found) == ({"flat": {"loss", "weights", "optimizer"}}, {})
    for lacking in ({"w": right["w"]}, right | {"b": torch.zeros(2, dtype=torch.float64)}):
        assert audited(1, 9.0, 9.0, 3.0, 4.0, lacking).found["flat"].found["weights"] == (math.inf, 0.0, "step 1, b")


def test_a_gradient_is_computed_anew_for_other_weights_or_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is clipped as the run is."""
    calls: list[tuple[float, str, float]] = []

    def backward(model: nn.Linear, batch: str, clip: float) -> tuple[float, None]:
        calls.append((model.weight.item(), batch, clip))
        model.weight.grad = torch.ones(1, 1)
        return float(len(calls)), None

    monkeypatch.setattr("distlab.lab.workload.reference.backward", backward)
    monkeypatch.setattr(
        "distlab.lab.workload.reference.fill", lambda model, weights: model.weight.data.copy_(weights["w"])
    )
    audit: Audit = object.__new__(Audit)
    lab: Any = SimpleNamespace(
        model=lambda _: nn.Linear(1, 1, bias=False), config=SimpleNamespace(dtype="float32", clip=0.5)
    )
    audit.lab, audit._known, audit.batches = lab, None, SimpleNamespace(alone=str)  # type: ignore[assignment]
    losses = [audit._gradient({"w": {"weights": one(w)}}, step)[0] for w, step in
              ((3.0, 7), (3.0, 7), (4.0, 7), (4.0, 8), (3.0, 8))]  # fmt: skip
    assert losses == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert calls == [(3.0, "7", 0.5), (4.0, "7", 0.5), (4.0, "8", 0.5), (3.0, "8", 0.5)]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_gathered_is_on_rank_0_and_by_parameter(rank: int) -> None:
    state = {"weights": {"w": one(1.0), "b": one(2.0)}, "optimizer": {"step.w": one(3.0), "exp_avg.w": one(4.0)}}
    lab: Any = SimpleNamespace(rank=rank)
    strategy: Any = SimpleNamespace(full=lambda kind: iter(state[kind].items()))
    moments = {"step": one(3.0), "exp_avg": one(4.0)}
    wanted = {} if rank else {"w": {"weights": one(1.0)} | moments, "b": {"weights": one(2.0)}}
    assert gathered(lab, strategy) == wanted


# What decides, of made-up curves and numbers of steps.


def decided(**fields: Any) -> tuple[TimedPassChecks, list[Any]]:
    written: list[Any] = []

    def say(name: str, *values: Any, **words: Any) -> None:
        written.append((name, *values[:3], *(words[each] for each in ("shown",) if each in words)))

    checks: TimedPassChecks = object.__new__(TimedPassChecks)
    checks.lab = SimpleNamespace(check=say, compare=say, waive=say, mode=SimpleNamespace(by_torch={"ddp"}))  # type: ignore[assignment]
    checks.references = {"flat": Held(), "ddp": Held(), "odd": Held(why="it is odd")}
    checks.masters = {"flat": False, "ddp": False}
    checks.single_process = {False: fields.pop("reference", ReferenceRun([9.0, 8.0, 7.0], [0.5, 0.5, 2.0], {}, {}))}
    checks.starts, checks.ends = dict.fromkeys(checks.references, 1), dict.fromkeys(checks.references, 3)
    checks.audit = SimpleNamespace(steps={"flat": [0, 1, 2]}, done={"flat": [1, 2]})  # type: ignore[assignment]
    for name, value in fields.items():
        setattr(checks, name, value)
    return checks, written


@pytest.mark.parametrize(
    ("name", "curve", "written"),
    [
        ("flat", [9.0, 7.75, 6.0], ("timed losses", 1.0, 2.0, "flat")),  # 0.25 of 0.5 is as large a share, and less
        ("flat", [8.5, 8.0, 6.0], ("timed losses", 0.5, 0.5, "flat")),
        ("flat", [None, 8.25, 5.0], ("timed losses", 2.0, 2.0, "flat")),
        ("flat", [0.0, 8.0, 7.0], ("timed losses", 9.0, 0.5, "flat")),
        ("flat", [None, None, None], ("timed losses", "no loss is finite, neither here nor in one process", "flat")),
        ("flat", [9.0, 8.0], None),
        ("ddp", [1.0, 1.0, 3.0], ("last timed loss", 7.0, 3.0, "", "PyTorch's own")),
        ("odd", [1.0, 1.0, 3.0], ("last timed loss", 7.0, 3.0, "", "it is odd")),
        ("odd", [1.0, 1.0, None], None),
    ],
)
def test_a_curve_is_compared_step_by_step(name: str, curve: list[float | None], written: Any) -> None:
    checks, found = decided()
    checks._losses(name, curve)
    assert found == ([written] if written else [])


def test_a_run_that_ends_before_the_one_process_is_compared_up_to_its_end() -> None:
    checks, found = decided(ends={"flat": 2})
    checks._losses("flat", [9.0, 8.25])
    assert found == [("timed losses", 0.25, 0.5, "flat")]


@pytest.mark.parametrize(
    ("done", "audited_steps", "missing"),
    [(2, [1, 2], 0), (1, [1, 2], 1), (4, [1, 2], 2), (2, [1], 1), (2, [1, 2, 5], 1), (2, [0, 2], 2)],
)  # fmt: skip
def test_steps_that_were_not_done_or_audited_are_missing(done: int, audited_steps: list[int], missing: int) -> None:
    """Steps 1 and 2 are to be done here, and 0 was before; audited are 0 to 2."""
    checks, found = decided(audit=SimpleNamespace(steps={"flat": [0, 1, 2]}, done={"flat": audited_steps}))
    checks._count("flat", done)
    assert found == [("timed steps", missing, 0)]


# Which weights of a rank are compared with those of others.


def differing(first: float, second: float, offset: int = 0) -> float:
    """What the check finds of two replicas of a slice whose last number is `first` here and `second` there."""
    found: dict[str, float] = {}
    summed: list[dict[str, str]] = []

    def gather(_: str, mine: dict[str, str]) -> list[dict[str, str]]:
        summed.append(mine)
        return summed

    def check(name: str, difference: float, *_: Any, **__: Any) -> None:
        found[name] = difference

    lab: Any = SimpleNamespace(
        config=SimpleNamespace(steps=1), mode=SimpleNamespace(unsaved=""), at=lambda *_: None,
        exchange=SimpleNamespace(gather=gather), check=check,
    )  # fmt: skip
    for value, begin in ((first, 0), (second, offset)):
        box = torch.tensor([1.0, value])
        state = {"weights.w": LocalShard(torch.Size([4]), [((begin,), box)]), "optimizer.step.w": torch.tensor(value)}
        check_equal_weights(lab, "1f1b", SimpleNamespace(state_dict=lambda state=state: state))
    return found["timed replicas"]


def test_replicas_of_a_slice_must_be_equal_and_other_parts_are_not_compared() -> None:
    assert (differing(2.0, 2.0), differing(2.0, 3.0), differing(2.0, 3.0, offset=2)) == (0, 1, 0)
