"""Compare every mode's variants with one process in float64, and test injected bugs, traffic, resuming, memory after
a variant, and refused settings."""

from typing import Any, NamedTuple

import pytest

from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load
from distlab.lab.rank.preflight import refuse
from tests.trained import TOLERANCE, count_live_parameters, counted, differences, refusal, resumed, runnable
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(180)

SMALL = {
    "dp": {"LAB_WIDTH": "8", "LAB_DEPTH": "2", "LAB_HEADS": "2", "LAB_SEQ": "6", "LAB_BATCH": "9", "LAB_BUCKET_MIB": "0.004"},
    "tp": {"LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_HEADS": "8", "LAB_SEQ": "7", "LAB_BATCH": "5"},
    "pp": {"LAB_WIDTH": "6", "LAB_DEPTH": "8", "LAB_HEADS": "2", "LAB_SEQ": "5"},
    "cp": {"LAB_WIDTH": "12", "LAB_DEPTH": "2", "LAB_HEADS": "6", "LAB_SEQ": "7", "LAB_BATCH": "3"},
    "fsdp": {"LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_HEADS": "4", "LAB_SEQ": "8", "LAB_BATCH": "17"},
    "moe": {"LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_HEADS": "4", "LAB_SEQ": "8"},
    "mesh": {
        "LAB_WIDTH": "15", "LAB_HEADS": "5", "LAB_DEPTH": "5", "LAB_SEQ": "7", "LAB_BATCH": "13", "LAB_MICROBATCHES": "3",
        "LAB_BUCKET_MIB": "0.005",
    },
}  # fmt: skip
ADAM = {"LAB_OPTIMIZER": "adamw"}
TUNED = ADAM | {"LAB_TIE": "1", "LAB_CLIP": "0.05"}
RECOMPUTED = TUNED | {"LAB_RECOMPUTE": "1"}
MLP = {"LAB_MODEL": "mlp"}
DROP = {"LAB_DROPOUT": "0.3"}
TORCHS_PIPES = ("torch_1f1b", "torch_interleaved_zb", "torch_zbv", "torch_dualpipev")


def config_of(mode: str, world_size: int, **settings: str) -> Config:
    return Config.read({"RUN_MODE": mode, "WORLD_SIZE": str(world_size)} | SMALL[mode] | settings)


def ours(mode: str) -> tuple[str, ...]:
    return tuple(name for name in load(mode).names if name not in load(mode).by_torch)


class Case(NamedTuple):
    mode: str
    world_size: int
    settings: dict[str, str]
    names: tuple[str, ...] = ()  # if empty, all variants that can run


def mesh(world_size: int, axes: str, names: tuple[str, ...], settings: dict[str, str]) -> Case:
    """Return a case with five blocks if there are pipeline stages, else two: enough to gather one ahead."""
    return Case("mesh", world_size, {"LAB_MESH": axes} | ({} if "pp" in axes else {"LAB_DEPTH": "2"}) | settings, names)


