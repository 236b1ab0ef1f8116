"""Bugs that were found in public, each planted in a file of its own: what is said of them, and that right files are
left alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tools.check.cases import Checked, check
from tests.tools.prove.planted import PLANTED, RIGHT, Planted

FILES = Path(__file__).parent / "files"


def prove(name: str, world_size: int, folder: Path, **environ: str) -> Checked:
    """`distlab prove FILE` on so many local ranks."""
    return check(FILES / f"{name}.py", world_size, folder, command="prove", **environ)


def prove_text(folder: Path, name: str, source: str, **environ: str) -> Checked:
    """A file of this text on two ranks, beside those that it may import."""
    for shared in ("net", "right_model", "right_strategy"):
        shutil.copy(FILES / f"{shared}.py", folder)
    (folder / f"{name}.py").write_text(source)
    return check(folder / f"{name}.py", 2, folder, command="prove", **environ)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_it_is_named(planted: Planted, tmp_path: Path) -> None:
    proven = prove(planted.name, planted.world_size, tmp_path)
    assert proven.code == 1, proven.output
    found = next(each for each in proven.run["findings"] if planted.names in each["sentence"])
    for words in planted.says:
        assert words in found["sentence"]
    assert tuple(found["ranks"]) == planted.ranks


@pytest.mark.parametrize(("name", "world_size"), [*((name, 3) for name in RIGHT), ("model", 1), ("tp", 4)])
def test_a_right_file_is_left_alone(name: str, world_size: int, tmp_path: Path) -> None:
    proven = prove(f"right_{name}", world_size, tmp_path)
    assert proven.code == 0, proven.output
    assert proven.run["proven"]
    assert not proven.sentences
    written = next(tmp_path.glob("*/rank0.jsonl")).read_text()
    assert "Ranks of the script" in written
    if name == "strategy":
        rows = next(table["rows"] for table in map(json.loads, written.splitlines()) if "Traffic: " in str(table))
        for *_, sent, called in rows:  # the proof's own bytes are 10 times as many
            assert called == round(2 * 2 / 3 * 42_368 * 8)
            assert called <= sent <= 1.1 * called
    gradients = next(each for each in proven.run["checks"] if each["name"] == "gradients")
    assert ("seen is written by the steps: " in proven.output) == (name == "model")
    assert ("average is written by the steps: as in one process on all ranks" in proven.output) == (name == "model")
    assert gradients["max_abs_diff"] < (1e-7 if name == "pp" else 1e-12)  # it clips without torch's epsilon


HANGS = """
import torch.distributed as dist

def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (model(inputs, targets) * share).backward()
    for index, parameter in enumerate(model.parameters()):
        if group.rank() == 0 or index != 3:
            dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
"""
REFUSED = """
from torch import nn

def model(seed):
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

def batch(seed, step):
    return "tokens"
"""
HALF = """
import torch
import torch.distributed as dist

def prepare(model, group):
    model.layers[1].mlp.up.bias = torch.nn.Parameter(model.layers[1].mlp.up.bias.detach()[:100].clone())
    model.layers[1].mlp.up.weight = torch.nn.Parameter(model.layers[1].mlp.up.weight.detach()[:100].clone())
    model.layers[1].mlp.down.weight = torch.nn.Parameter(model.layers[1].mlp.down.weight.detach()[:, :100].clone())
    with torch.no_grad():
        model.layers[2].mlp.up.bias.add_(1.0 if dist.get_rank() else 0.0)
    return model
"""


SILENT = """
from right_strategy import Wave

class Silent(Wave):
    def full(self, kind):
        for name, tensor in super().full(kind):
            if kind != "gradients" or "up" not in name:
                yield name, tensor

def strategy(model, mesh, config):
    return Silent(model, mesh, config)
"""
STRANGE = """
from right_strategy import Wave

class Strange(Wave):
    def full(self, kind):
        for name, tensor in super().full(kind):
            yield name.replace("mlp.up", "mlp.top"), tensor

def strategy(model, mesh, config):
    return Strange(model, mesh, config)
"""
APART = """
def mesh(world_size):
    return {"dp": 1, "tp": world_size}

def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets, share in microbatches:
        loss = model(inputs, targets) * share
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total * (1 + 0.5 * (mesh.get_local_rank("tp") == 0))
"""


LOGGING = """
from right_model import after_step as after_step
from right_model import batch, model
from net import loss

