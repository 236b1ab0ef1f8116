"""A user's model and strategy in the modes: proven, timed and counted like the lab's, or refused in a sentence."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distlab.experiments.pp.predictions import predict
from distlab.lab.config import Config, ConfigError
from distlab.lab.rank.mode_loader import load_for
from distlab.lab.rank.preflight import refuse
from distlab.lab.rank.user_strategy import strategy_maker
from distlab.lab.report.records import Said
from distlab.lab.workload.model import build_model, outline, refusals
from distlab.lab.workload.user_model import layers_of, make_user_model, reads_text
from tests.labs import Runs, failed

OWN = str(Path(__file__).parents[3] / "mine" / "own.py")
MODEL, STEP = f"{OWN}:model", f"{OWN}:train_step"
pytestmark = pytest.mark.timeout(120)
SOURCE = """
import torch
from torch import nn

def points(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))

def batch(seed, step):
    inputs = torch.randn(16, 7, generator=torch.Generator().manual_seed(1000 * seed + step))
    return inputs, inputs[:, :2] ** 2

def masked(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))
    net[2].register_buffer("mask", torch.ones(100))
    net[2].register_buffer("index", torch.arange(50))
    return net

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(9.0))

    def forward(self, inputs):
        with torch.no_grad():
            self.seen += inputs.sum()
        return inputs + self.table

def counting(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), Counting(), nn.Linear(9, 2))

def smudging(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (((model(inputs) - targets) ** 2).sum() * share).backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad, group=group)
    optimizer.step()
    if group.rank():
        next(buffer for name, buffer in model.named_buffers() if name.endswith("table"))[0] = 1

def normed(seed):
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Dropout(0.1))

def synced(seed):
    return nn.Sequential(nn.Linear(7, 9), nn.SyncBatchNorm(9))

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 2)])

    def forward(self, inputs):
        return self.layers[1](torch.relu(self.layers[0](inputs)))

def odd(seed):
    return Odd()

def number(seed):
    return 3

def whole(model, mesh, config):
    return None

def wrong(model, optimizer, microbatches, group):
    optimizer.zero_grad()
    for inputs, targets, share in microbatches:
        (model(inputs, targets) * share).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("own") / "points_of_mine.py"
    place.write_text(SOURCE)
    return str(place)


def config(**environ: str) -> Config:
    return Config.read({"WORLD_SIZE": "2"} | environ)


@pytest.mark.parametrize(("mode", "settings"), [
    ("dp", {"LAB_VARIANT": f"flat,ddp,{STEP}"}), ("fsdp", {"LAB_VARIANT": "zero1,zero3,fsdp2"}),
    ("compress", {"LAB_VARIANT": "dense,topk"}), ("server", {"LAB_VARIANT": "sync"}), ("precision", {"LAB_VARIANT": f"bf16,{STEP}"}),
    ("pp", {"LAB_VARIANT": "gpipe,torch_1f1b", "LAB_WIDTH": "24"}),
])  # fmt: skip
def test_a_users_model_runs_in_the_modes(runs: Runs, mode: str, settings: dict[str, str]) -> None:
    ran = runs(3, RUN_MODE=mode, LAB_MODEL=MODEL, **settings)
    assert ran.judged["verdict"] == "pass", failed(ran.judged)
    assert ran.judged["proven"]
    names = [each["name"] for each in ran.judged["variants"]]
    assert set(settings["LAB_VARIANT"].split(",")) <= set(names)


STAGED = """
import torch
from torch import nn

def staged(seed):
    torch.manual_seed(seed)
    last = nn.Linear(16, 256)
    last.register_buffer("mask", torch.ones(5000))
    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 16), nn.Linear(16, 16), last)
"""


def test_a_pipeline_rank_keeps_only_its_own_stage(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "staged_of_mine.py").write_text(STAGED)
    model, variants = f"{tmp_path}/staged_of_mine.py:staged", ("one_microbatch", "1f1b", "zbv")
    ran = runs(2, RUN_MODE="pp", LAB_MODEL=model, LAB_VARIANT=",".join(variants), LAB_MICROBATCHES="4", LAB_SEQ="32")
    assert ran.judged["verdict"] == "pass", failed(ran.judged)
    rest = {each["variant"] for each in ran.judged["comparisons"] if each["name"] == "rest bytes" and each["decides"]}
    assert rest == set(variants)
    asked = config(RUN_MODE="pp", LAB_MODEL=model, LAB_WIDTH="16", LAB_DTYPE="bfloat16")
    predicted = {each.variant: each.value for each in predict(asked, 2) if each.name == "rest bytes"}
    table, square, head = 256 * 16, 16 * 16 + 16, 16 * 256 + 256
    assert predicted["1f1b"] == (4.0 * (table + square), 4.0 * (square + head) + 2 * 5000)
    assert predicted["zbv"] == (4.0 * (table + head) + 2 * 5000, 8.0 * square)


