"""A model of one's own under tensor parallelism: cut by the plan beside it, proven, counted, or refused in a sentence."""

from pathlib import Path
from typing import Any

import pytest

from distlab.config import Config
from distlab.experiments.tp import MODE
from distlab.experiments.tp.checks import differences_by_row, expected_calls
from distlab.experiments.tp.predictions import cannot, priced, refuse, rest, sent
from tests.labs import Runs, failed

pytestmark = pytest.mark.timeout(120)

# Attention whose q, k and v take one tensor, of 6 heads of 4 features; an MLP that is called twice; a layer that is
# called by nobody but for its weight, which no plan may cut.
SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(9)
        self.q, self.k, self.v = (nn.Linear(9, 24, bias=False) for _ in range(3))
        self.o = nn.Linear(24, 9)
        self.up, self.down = nn.Linear(9, 14), nn.Linear(14, 9)
        self.scale = nn.Linear(9, 1, bias=False)

    def forward(self, x):
        taken = self.norm(x)
        q, k, v = (part(taken).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)) * self.scale.weight
        for _ in range(2):
            x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x

def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(256, 9), Mixed(), nn.Linear(9, 256))

def first(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 10, bias=False), nn.Tanh(), nn.Linear(10, 2, bias=False))

def batch_of(seed, step):
    inputs = torch.randn(16, 7, generator=torch.Generator().manual_seed(1000 * seed + step))
    return inputs, inputs[:, :2] ** 2
