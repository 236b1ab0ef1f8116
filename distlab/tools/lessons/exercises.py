"""Three exercises: a file with gaps that one fills in, run on real ranks, and what is said of a wrong answer.

Each function of an exercise is called on ranks of its own with the lesson's numbers and with others, so that nobody
passes by writing down the result.
"""

import importlib.util
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TOLERANCE = 1e-6  # of float32, relative
FOLDER = Path("exercises")
TIMEOUT_S = 10.0

AVERAGE = '''"""Exercise 1: two workers, two parameters, and one gradient for both.

Each worker has computed a gradient of its own. All of them have to take the same step, so they need the mean of their
gradients. dist.all_reduce(tensor) adds up a tensor over all workers, in place, on each of them.
"""

import torch
import torch.distributed as dist


def averaged(gradient: torch.Tensor, num_workers: int) -> torch.Tensor:
    """The mean over all workers of `gradient` [P], the same on each of them."""
    total = gradient.clone()
    ...  # 1. add up `total` over all workers
    return ...  # 2. what makes a mean of the sum?
'''

ACCUMULATE = '''"""Exercise 2: a batch that does not fit, in microbatches; and what it asks of the learning rate."""


def accumulation_steps(microbatch: int, batch: int) -> int:
    """How many microbatches of `microbatch` samples make a batch of `batch` samples."""
    return ...


def accumulated(gradients: list[float]) -> tuple[float, float]:
    """The sum of the microbatches' gradients, and their mean, by which one steps."""
    total = 0.0
    for gradient in gradients:
        total += ...
    return total, ...


def scaled_rate(base_rate: float, base_batch: int, batch: int) -> float:
    """The learning rate for `batch` samples by the linear scaling rule, where `base_rate` is right for `base_batch`."""
    return ...
'''

STEP = '''"""The mini-challenge: one step of synchronous data parallelism on three workers, from scratch."""

import torch
import torch.distributed as dist


def step(
    weights: torch.Tensor, gradient: torch.Tensor, learning_rate: float, num_workers: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over all workers of `gradient` [P], and the new weights [P]; both the same on each of them."""
    ...
'''


@dataclass(frozen=True)
class Case:
    """One call of a function on `len(of_rank)` ranks: the arguments of each, and what each has to return."""

    function: str
    of_rank: Sequence[tuple[Any, ...]]
    wanted: tuple[Any, ...]
    known: tuple[tuple[tuple[Any, ...], str], ...] = ()  # wrong results that many find, and what is said of each


@dataclass(frozen=True)
class Exercise:
    """Its file, and the calls that it is tried by."""

    text: str
    cases: tuple[Case, ...]


def _average(*gradients: list[float]) -> Case:
    num_workers, columns = len(gradients), list(zip(*gradients, strict=True))
    total = [sum(column) for column in columns]
    tensors = [torch.tensor(gradient) for gradient in gradients]
    mean = torch.tensor(total) / num_workers
    known = (
        ((torch.tensor(total),), f"that is the sum: divide it by the {num_workers} workers"),
        ((tensors[0],), "that is rank 0's own gradient: nothing was added up over the workers"),
        ((tensors[0] / num_workers,), "that is rank 0's own gradient, divided: nothing was added up over the workers"),
        ((torch.tensor(total) / len(total),), "that is the sum by the number of parameters: the workers count"),
    )
    return Case("averaged", [(tensor, num_workers) for tensor in tensors], (mean,), known)


def _step(weights: list[float], rate: float, *gradients: list[float]) -> Case:
    (mean,) = _average(*gradients).wanted
    before, total, num_workers = torch.tensor(weights), mean * len(gradients), len(gradients)
    known = (
        ((total, before - rate * total), f"the gradient is the sum: divide it by the {num_workers} workers"),
        ((mean, before + rate * mean), "the step goes uphill: weights - learning_rate * gradient"),
        ((mean, before - mean), "the learning rate is missing in the step"),
        ((mean, before), "the weights have not moved"),
    )
    calls = [(before.clone(), torch.tensor(gradient), rate, num_workers) for gradient in gradients]
    return Case("step", calls, (mean, before - rate * mean), known)


