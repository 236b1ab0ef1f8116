"""The lesson's exercises: an answer that is right passes on real ranks, and each of the usual wrong ones is told why."""

from pathlib import Path

import pytest

from distlab.tools.lessons.exercises import EXERCISES, Case, judged, tried
from distlab.tools.testing.warm_ranks import Ranks

AVERAGE = "import torch.distributed as dist\n\ndef averaged(gradient, num_workers):\n    total = gradient.clone()\n"
SUMMED = "    dist.all_reduce(total)\n"
ACCUMULATE = """\
def accumulation_steps(microbatch, batch):
    return batch // microbatch


def accumulated(gradients):
    return sum(gradients), sum(gradients) / len(gradients)


def scaled_rate(base_rate, base_batch, batch):
    return base_rate * batch / base_batch
"""
STEP = """\
import torch.distributed as dist


def step(weights, gradient, learning_rate, num_workers):
    mean = gradient.clone()
    dist.all_reduce(mean)
    mean /= num_workers
    return mean, weights - learning_rate * mean
"""
RIGHT = {
    "exercise-1": f"{AVERAGE}{SUMMED}    return total / num_workers\n",
    "exercise-2": ACCUMULATE,
    "mini-challenge": STEP,
}
WRONG = [
    ("exercise-1", f"{AVERAGE}{SUMMED}    return total\n", "that is the sum: divide it by the 2 workers"),
    ("exercise-1", f"{AVERAGE}    return total / num_workers\n", "own gradient, divided: nothing was added up over"),
    ("exercise-1", f"{AVERAGE}    return total\n", "rank 0's own gradient: nothing was added up over the workers"),
    ("exercise-1", f"{AVERAGE}{SUMMED}    return total / len(total)\n", "that is the sum by the number of parameters"),
    ("exercise-1", f"{AVERAGE}{SUMMED}    return ...\n", "has a gap `...` that is still to be filled in"),
    (
        "exercise-1",
        f"{AVERAGE}    dist.all_reduce(gradients)\n",
        "raised NameError: name 'gradients' is not defined in line 5",
    ),
    ("exercise-2", ACCUMULATE.replace("batch // microbatch", "batch * microbatch"), "divide, do not multiply"),
    ("exercise-2", ACCUMULATE.replace("/ len(gradients)", "/ 4"), "here there are 3"),
    (
        "exercise-2",
        ACCUMULATE.replace(", sum(gradients) / len(gradients)", ", sum(gradients)"),
        "by the 4 microbatches",
    ),
    ("exercise-2", ACCUMULATE.replace("batch / base_batch", "(batch / base_batch) ** 0.5"), "the square root rule"),
    ("exercise-2", ACCUMULATE.replace(" * batch / base_batch", ""), "4 times as large, and the rate is not"),
    ("mini-challenge", STEP.replace("    mean /= num_workers\n", ""), "the gradient is the sum"),
    ("mini-challenge", STEP.replace("weights - ", "weights + "), "the step goes uphill"),
    ("mini-challenge", STEP.replace("learning_rate * mean", "mean"), "the learning rate is missing"),
]


def said(ranks: Ranks, folder: Path, name: str, text: str) -> str:
    file = folder / "filled_in.py"
    file.write_text(text)
    return "\n".join(tried(name, file, ranks))


@pytest.mark.parametrize("name", EXERCISES)
def test_a_right_answer_passes(ranks: Ranks, name: str, tmp_path: Path) -> None:
    assert said(ranks, tmp_path, name, RIGHT[name]) == ""


@pytest.mark.parametrize("name", EXERCISES)
def test_the_file_as_it_is_written_has_gaps(ranks: Ranks, name: str, tmp_path: Path) -> None:
    assert "still to be filled in" in said(ranks, tmp_path, name, EXERCISES[name].text)


@pytest.mark.parametrize(("name", "text", "why"), WRONG)
def test_a_wrong_answer_is_told_why(ranks: Ranks, name: str, text: str, why: str, tmp_path: Path) -> None:
    assert why in said(ranks, tmp_path, name, text)


def test_the_lessons_own_numbers_are_the_first_ones() -> None:
    first = {name: [shown for case in each.cases[:1] for shown in case.wanted] for name, each in EXERCISES.items()}
    assert first["exercise-1"][0].tolist() == [5.0, 6.0]
    mean, weights = first["mini-challenge"]
    assert mean.tolist() == [2.0, 2.0]
    assert weights.tolist() == pytest.approx([0.3, 0.3])
    assert next(case.wanted for case in EXERCISES["exercise-2"].cases if case.function == "accumulated") == (20.0, 5.0)


@pytest.mark.parametrize("answer", [None, "five", (1.0, 2.0), [1.0, 2.0]])
def test_what_is_no_answer_is_refused(answer: object) -> None:
    assert judged(Case("averaged", [()], (5.0,)), "returned", answer)