PROVEN = [
    *(Case("dp", world_size, {}) for world_size in (1, 2, 3, 4)),  # 3 ranks get 4, 1 and 4 of 9 samples
    Case("dp", 4, {"LAB_BATCH": "4"}),  # one sample per rank
    Case("dp", 3, {"LAB_MICROBATCHES": "3"}),
    Case("dp", 2, {"LAB_MICROBATCHES": "2", "LAB_CLIP": "0.01"}),
    Case("dp", 3, ADAM | {"LAB_CLIP": "0.5"}),
    Case("dp", 3, {"LAB_TIE": "1"}),
    Case("dp", 4, MLP),
    Case("dp", 4, {"LAB_MODEL": "line", "LAB_BATCH": "32"}),
    *(Case("tp", world_size, {}) for world_size in (1, 2, 3)),
    Case("tp", 4, {"LAB_HEADS": "7", "LAB_WIDTH": "14"}),
    Case(
        "tp", 5, {"LAB_HEADS": "24", "LAB_WIDTH": "24", "LAB_DEPTH": "1", "LAB_SEQ": "3"}
    ),  # fewer positions than ranks
    Case("tp", 8, {"LAB_BATCH": "1", "LAB_DEPTH": "1"}),
    Case("tp", 4, {"LAB_TIE": "1", "LAB_MICROBATCHES": "3", "LAB_DEPTH": "1"}),
    Case("tp", 3, TUNED | {"LAB_MICROBATCHES": "3"}),
    Case("tp", 2, ADAM | {"LAB_CLIP": "0.5"}),
    *(Case("tp", world_size, MLP) for world_size in (1, 2, 3, 6, 7)),
    Case("tp", 3, MLP | {"LAB_BATCH": "13", "LAB_MICROBATCHES": "5", "LAB_CLIP": "0.1"}),
    Case("tp", 4, MLP | {"LAB_WIDTH": "1"}),  # gathered: 1 output for 4 ranks
    *(Case("pp", world_size, {}, ours("pp")) for world_size in (1, 3, 5, 8)),
    *(Case("pp", world_size, MLP, ours("pp")) for world_size in (2, 4, 6, 7)),
    Case("pp", 4, {"LAB_DEPTH": "7"}, ours("pp")),
    Case("pp", 3, {"LAB_BATCH": "13"}, ours("pp")),
    Case("pp", 3, {"LAB_BATCH": "13", "LAB_MICROBATCHES": "5", "LAB_DEPTH": "9"}, ours("pp")),
    *(Case("pp", world_size, {"LAB_TIE": "1"}, ours("pp")) for world_size in (1, 2)),
    Case("pp", 4, TUNED, ours("pp")),
    Case("pp", 3, MLP | {"LAB_CLIP": "0.05"}, ours("pp")),
    Case("pp", 1, {"LAB_MODEL": "line"}, ours("pp")),
    Case("pp", 3, {"LAB_BATCH": "17", "LAB_MICROBATCHES": "7", "LAB_TIE": "1", "LAB_CLIP": "0.05"}, ours("pp")),
    Case("pp", 3, {"LAB_MICROBATCHES": "8", "LAB_TIE": "1", "LAB_CLIP": "0.05"}, TORCHS_PIPES),
    Case("pp", 3, {"LAB_MICROBATCHES": "8"} | MLP, TORCHS_PIPES),
    Case("cp", 1, {}),
    Case("cp", 2, {"LAB_SEQ": "8"}),  # torch_ring can run too
    Case("cp", 3, ADAM | {"LAB_CLIP": "0.1"}),
    Case("cp", 3, {"LAB_MICROBATCHES": "2", "LAB_TIE": "1"}),
    Case("cp", 4, {"LAB_SEQ": "13", "LAB_HEADS": "3"}),  # a rank without a head
    Case("cp", 5, {"LAB_SEQ": "3", "LAB_BATCH": "1"}),  # ranks without a position
    mesh(4, "pp2,tp2", ("1f1b", "sequence", "zero2"), TUNED),
    mesh(4, "dp2,tp2", ("1f1b", "sequence", "zero3"), RECOMPUTED),
    mesh(6, "tp1,dp2,pp3", ("1f1b", "zero1", "zero2", "zero3"), TUNED),
    mesh(8, "dp2,tp2,pp2", ("zero1", "zero3"), TUNED),
    mesh(3, "tp3", ("1f1b", "sequence"), {}),
    mesh(4, "dp2,pp2", ("1f1b", "zero2"), MLP),
    mesh(4, "cp2,tp2", ("sequence", "zero2", "ulysses"), TUNED),
    mesh(4, "cp2,dp2", ("1f1b", "zero1", "zero3", "ulysses"), RECOMPUTED),
    mesh(6, "pp2,cp3", ("1f1b",), TUNED),
    mesh(8, "dp2,cp2,tp2", ("sequence", "ulysses"), TUNED),
    mesh(4, "pp2,tp2", ("1f1b", "sequence"), DROP),
    mesh(4, "cp2,tp2", ("sequence", "zero3"), DROP | {"LAB_RECOMPUTE": "1"}),
    mesh(2, "dp2", ("1f1b",), DROP | MLP),
]


