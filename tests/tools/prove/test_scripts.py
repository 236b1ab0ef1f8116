"""Training scripts as they stand: public bugs whose ranks agree on the wrong thing, each beside its mended twin, and
right scripts, which are left alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distlab.cli.prove import Before, is_script, parsed
from tests.tools.check.cases import Checked, check
from tests.tools.prove.test_bugs import FILES

WRONG = {  # what is said of each on so many ranks
    "tokens_mean": (3, "a mean of the ranks' means: each rank divides by its own tokens (", "samples of rank"),
    "uneven_batches": (3, "a mean of the ranks' means", "samples of rank 0 count 2 times"),
    "loss_summed": (2, "all 2 parameters are 2 x those of 1 rank", "the loss was summed over the ranks before"),
    "never_divided": (4, "4 x those of 1 rank: summed over the 4 ranks and never divided"),
    "divided_twice": (3, "0.3333 x those of 1 rank: divided by the 3 ranks once too often"),
    "gathered": (2, "0.5 x those of 1 rank", "and no gradient goes back to them"),
    "bias_forgotten": (2, "gradients of 0.bias and 1 more are those of rank 0's own samples alone"),
    "norm_of_parts": (2, "never averaged over the 2 ranks"),
    "norm_twice": (2, "counts what every rank has a copy of once a rank (", "norm.weight"),
    "clipped_apart": (3, "each rank clips by the norm of its own part"),
    "clipped_flat": (3, "each rank clips by the norm of its own part"),
    "row_bias": (3, "the forward pass parts first at the model, whose output has bias 3 times"),
    "padded": (2, "is read twice (0): the sampler pads them to a multiple of 2 ranks"),
    "mean_of_means": (2, "is a mean of the ranks' means", "the ranks have 7, 6 samples"),
    "schedule": (2, "LinearLR of 12 steps is stepped 2 times in each step of the optimizer"),
    "schedule_by_lambda": (3, "LambdaLR by lambda is stepped 3 times in each step of the optimizer"),
    "before_shard": (2, "the optimizer's 4 parameters are not the model's"),
    "statistics": (2, "running_mean and running_var differ between ranks 0 and 1"),
    "own_order": (3, "each rank reads all 96 samples of an epoch at", "each counts 3 times"),
    "left_out": (2, "48 samples of an epoch at", "are in no rank's part of the 96"),
    "averaged_weights": (3, "weight and 2 more differ between ranks where a model is evaluated at"),
    "state_of_rank_0": (2, "is not what rank 1 had when it was saved after step 11, and rank 0's is"),
    "random_state": (2, "all ranks set one rank's random state"),
}  # fmt: skip
RIGHT = re.findall(r"^def (\w+)\(\):", (FILES / "script_right.py").read_text(), re.MULTILINE)
COMPARED = "the same script on 1 rank, given the samples that all"


def prove(name: str, words: list[str], world_size: int, folder: Path, *before: str) -> Checked:
    """`distlab prove BEFORE FILE WORDS` on so many local ranks."""
    script = FILES / f"{name}.py"
    if before:
        return check(Path(before[0]), world_size, folder, *before[1:], str(script), *words, command="prove")
    return check(script, world_size, folder, *words, command="prove")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    world_size, *says = WRONG[name]
    wrong = prove("script_wrong", [name], int(world_size), tmp_path)
    assert wrong.code == 1, wrong.output
    assert any(all(str(words) in sentence for words in says) for sentence in wrong.sentences), wrong.output


@pytest.mark.parametrize("name", WRONG)
def test_the_mended_twin_is_left_alone(name: str, tmp_path: Path) -> None:
    right = prove("script_wrong", [name, "right"], 2, tmp_path)
    assert right.code == 0, right.output
    assert COMPARED in right.one_line, right.output


@pytest.mark.parametrize(("name", "world_size"), [(name, 2 + index % 3) for index, name in enumerate(RIGHT)])
def test_a_right_script_is_left_alone(name: str, world_size: int, tmp_path: Path) -> None:
    right = prove("script_right", [name], world_size, tmp_path)
    assert right.code == 0, right.output
    assert not right.sentences
    assert COMPARED in right.one_line, right.output
    table = next(each for each in written(tmp_path, "table") if each["title"].startswith("Steps on 1 rank"))
    assert len(table["rows"]) >= 2
    assert {"the gradients", "the updates"} <= {each["name"] for each in right.run["checks"]}


def written(folder: Path, record: str) -> list[dict[str, Any]]:
    lines = next(folder.glob("*/rank0.jsonl")).read_text().splitlines()
    return [found for found in map(json.loads, lines) if found.get("record") == record]


def test_there_are_thirty_right_scripts() -> None:
    assert len(RIGHT) >= 30


MADE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_script_that_makes_its_batches_is_told_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MADE.replace("model = torch", "torch.manual_seed(0)\nmodel = torch"))
    made = check(tmp_path / "train.py", 2, tmp_path, command="prove")
    assert made.code == 0, made.output
    assert "put distlab.batch(x, y) around them" in made.one_line


def test_a_module_is_named_as_python_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trained" / "inner"
    package.mkdir(parents=True)
    (package / "net.py").write_text("from torch.nn import Linear\n")
    source = MADE.replace("model = torch.nn.Linear", "from .net import Linear\ntorch.manual_seed(0)\nmodel = Linear")
    (package / "__main__.py").write_text(f"assert __package__ == 'trained.inner'\n{source}")
    monkeypatch.chdir(tmp_path)
    made = check(Path("-m"), 2, tmp_path, "trained.inner", command="prove")
    assert made.code == 0, made.output
    assert "distlab prove -m trained.inner" in made.one_line
    absent = check(Path("-m"), 2, tmp_path, "trained.other", command="prove")
    assert absent.code == 2, absent.output
    assert "-m 'trained.other' does not exist: expected a module" in absent.output


def test_a_script_that_needs_two_ranks_is_compared_with_two(tmp_path: Path) -> None:
    source = (FILES / "script_wrong.py").read_text().replace("RIGHT = ", "assert WORLD > 1\nRIGHT = ")
    (tmp_path / "train.py").write_text(source)
    alone = check(tmp_path / "train.py", 4, tmp_path, "loss_summed", command="prove")
    assert "not compared: on 1 rank AssertionError" in alone.one_line
    assert "compare with more by --reference 2" in alone.one_line
    both = check(Path("--reference"), 4, tmp_path, "2", str(tmp_path / "train.py"), "divided_twice", command="prove")
    assert both.code == 1, both.output
    assert "0.5 x those of 2 ranks" in both.one_line, both.output


@pytest.mark.parametrize(
    ("words", "before", "rest"),
    [
        (["WORLD_SIZE=2", "train.py", "--tp=2"], Before(["WORLD_SIZE=2"]), ["train.py", "--tp=2"]),
        (["--reference", "2", "--double", "a.py"], Before([], 2, double=True), ["a.py"]),
        (["--vary", "--tp=1,2", "A=1", "a.py"], Before(["A=1"], vary="--tp=1,2"), ["a.py"]),
        (["--reference=x", "a.py"], Before([], fault="--reference is 'x': expected a number of ranks, 1 to 8"), ["a.py"]),
        (["--vary", "tp", "a.py"], Before([], fault="--vary is 'tp': expected an argument and values, as --tp=1,2"), ["a.py"]),
    ],
)  # fmt: skip
def test_words_before_the_file(words: list[str], before: Before, rest: list[str]) -> None:
    assert parsed(words) == (before, rest)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_is_told_from_a_file_of_parts(path: Path) -> None:
    if path.stem not in ("axes", "net"):  # what others import
        assert is_script(path.read_bytes()) == path.stem.startswith("script_")
    assert not is_script(b"model = (")