"""
HEADS = "plan = {'1.[qkv]': ('column', 4), '1.o': ('row', 4), '1.up': 'column', '1.down': 'row'}\n"
ENDS = "batch = batch_of\nplan = {'0': 'column', '2': 'row'}\n"


SOFT = """
class Soft(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(9, 14), nn.Linear(14, 9)

    def forward(self, x):
        return x + self.down(torch.softmax(self.up(x), -1))

def soft(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(256, 9), Soft(), nn.Linear(9, 256))

plan = {'1.up': 'column', '1.down': 'row'}
"""


TORCHS = """
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

plan = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel(), "0": "row"}
"""


def file(folder: Path, plan: str, name: str = "net") -> str:
    """LAB_MODEL of a file with this plan."""
    path = folder / f"planned_{abs(hash(plan))}.py"
    path.write_text(SOURCE + plan)
    return f"{path}:{name}"


def config_of(model: str, world_size: int = 2, **settings: str) -> Config:
    return Config.read({"RUN_MODE": "tp", "WORLD_SIZE": str(world_size), "LAB_SEQ": "8", "LAB_MODEL": model} | settings)


def ran(runs: Runs, world_size: int, model: str, **settings: str) -> dict[str, Any]:
    settings = {"LAB_SEQ": "8", "LAB_BATCH": "16", "LAB_STEPS": "2"} | settings
    judged: dict[str, Any] = runs(world_size, RUN_MODE="tp", LAB_MODEL=model, **settings).judged
    return judged


@pytest.mark.parametrize(
    ("world_size", "variants"), [(2, {"gathered", "megatron", "dtensor"}), (5, {"gathered", "megatron"})]
)
def test_whole_heads_and_a_layer_that_is_called_twice_are_one_process(
    runs: Runs, tmp_path: Path, world_size: int, variants: set[str]
) -> None:
    judged = ran(runs, world_size, file(tmp_path, HEADS), LAB_CLIP="0.5", LAB_MICROBATCHES="3")
    assert judged["verdict"] == "pass", failed(judged)
    assert judged["proven"]
    assert {each["name"] for each in judged["variants"]} == variants
    calls = {each["variant"] for each in judged["comparisons"] if each["name"] == "calls" and each["passed"]}
    assert calls == {"gathered", "megatron"}


def test_what_works_on_all_features_is_named_beside_the_proof_that_fails(runs: Runs, tmp_path: Path) -> None:
    judged = ran(runs, 2, file(tmp_path, SOFT, "soft"), LAB_VARIANT="megatron")
    wrong = {each["name"]: each["detail"] for each in judged["checks"] if not each["passed"]}
    assert {"gradients", "losses", "between the slices"} <= set(wrong)
    said = wrong["between the slices"]
    assert said.startswith("what layers.1.down takes on rank ") and "as a softmax or a norm does" in said


def test_whole_heads_are_right_between_the_slices(tmp_path: Path) -> None:
    found = differences_by_row(config_of(file(tmp_path, HEADS), 5), 1)
    assert set(found) == {"layers.1.o", "layers.1.down"}
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_embedding_by_rows_and_a_plan_in_torchs_words_are_one_process(
    runs: Runs, tmp_path: Path, world_size: int
) -> None:
    judged = ran(runs, world_size, file(tmp_path, TORCHS))
    assert judged["verdict"] == "pass", failed(judged)
    assert {each["name"] for each in judged["variants"]} >= {"gathered", "megatron"}
    config = config_of(file(tmp_path, TORCHS))
    without = config_of(file(tmp_path, TORCHS.replace(', "0": "row"', "")))
    assert rest("megatron", without, 0) - rest("megatron", config, 0) == 2 * 4 * 128 * 9  # half of the vocabulary
    assert sent("megatron", config, 4)[0] == ("all_reduce", 4 * 8 * 9, False, 0)


def test_each_rank_keeps_its_parts_and_what_is_whole(runs: Runs, tmp_path: Path) -> None:
    judged = ran(runs, 3, file(tmp_path, HEADS), LAB_OPTIMIZER="adamw", LAB_VARIANT="gathered,megatron")
    assert judged["verdict"] == "pass", failed(judged)
    kept = [each for each in judged["comparisons"] if each["name"] == "rest bytes"]
    assert {each["variant"] for each in kept} == {"gathered", "megatron"} and all(each["decides"] for each in kept)


def test_a_model_of_which_nothing_is_whole_is_one_process(runs: Runs, tmp_path: Path) -> None:
    judged = ran(runs, 3, file(tmp_path, ENDS, "first"), LAB_VARIANT="megatron")
    assert judged["verdict"] == "pass", failed(judged)


@pytest.mark.parametrize(("bug", "check"), [
    ("double_reduce", "gradients"), ("lost_f", "replicas"), ("bias_everywhere", "losses"),
])  # fmt: skip
def test_a_mistake_is_seen_in_ones_own_model_too(runs: Runs, tmp_path: Path, bug: str, check: str) -> None:
    judged = ran(runs, 2, file(tmp_path, HEADS), LAB_VARIANT="megatron", LAB_BUG=bug)
    wrong = {each["name"] for each in judged["checks"] if not each["passed"]}
    assert judged["verdict"] == "fail"
    assert check in wrong


def test_what_takes_one_tensor_is_summed_once_and_dtensor_sums_it_for_each(tmp_path: Path) -> None:
    config = config_of(file(tmp_path, HEADS), LAB_BATCH="4")
    tokens = 4 * 8
    forward = [("all_reduce", tokens * 9, False, 1)] * 3  # o, and down twice
    backward = [("all_reduce", tokens * 9, True, 1)]
    assert sent("megatron", config, 4) == forward + backward * 3  # q, k and v together, and up twice
    assert sent("dtensor", config, 4) == forward + backward * 5
    assert expected_calls("megatron", config) == ([(), ("all_reduce",) * 3, (), ()], [(), ("all_reduce",) * 3, ()])
    nbytes, calls, _ = priced("megatron", config)
    assert (nbytes, calls) == (6 * 2 * (1 / 2) * tokens * 9 * 4, 6)


def test_a_layer_that_takes_the_data_sends_nothing_backward(tmp_path: Path) -> None:
    config = config_of(file(tmp_path, ENDS, "first"), LAB_BATCH="16")
    assert sent("megatron", config, 5) == [("all_reduce", 5 * 2, False, 1)]
    assert [each.backward for each in sent("gathered", config, 5)] == [False, False, True]


@pytest.mark.parametrize(("plan", "words"), [
    ("", "has no plan beside it, and tp cannot know how to cut it"),
    ("plan = ['up']\n", r"its plan is ['up'], allowed: linear layers and how each is cut"),
    ("plan = {'1.top': 'column'}\n", "plan['1.top'] is none of the linear layers and embeddings that it calls, allowed: 0, 1.q, 1.k, 1.v, 1.o, 1.up"),
    ("plan = {'1.up': 'rows'}\n", "plan['1.up'] is 'rows', allowed: 'column', 'row'"),
    ("plan = {'1.up': 'sequence'}\n", "plan['1.up'] is 'sequence', and a plan names layers, not which dim of what lies between them has the rows"),
    (TORCHS.replace("ColwiseParallel", "SequenceParallel"), "plan['1.up'] is 'sequence', and a plan names layers"),
    ("plan = {'1.q': ('column', 5)}\n", "1.q has 24 features, which make no whole parts of 5 outputs"),
    ("plan = {'1.q': ('column', 24)}\n", "1.q has 1 parts of 24 outputs, which cannot be split over WORLD_SIZE=2"),
    ("plan = {'1.up': 'column'}\n", "cut by its plan for rank 0 of 2 it does not run ("),
    ("plan = {'2': 'column'}\n", "it gives (2, 8, 128), not (2, 8, 256)"),
    ("plan = {'1.scale': 'row'}\n", "plan['1.scale'] is none of the linear layers and embeddings that it calls, allowed: 0, 1.q, 1.k"),
    ("plan = {'0': 'column'}\n", "plan['0'] cuts 0, an embedding, by its outputs, allowed: 'row', its vocabulary"),
    (TORCHS.replace("()", "(output_layouts=Replicate())"), "plan['1.up'] is 'ColwiseParallel of layouts of its own', allowed: 'column'"),
])  # fmt: skip
def test_a_plan_that_cuts_nothing_right_is_refused_in_a_sentence(tmp_path: Path, plan: str, words: str) -> None:
    (said,) = refuse(config_of(file(tmp_path, plan)))
    assert words in said


def test_heads_that_are_torn_apart_are_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    torn = HEADS.replace("('column', 4)", "'column'").replace("('row', 4)", "'row'")
    assert refuse(config_of(file(tmp_path, torn), 3)) == []  # 24 features over 3 ranks leave heads whole
    (said,) = refuse(config_of(file(tmp_path, torn), 5))
    assert "heads are counted in what a layer gives, and whole ones stay together" in said


def test_what_cannot_take_the_plan_is_left_out_with_the_reason(tmp_path: Path) -> None:
    reasons = cannot(config_of(file(tmp_path, HEADS), 4))
    assert reasons["dtensor"].startswith("6, the parts of 4 outputs of layers.1.q, is not a multiple of WORLD_SIZE=4")
    assert reasons["sequence"].startswith("it slices rows between the lab's own blocks")
    assert set(cannot(config_of(file(tmp_path, ENDS, "first"), 3))) == {"gathered", "sequence", "dtensor"}
    assert "packed_qkv" in MODE.mistakes