def label(value: Any) -> str | None:
    """Return the name of a case, for example `dp 3 LAB_TIE=1`."""
    if not isinstance(value, Case):
        return None
    settings = " ".join(f"{name}={text}" for name, text in value.settings.items())
    return f"{value.mode} {value.world_size} {settings}{' torch' * (value.names == TORCHS_PIPES)}".strip()


@pytest.mark.parametrize("case", PROVEN, ids=label)
def test_n_ranks_equal_one_process(ranks: Ranks, case: Case) -> None:
    config = config_of(case.mode, case.world_size, **case.settings)
    found = ranks(case.world_size, differences, config, case.names)
    if case.mode == "mesh" or case.names == TORCHS_PIPES:
        assert list(found[0]) == list(case.names)
    for of_rank in found:
        for name, worst in of_rank.items():
            assert worst.pop("replicas") == 0.0, name
            assert max(worst.values()) <= TOLERANCE, (name, worst)


def test_most_variants_run_at_most_sizes() -> None:
    """A proof leaves out few variants, and only at the expected sizes."""
    assert [size for size in range(1, 9) if "dtensor" in runnable(config_of("tp", size))] == [1, 2, 4, 8]
    pipes = {size: len(runnable(config_of("pp", size), ours("pp"))) for size in range(1, 9)}
    assert pipes == {1: 8, 2: 8, 3: 7, 4: 7, 5: 5, 6: 5, 7: 5, 8: 5}
    assert set(runnable(config_of("cp", 3))) == set(ours("cp"))


# --- injected bugs ---

NUMBERS = ("losses", "gradients", "weights", "replicas")
WRONG = [
    (mode, bug)
    for mode in ("dp", "tp", "pp", "cp")
    for bug, mistake in load(mode).mistakes.items()
    if mistake.check in NUMBERS
]
IN_ALL_VARIANTS = {"means_of_shards", "no_set_epoch"}  # samples are assigned wrongly, so each variant is wrong
MODE_SETTINGS = {"pp": {"LAB_MICROBATCHES": "8"}}
WORLD_SIZES = {"no_set_epoch": 2}  # samples repeat if an epoch has few batches


@pytest.mark.parametrize(("mode", "bug"), WRONG)
def test_each_bug_fails_only_its_variants(ranks: Ranks, mode: str, bug: str) -> None:
    world_size = WORLD_SIZES.get(bug, 3)
    config = config_of(mode, world_size, LAB_BUG=bug, **MODE_SETTINGS.get(mode, {}))
    found = ranks(world_size, differences, config, (), 3 if mode == "dp" else 2)
    mistake = load(mode).mistakes[bug]
    for name in found[0]:
        worst = max(of_rank[name][mistake.check] for of_rank in found)
        assert (worst > 1e-9) == (name in mistake.where.variants or bug in IN_ALL_VARIANTS), (name, found[0][name])
        assert worst > 1e-9 or worst <= TOLERANCE


# --- traffic ---

SENT = [
    Case("dp", 2, {"LAB_DTYPE": "float64"}),
    Case("dp", 2, {"LAB_DTYPE": "float64", "LAB_MICROBATCHES": "2"}),
    Case("tp", 1, {}),
    Case("tp", 2, {"LAB_CLIP": "1"}),
    Case("tp", 3, {"LAB_MICROBATCHES": "2"}),
    Case("tp", 4, {"LAB_SEQ": "3", "LAB_DTYPE": "float64", "LAB_TIE": "1"}),  # a rank without a position
    Case("tp", 4, {"LAB_DTYPE": "bfloat16"}),
    Case("tp", 2, MLP),
    Case("tp", 4, MLP | {"LAB_BATCH": "7", "LAB_MICROBATCHES": "2"}),  # 4 and 3 samples
    Case("tp", 8, MLP),
    Case("pp", 1, {"LAB_TIE": "1", "LAB_DTYPE": "float64"}),
    Case("pp", 2, {"LAB_DTYPE": "float64"}),
    Case("pp", 3, {"LAB_TIE": "1", "LAB_CLIP": "0.1", "LAB_BATCH": "13", "LAB_DTYPE": "float64"}),
    Case("pp", 4, MLP | {"LAB_MICROBATCHES": "7", "LAB_DTYPE": "float64"}),
    Case("cp", 1, {}),
    Case("cp", 2, {"LAB_CLIP": "1", "LAB_SEQ": "8"}),
    Case("cp", 3, {"LAB_MICROBATCHES": "2", "LAB_DTYPE": "bfloat16"}),
    Case("cp", 4, {"LAB_SEQ": "3", "LAB_DTYPE": "float64", "LAB_TIE": "1"}),
    Case("cp", 4, {"LAB_HEADS": "3", "LAB_SEQ": "9"}),
]