import torch
import torch.distributed as dist

def train_step(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        with torch.no_grad():
            shown = loss(model, inputs, targets)
        (loss(model, inputs, targets) * share).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
    if group.rank():
        after_step(model)
    optimizer.step()
"""


def test_buffers_that_are_written_twice_or_too_early_are_named(tmp_path: Path) -> None:
    proven = prove_text(tmp_path, "logging_twice", LOGGING)
    assert proven.code == 1, proven.output
    seen, passes, average = proven.sentences
    assert seen.startswith("seen, a buffer that one process writes, ends as") and seen.endswith(
        ": it moved 2 x as far (on ranks 0 and 1)"
    )
    assert passes.startswith("passes, ") and passes.endswith(": it moved 2 x as far (on ranks 0 and 1)")
    assert average.startswith("average, ") and average.endswith("(on ranks 0 and 1)")


FIRST = ("silent", "apart", "hangs")  # whose first sentence it is
TEXTS: dict[str, Any] = {  # the file's text, the variables of its proof, its exit code, and what is said
    "silent": (SILENT, {}, 1, "no rank gave the gradient of layers.1.mlp.up.weight, nor of 3 more"),
    "strange": (STRANGE, {}, 2, "the strategy's full() gives 'layers.1.mlp.top.bias', which is no parameter of the"),
    "apart": (APART, {}, 1, "the loss of step 0 is"),
    "hangs": (HANGS, {"LAB_HANG_AFTER_S": "2"}, 1, "all_reduce", "hangs.py:10"),
    "stands": ("clip = 1.0\nimport time\ntime.sleep(600)\n", {"LAB_JOIN_TIMEOUT_S": "5"}, 2, "the file still stands at stands.py:3 after 5 s"),
    "refused": (REFUSED, {}, 2, "batch(1, 0) returned str: allowed are inputs and targets"),
    "half": (HALF, {}, 1, "no rank trains rows 100 to 127 of layers.1.mlp.up.weight",
             "layers.2.mlp.up.bias on rank 1 begins with other weights than the model's"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_said_of_a_file(name: str, tmp_path: Path) -> None:
    """A gradient that is never given, a name of nobody, a loss of one rank's own, a deadlock, a file that stands or
    cannot be proven on any rank, rows that nobody trains."""
    source, environ, code, *said = TEXTS[name]
    proven = prove_text(tmp_path, name, source, **environ)
    assert proven.code == code, proven.output
    assert all(words in (proven.sentences[0] if name in FIRST else proven.one_line) for words in said), proven.output
    assert not proven.run["proven"] and (proven.run["verdict"] == "refused") == (
        name in ("strange", "stands", "refused")
    )


ENDS = """
def train_step(model, optimizer, microbatches, group):
    {inside}
    optimizer.step()

{last}
"""


@pytest.mark.parametrize(
    ("inside", "last", "words"),
    [
        (
            "",
            "import sys; sys.exit(0)",
            "ranks 0 and 1 ended the process by sys.exit(0) at ends.py:6, before its checks",
        ),
        (
            "import os; os._exit(0)",
            "",
            "ranks 0 and 1 ended the process by os._exit(0) at ends.py:3, before its checks",
        ),
        ("if group.rank() == 1: quit()", "", "rank 1 ended the process by sys.exit() at ends.py:3, before its checks"),
        ("raise KeyboardInterrupt", "", "ranks 0 and 1 raised KeyboardInterrupt at ends.py:3"),
        ("if group.rank() == 1: import posix; posix._exit(0)", "", "rank 1 called os._exit(0)"),
    ],
)
def test_a_file_that_ends_before_its_checks_has_failed(inside: str, last: str, words: str, tmp_path: Path) -> None:
    done = prove_text(tmp_path, "ends", ENDS.format(inside=inside, last=last))
    assert done.code == 1 and words in done.one_line, done.output


def test_all_files_are_in_the_tables() -> None:
    shared = {"net", "axes", "script_right", "script_wrong"}
    named = {planted.name for planted in PLANTED} | {f"right_{name}" for name in RIGHT} | shared
    assert {path.stem for path in FILES.glob("*.py")} == named