STEPS_OF_4 = (
    Case("accumulation_steps", [(4, 16)], (4,), (((64,), "16 samples are the whole batch: divide, do not multiply"),)),
    Case("accumulation_steps", [(5, 35)], (7,)),
)
SUMS = (
    Case(
        "accumulated", [([2.0, 4.0, 6.0, 8.0],)], (20.0, 5.0),
        (((20.0, 20.0), "the second one is the sum again: divide it by the 4 microbatches"),),
    ),
    Case(
        "accumulated", [([1.0, 3.0, 5.0],)], (9.0, 3.0),
        (((9.0, 2.25), "4 is the lesson's number of microbatches: here there are 3"),),
    ),
)  # fmt: skip
RATES = (
    Case(
        "scaled_rate", [(0.1, 4, 16)], (0.4,),
        (
            ((0.1,), "the batch is 4 times as large, and the rate is not"),
            ((0.2,), "that is the square root rule: the linear one multiplies by 4"),
        ),
    ),
    Case("scaled_rate", [(0.3, 32, 80)], (0.75,)),
)  # fmt: skip
EXERCISES = {
    "exercise-1": Exercise(
        AVERAGE,
        (
            _average([4.0, 10.0], [6.0, 2.0]),
            _average([1.0, -2.0, 7.0, 0.5], [3.0, 0.5, 1.0, -1.0], [8.0, 4.0, 1.0, 2.0]),
        ),
    ),
    "exercise-2": Exercise(ACCUMULATE, (*STEPS_OF_4, *SUMS, *RATES)),
    "mini-challenge": Exercise(
        STEP,
        (
            _step([0.5, 0.5], 0.1, [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]),
            _step([1.0, 0.0, -1.0], 0.5, [2.0, 1.0, 0.0], [0.0, -5.0, 4.0]),
        ),
    ),
}

Call = Callable[..., list[Any]]  # (world_size, function, *args, timeout_s=): what ranks return


def place_of(name: str) -> Path:
    """Where the file of an exercise lies."""
    return FOLDER / f"{name.replace('-', '_')}.py"


def tried(name: str, file: Path, on_ranks: Call) -> list[str]:
    """What is said of a file that was filled in: a sentence for the first wrong call; nothing where all is right."""
    for case in EXERCISES[name].cases:
        arguments = (str(file.resolve()), case.function, list(case.of_rank))
        answers = on_ranks(len(case.of_rank), called, *arguments, timeout_s=TIMEOUT_S)
        for rank, (kind, answer) in enumerate(answers):
            if said := judged(case, kind, answer):
                given = ", ".join(map(shown, case.of_rank[rank]))
                return [f"rank {rank} of {len(answers)}: {case.function}({given}) {said}"]
    return []


def called(group: dist.ProcessGroup, file: str, function: str, of_rank: list[tuple[Any, ...]]) -> tuple[str, Any]:
    """On a rank: what the function returns, or how it failed. all_reduce without a group is that of these ranks."""
    place = Path(file)
    try:
        spec = importlib.util.spec_from_file_location(place.stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        default, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
        try:
            spec.loader.exec_module(module)
            return "returned", getattr(module, function)(*of_rank[group.rank()])
        finally:
            dist.GroupMember.WORLD = default
    except Exception as error:  # whatever somebody's file raises
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if Path(each.filename) == place]
        where = f" in line {lines[-1]}" if lines else ""
        return "raised", f"{type(error).__name__}: {error}{where}"


def judged(case: Case, kind: str, answer: Any) -> str:
    """What is wrong with one answer; nothing where it is right."""
    if kind == "raised":
        gap = " (a gap `...` is still to be filled in)" if "ellipsis" in answer.lower() else ""
        return f"raised {answer}{gap}"
    found = answer if isinstance(answer, tuple) else (answer,)
    if answer is None or any(each is ... for each in found):
        return "has a gap `...` that is still to be filled in"
    if alike(found, case.wanted):
        return ""
    hint = next((words for wrong, words in case.known if alike(found, wrong)), "")
    wanted, got = (", ".join(map(shown, values)) for values in (case.wanted, found))
    return f"returned {got}, expected {wanted}" + (f": {hint}" if hint else "")


def alike(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether all values are the same within the rounding of float32."""
    if len(found) != len(wanted):
        return False
    return all(_same(one, other) for one, other in zip(found, wanted, strict=True))


def _same(one: Any, other: Any) -> bool:
    try:
        first, second = (torch.as_tensor(each, dtype=torch.float64) for each in (one, other))
    except (TypeError, ValueError, RuntimeError):
        return False
    return first.shape == second.shape and bool(torch.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE))


def shown(value: Any) -> str:
    """A value in a sentence."""
    if isinstance(value, torch.Tensor):
        return str([float(f"{number:.6g}") for number in value.flatten().tolist()])
    return f"{value:.6g}" if isinstance(value, float) else str(value)