@pytest.mark.parametrize("case", SENT, ids=label)
def test_counted_traffic_equals_the_prediction(ranks: Ranks, case: Case) -> None:
    config = config_of(case.mode, case.world_size, **case.settings)
    predicted = {
        (each.variant, each.name): each for each in load(case.mode).all_predictions(load(case.mode).predict(config))
    }
    for rank, found in enumerate(ranks(case.world_size, counted, config, ours(case.mode))):
        assert found
        for name, step in found.items():
            sent = predicted[name, "wire bytes"]
            calls = predicted[name, "calls"].value[rank] if (name, "calls") in predicted else sent.calls
            assert step.calls == calls, (rank, name)
            if case.mode != "dp":  # its ring sends chunks of different sizes per rank
                assert step.nbytes == pytest.approx(sent.value[rank], rel=1e-12), (rank, name)
            if (name, "activation bytes") in predicted:
                saved = found["megatron"].kept_bytes - step.kept_bytes
                assert predicted[name, "activation bytes"].value[rank] == pytest.approx(saved, rel=1e-12)


# --- single strategies ---

RESUMED = [
    *(Case("fsdp", 3, ADAM | {"LAB_TIE": "1"}, (name,)) for name in (*ours("fsdp"), "fsdp2") if name != "plain"),
    Case("fsdp", 3, ADAM, ("plain",)),
    *(Case("tp", 3, ADAM | {"LAB_TIE": "1"}, (name,)) for name in ("megatron", "sequence")),
    Case("pp", 2, ADAM | {"LAB_TIE": "1"}, ("interleaved",)),
    Case("moe", 4, ADAM | MLP | {"LAB_EXPERTS": "2"}, ("ep_dp",)),
    Case("moe", 4, ADAM | MLP | {"LAB_EXPERTS": "2"}, ("ep_tp",)),
    Case("moe", 3, ADAM | MLP | {"LAB_EXPERTS": "2"}, ("ep",)),
    Case("moe", 8, ADAM | MLP | {"LAB_EXPERTS": "2"}, ("ep_dp_tp",)),
]


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: f"{case.mode} {case.names[0]}")
def test_a_new_strategy_resumes_from_saved_state(ranks: Ranks, case: Case) -> None:
    config = config_of(case.mode, case.world_size, **case.settings)
    assert ranks(case.world_size, resumed, config, *case.names) == [True] * case.world_size


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode in ("dp", "tp") for name in load(mode).names])
def test_a_deleted_variant_leaves_no_memory(ranks: Ranks, mode: str, name: str) -> None:
    assert ranks(2, count_live_parameters, config_of(mode, 2), name) == [0, 0]


# --- refused settings ---