def test_a_stage_without_a_linear_layer_has_no_delayed_gradient(runs: Runs) -> None:
    """A stage with only an embedding has no delayed weight gradient, and keeps only its input bytes."""
    variants = "one_microbatch,interleaved,zbv"
    ran = runs(2, RUN_MODE="pp", LAB_MODEL=MODEL, LAB_VARIANT=variants, LAB_WIDTH="24", LAB_MICROBATCHES="4")
    assert ran.judged["verdict"] == "pass", failed(ran.judged)


@pytest.mark.parametrize("mode", ["dp", "precision"])
def test_buffers_of_a_users_model_are_stored(runs: Runs, file: str, mode: str) -> None:
    ran = runs(2, RUN_MODE=mode, LAB_MODEL=f"{file}:masked", LAB_VARIANT="flat" if mode == "dp" else "bf16")
    assert ran.judged["verdict"] == "pass", failed(ran.judged)
    (rest,) = (each for each in ran.judged["comparisons"] if each["name"] == "rest bytes")
    assert rest["formula"].endswith(" + buffers")


def test_buffers_that_steps_write_are_reported(runs: Runs, file: str) -> None:
    ran = runs(2, RUN_MODE="dp", LAB_MODEL=f"{file}:counting", LAB_VARIANT="flat,ddp")
    assert ran.judged["verdict"] == "pass", failed(ran.judged)
    held = {each["variant"]: each["detail"] for each in ran.judged["checks"] if each["name"] == "buffers"}
    assert held == dict.fromkeys(("flat", "ddp"), "1 of 2, which one process does not change")
    (said,) = (each.text for each in ran.records[0] if isinstance(each, Said) and each.heading == "buffers")
    assert "change layers.0.1.seen by its own samples" in said


def test_a_buffer_that_a_step_writes_fails_by_name(runs: Runs, file: str) -> None:
    ran = runs(2, RUN_MODE="dp", LAB_MODEL=f"{file}:counting", LAB_VARIANT=f"flat,{file}:smudging", LAB_STEPS="1")
    wrong = {(each["variant"], each["name"]): each["detail"] for each in ran.judged["checks"] if not each["passed"]}
    assert wrong[f"{file}:smudging", "buffers"].endswith("table")
    assert ("flat", "buffers") not in wrong


def test_a_users_step_can_train_the_labs_model(runs: Runs) -> None:
    ran = runs(2, RUN_MODE="dp", LAB_MODEL="gpt", LAB_VARIANT=STEP)
    assert ran.judged["verdict"] == "pass", failed(ran.judged)


REPLICA = "is the training step of a replica with its own samples, but ranks of {1} have equal samples in {0}"
NONE_TIMED = "is timed next to a mode's variants, but {} times none, allowed: compress, cp, dp, "


@pytest.mark.parametrize(("mode", "settings", "words"), [
    ("tp", {}, REPLICA.format("tp", "tp")), ("pp", {}, REPLICA.format("pp", "pp")),
    ("cp", {}, REPLICA.format("cp", "cp")), ("mesh", {"LAB_MESH": "tp2"}, REPLICA.format("mesh", "tp")),
    ("moe", {}, "would route its tokens without those of other ranks: write a strategy of (model, mesh, config)"),
    *((mode, {}, NONE_TIMED.format(mode)) for mode in ("comm", "train", "elastic", "largebatch")),
])  # fmt: skip
def test_a_users_step_is_refused_in_modes_that_cannot_run_it(mode: str, settings: dict[str, str], words: str) -> None:
    asked = config(RUN_MODE=mode, LAB_VARIANT=STEP, **settings)
    with pytest.raises(ConfigError) as error:
        refuse(asked, load_for(asked))
    (said,) = error.value.faults
    assert words in said


@pytest.mark.parametrize(("mode", "words"), [
    ("mesh", "; pp cuts it between layers, dp and fsdp do not cut it, and `distlab prove` checks your own cut"),
    ("tp", "allowed: mlp, gpt; cut its layers in your own file, and prove it with `distlab prove FILE`"),
    ("cp", "split its positions in your own strategy, and prove it with `distlab prove`"),
    ("moe", "; a model with its own experts runs in dp and fsdp, and `distlab prove` checks how you distribute them"),
    ("comm", "comm trains nothing, so run it in dp, fsdp or pp"), ("train", "train trains nothing"),
])  # fmt: skip
def test_a_mode_that_cannot_train_it_names_those_that_can(mode: str, words: str) -> None:
    (said,) = load_for(config(RUN_MODE=mode)).refuse(config(RUN_MODE=mode, LAB_MODEL=MODEL))
    assert words in said