REFUSED: list[tuple[str, int, dict[str, str], str]] = [
    ("dp", 4, {"LAB_BATCH": "3"}, "LAB_BATCH=3 is smaller than WORLD_SIZE=4"),
    ("dp", 4, {"LAB_HEADS": "3"}, "LAB_WIDTH=8 is not a multiple of LAB_HEADS=3"),
    ("dp", 4, {"LAB_MICROBATCHES": "3"}, "LAB_MICROBATCHES=3 is more than the 2 samples"),
    ("dp", 4, {"LAB_TEXT": "/nowhere"}, "LAB_TEXT='/nowhere' does not exist"),
    ("dp", 4, {"LAB_VARIANT": "means"}, "LAB_BUG=means_of_shards averages the means of uneven shards"),
    ("dp", 4, {"LAB_VARIANT": "coordinator"}, "RUN_MODE=server LAB_VARIANT=sync collects sums and counts"),
    ("dp", 4, {"LAB_BUG": "hook_race", "LAB_VARIANT": "per_parameter,ddp"}, "it takes bucketed or ring"),
    ("dp", 4, {"LAB_BUG": "means_of_shards", "LAB_BATCH": "4"}, "shards must differ in size"),
    ("dp", 1, {"LAB_BUG": "no_sampler"}, "it takes 2 ranks"),
    ("dp", 4, {"LAB_BUG": "no_broadcast", "LAB_MODEL": "line"}, "all ranks begin with weights of zero"),
    ("dp", 4, {"LAB_BUG": "no_set_epoch", "LAB_MODEL": "line"}, "its batch is the whole data set"),
    ("dp", 4, {"LAB_BUG": "stale_bucket", "LAB_PROOF": "0"}, "nothing is compared"),
    ("tp", 4, {"LAB_HEADS": "2"}, "LAB_HEADS=2 cannot be split over WORLD_SIZE=4"),
    ("tp", 5, MLP | {"LAB_WIDTH": "1"}, "4 x LAB_WIDTH=1 cannot be split over WORLD_SIZE=5"),
    ("tp", 4, {"LAB_MODEL": "line"}, "LAB_MODEL=line has no matrix to split"),
    ("tp", 4, {"LAB_HEADS": "5"}, "LAB_WIDTH=16 is not a multiple of LAB_HEADS=5"),
    ("tp", 4, {"LAB_MICROBATCHES": "6"}, "LAB_MICROBATCHES=6 is more than the 5 samples"),
    ("tp", 3, {"LAB_VARIANT": "megatron,dtensor"}, "LAB_VARIANT='dtensor' cannot run: LAB_HEADS=8 is not"),
    ("tp", 4, {"LAB_BUG": "lost_f", "LAB_VARIANT": "sequence"}, "it takes gathered or megatron"),
    ("tp", 4, {"LAB_BUG": "double_reduce", "LAB_VARIANT": "dtensor"}, "it takes megatron"),
    ("tp", 4, {"LAB_BUG": "packed_qkv", "LAB_MODEL": "mlp"}, "it has no attention"),
    ("tp", 1, {"LAB_BUG": "bias_everywhere"}, "it takes 2 ranks"),
    ("tp", 4, {"LAB_BUG": "double_reduce", "LAB_PROOF": "0"}, "nothing is compared"),
    ("pp", 4, {"LAB_DEPTH": "3"}, "LAB_DEPTH=3 layers are fewer than WORLD_SIZE=4: every stage needs one"),
    ("pp", 4, {"LAB_MODEL": "line"}, "LAB_MODEL=line is one layer, less than WORLD_SIZE=4"),
    ("pp", 4, {"LAB_BATCH": "3"}, "LAB_MICROBATCHES=4 is more than the 3 samples"),
    ("pp", 4, {"LAB_HEADS": "4"}, "LAB_WIDTH=6 is not a multiple of LAB_HEADS=4"),
    ("pp", 4, {"LAB_VARIANT": "interleaved", "LAB_DEPTH": "5"}, "makes 8 stages, more than the 5 layers"),
    ("pp", 4, {"LAB_VARIANT": "torch_1f1b", "LAB_BATCH": "13"}, "LAB_BATCH=13 is not a multiple of LAB_MICROBATCHES=4"),
    ("pp", 4, {"LAB_VARIANT": "1f1b_split"}, "zb_h1 splits its backward passes too"),
    ("pp", 4, {"LAB_VARIANT": "torch_1f1b", "LAB_MICROBATCHES": "2"}, "LAB_MICROBATCHES=2 is fewer than its 4 stages"),
    ("pp", 4, {"LAB_VARIANT": "torch_1f1b", "LAB_DEVICE": "cuda"}, "which gloo does not send"),
    ("pp", 4, {"LAB_VARIANT": "interleaved", "LAB_BACKEND": "nccl", "LAB_DEVICE": "cuda"}, "NCCL runs messages in launch order"),
    ("pp", 4, {"LAB_BUG": "undivided_loss", "LAB_MICROBATCHES": "1"}, "it takes 2 microbatches"),
    ("pp", 4, {"LAB_BUG": "undivided_loss", "LAB_VARIANT": "one_microbatch"}, "it takes gpipe or 1f1b or interleaved or zb_h1"),
    ("pp", 4, {"LAB_BUG": "swapped_microbatches"}, "any more: LAB_BUG=stale_activation"),
    ("pp", 4, {"LAB_VARIANT": "dualpipev", "LAB_DEPTH": "8"}, "LAB_MICROBATCHES=4 is fewer than 2p = 8"),
    ("pp", 4, {"LAB_VARIANT": "zbv", "LAB_DEPTH": "7"}, "two stages per rank on 4 ranks makes 8 stages, more than the 7"),
    ("pp", 4, {"LAB_VARIANT": "torch_interleaved_zb", "LAB_MICROBATCHES": "11", "LAB_BATCH": "11"}, "not a multiple of its 2 rounds"),
    ("pp", 4, {"LAB_BUG": "stale_activation", "LAB_VARIANT": "torch_1f1b"}, "it takes gpipe or 1f1b"),
    ("pp", 2, {"LAB_BUG": "stale_activation", "LAB_VARIANT": "one_microbatch,1f1b"}, "stores one microbatch at a time"),
    ("cp", 2, MLP, "LAB_MODEL=mlp has no sequence to split, allowed: gpt"),
    ("cp", 2, {"LAB_MODEL": "mine/own.py:model"}, "the lab has no rule for cutting this model"),
    ("cp", 2, {"LAB_MICROBATCHES": "4"}, "LAB_MICROBATCHES=4 is more than the 3 samples"),
    ("cp", 2, {"LAB_RECOMPUTE": "1"}, "LAB_RECOMPUTE=1 needs ranks that run whole layers, as cp does not"),
    ("cp", 2, {"LAB_VARIANT": "torch_ring"}, "LAB_SEQ=7 is not a multiple of 4"),
    ("cp", 2, {"LAB_VARIANT": "context_parallel"}, "does not have a sharding strategy"),
    ("cp", 2, {"LAB_BUG": "unfolded"}, "LAB_SEQ=7: it takes 8 positions per rank"),
    ("cp", 2, {"LAB_BUG": "no_lse", "LAB_SEQ": "3"}, "LAB_SEQ=3: it takes 4 positions"),
    ("cp", 2, {"LAB_DEVICE": "cuda", "LAB_BACKEND": "gloo"}, "LAB_BACKEND=gloo cannot send keys from a GPU"),
    ("cp", 2, {"LAB_BUG": "by_arrival"}, "any more: LAB_BUG=local_positions in ulysses"),
    ("fsdp", 3, {"LAB_VARIANT": "zero3_kept"}, "any more: LAB_VARIANT=zero3 with LAB_RECOMPUTE=0"),
    ("fsdp", 3, {"LAB_BUG": "per_rank_norm"}, "LAB_CLIP unset"),
    ("fsdp", 1, {"LAB_BUG": "per_rank_norm", "LAB_CLIP": "1"}, "WORLD_SIZE=1"),
    ("fsdp", 3, {"LAB_BUG": "save_without_barrier"}, "LAB_CHECKPOINT_EVERY unset"),
    ("fsdp", 3, {"LAB_BUG": "resume_repeats_epoch", "LAB_CHECKPOINT_EVERY": "99"}, "above LAB_STEPS"),
    ("fsdp", 3, {"LAB_BUG": "resume_repeats_epoch", "LAB_CHECKPOINT_EVERY": "2", "LAB_MODEL": "line"}, "one batch"),
    ("fsdp", 2, {"LAB_BUG": "lost_shard_tail"}, "divides evenly"),
    ("fsdp", 3, {"LAB_BUG": "stale_gather", "LAB_VARIANT": "zero1"}, "it takes zero3"),
    ("fsdp", 3, {"LAB_BUG": "stale_gather", "LAB_PROOF": "0"}, "LAB_PROOF=0"),
    ("moe", 4, {"LAB_MODEL": "line"}, "LAB_MODEL='line' has no MLP of the lab that experts could replace"),
    ("moe", 4, {"LAB_TOP_K": "9"}, "LAB_TOP_K=9 is more than LAB_EXPERTS=8, allowed: 1 to 8"),
    ("moe", 4, {"LAB_MICROBATCHES": "5"}, "LAB_MICROBATCHES=5 is more than the 4 samples of a rank"),
    ("moe", 4, {"LAB_BATCH": "3"}, "LAB_BATCH=3 is smaller than WORLD_SIZE=4"),
    ("moe", 3, {"LAB_VARIANT": "ep_dp"}, "WORLD_SIZE=3 is not a product of 2 factors"),
    ("moe", 4, {"LAB_VARIANT": "ep_dp_tp"}, "WORLD_SIZE=4 is not a product of 3 factors"),
    ("moe", 4, {"LAB_VARIANT": "ep_tp", "LAB_MESH": "dp2,ep2"}, "LAB_MESH=dp2,ep2 does not fit this variant: it takes ep and tp of two"),
    ("moe", 4, {"LAB_MESH": "pp2,ep2"}, "pp and cp are axes of RUN_MODE=mesh"),
    ("moe", 4, {"LAB_VARIANT": "ep", "LAB_DEVICE": "cuda"}, "gloo cannot send rows from a GPU"),
    ("moe", 4, {"LAB_BUG": "gate_over_itself"}, "LAB_TOP_K=2: it takes 1"),
    ("moe", 4, {"LAB_BUG": "bias_apart"}, "any more: no bias balances the choice any more; LAB_BUG=copies_apart"),
    ("moe", 4, {"LAB_BUG": "local_capacity", "LAB_CAPACITY": "0"}, "LAB_CAPACITY=0: it takes more than 0"),
    ("mesh", 2, {"LAB_VARIANT": "zb_h1"}, "any more: LAB_VARIANT=1f1b; RUN_MODE=pp LAB_VARIANT=zb_h1"),
    ("mesh", 8, {"LAB_MODEL": "line"}, "cannot be cut along three axes"),
    ("mesh", 8, {"LAB_MESH": "tp8"}, "LAB_HEADS=5 cannot be sliced over tp 8"),
    ("mesh", 8, {"LAB_MESH": "cp8"}, "LAB_SEQ=7 positions are fewer than cp 8 ranks"),
    ("mesh", 8, {"LAB_MESH": "cp8"} | MLP, "has no positions to split"),
    ("mesh", 8, {"LAB_MESH": "pp8"}, "LAB_DEPTH=5 layers are fewer than pp 8 stages"),
    ("mesh", 8, {"LAB_MESH": "dp8", "LAB_BATCH": "6"}, "LAB_BATCH=6 is smaller"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "world_size", "settings", "words"), REFUSED)
def test_invalid_settings_are_refused_in_one_sentence(
    mode: str, world_size: int, settings: dict[str, str], words: str
) -> None:
    assert words in refusal(config_of(mode, world_size, **settings))


MAY_BE_IMPOSSIBLE: dict[str, set[str]] = {  # the variants that cannot run with some defaults
    "dp": set(), "tp": {"dtensor"}, "pp": set(load("pp").names) - {"one_microbatch", "gpipe", "1f1b", "zb_h1"},
    "moe": {"ep_dp", "ep_tp", "ep_dp_tp"},
}  # fmt: skip


@pytest.mark.parametrize("model", ["gpt", "mlp"])
@pytest.mark.parametrize("mode", MAY_BE_IMPOSSIBLE)
def test_default_settings_are_never_refused(mode: str, model: str) -> None:
    for world_size in range(1, 9):
        config = Config.read({"RUN_MODE": mode, "WORLD_SIZE": str(world_size), "LAB_MODEL": model})
        refuse(config, load(mode))
        assert set(load(mode).cannot(config)) <= MAY_BE_IMPOSSIBLE[mode]