def test_a_users_strategy_runs_where_ranks_share_samples(file: str) -> None:
    for mode in ("tp", "pp", "cp", "moe"):
        asked = config(RUN_MODE=mode, LAB_VARIANT=f"{file}:whole")
        refuse(asked, load_for(asked))


def test_a_users_batches_are_split_like_the_texts(runs: Runs, file: str) -> None:
    ran = runs(3, RUN_MODE="dp", LAB_MODEL=f"{file}:points", LAB_VARIANT="bucketed,ring")
    assert ran.judged["verdict"] == "pass", failed(ran.judged)


def test_a_wrong_users_strategy_fails_by_its_name(runs: Runs, file: str) -> None:
    ran = runs(2, RUN_MODE="dp", LAB_MODEL="mlp", LAB_VARIANT=f"flat,{file}:wrong")
    wrong = {(each["variant"], each["name"]) for each in ran.judged["checks"] if not each["passed"]}
    assert {(f"{file}:wrong", name) for name in ("gradients", "weights", "losses")} <= wrong
    assert {variant for variant, _ in wrong} == {f"{file}:wrong"}


@pytest.mark.parametrize(("name", "words"), [
    ("synced", "has 1, a SyncBatchNorm: torch runs it only on GPUs"),
    ("normed", "has 1, a BatchNorm1d: its output depends on which samples a rank has"),
    ("odd", "has `layers` that its forward pass does not run one after the other"),
    ("number", "returned a int: expected an nn.Module"), ("missing", "has no function 'missing'"),
])  # fmt: skip
def test_a_model_that_no_mode_can_train_is_refused(file: str, name: str, words: str) -> None:
    assert any(words in each for each in refusals(config(LAB_MODEL=f"{file}:{name}")))


def test_a_wrong_batch_size_is_refused_with_the_right_one(file: str) -> None:
    assert refusals(config(LAB_MODEL=f"{file}:points")) == []
    (said,) = refusals(config(LAB_MODEL=f"{file}:points", LAB_BATCH="12"))
    assert said.endswith("has batches of 16 samples: set LAB_BATCH=16, not 12")


@pytest.mark.parametrize(("name", "words"), [
    ("number", r"is no strategy: expected a function of \(model, mesh, config\)"), ("missing", "has no function"),
])  # fmt: skip
def test_a_function_that_is_no_strategy_is_refused(file: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_for(config(LAB_VARIANT=f"{file}:{name}"))


@pytest.mark.parametrize("value", ["gtp", "mine/nothing.py:model", f"{OWN}:not a name"])
def test_a_missing_model_is_refused_before_torch_is_imported(value: str) -> None:
    with pytest.raises(ConfigError, match="LAB_MODEL="):
        config(LAB_MODEL=value)


def test_pp_requires_one_shape_between_stages() -> None:
    mode = load_for(config(RUN_MODE="pp"))
    assert mode.refuse(config(RUN_MODE="pp", LAB_MODEL=MODEL, LAB_WIDTH="24")) == []
    (said,) = mode.refuse(config(RUN_MODE="pp", LAB_MODEL=MODEL))
    assert "layer 0 returns [B, 64, 24]: set both to what all layers return" in said


def test_largebatch_refuses_a_users_model() -> None:
    (said,) = load_for(config(RUN_MODE="largebatch")).refuse(config(RUN_MODE="largebatch", LAB_MODEL=MODEL))
    assert "allowed: mlp, gpt" in said


def test_layers_without_weights_join_the_layer_before(file: str) -> None:
    own = config(LAB_MODEL=f"{file}:points")
    one, other = build_model(own, 1), build_model(own, 2)
    again = build_model(own, 1)
    assert torch.equal(next(one.parameters()), next(again.parameters()))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    assert len(layers_of(make_user_model(f"{file}:points", 1))) == 2
    assert next(outline(own).parameters()).is_meta
    assert reads_text(MODEL) and not reads_text(f"{file}:points")


def test_a_users_step_without_an_optimizer_step_is_reported(file: str, tmp_path: Path) -> None:
    lazy = tmp_path / "lazy_of_mine.py"
    lazy.write_text("def lazy(model, optimizer, microbatches, group):\n    return 0.0\n")
    strategy = strategy_maker(f"{lazy}:lazy")(
        build_model(config(LAB_MODEL=f"{file}:points"), 1), SimpleNamespace(group=None), config()
    )
    with pytest.raises(ValueError, match=r"called optimizer.step\(\) 0 times, expected once"):
        strategy.backward([])
