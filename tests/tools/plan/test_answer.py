"""A requested layout, JSON, training time, and refusals, which name for each fault what is allowed."""

import json
import math
import re
from typing import Any

import pytest

from distlab.cli.plan import main, read_question
from distlab.lab.config import ConfigError
from distlab.tools.plan.costs import Cost, cost
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.memory import memory_by_class
from distlab.tools.plan.model import active, named
from distlab.tools.plan.step_time import executed_flops, model_flops, sent, step_parts

LINE = "--model llama3-70b --gpus 64 --gpu h100 --seq 8192 --global-batch 1024"


def priced(line: str) -> Cost:
    question = read_question(line.split())
    assert question.layout is not None
    return cost(question.job, question.layout)


def test_requested_layout_is_estimated_beside_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE.split(), "--layout", "tp8,pp4,dp2", "--zero", "1", "--interleave", "5", "--tokens", "1e12"]) == 0
    printed = capsys.readouterr().out
    for words in ("layout     tp 8 x pp 4 x zero1 2 x 5 chunks: 512 microbatches", "the largest is ", "fits       yes",
                  "MFU ", " GPU-hours", "beside it  "):  # fmt: skip
        assert words in printed
    assert "tp 8" in read_question([*LINE.split(), "--layout", "pp4,tp8"]).layout.name  # type: ignore[union-attr]
    assert read_question([*LINE.split(), "--layout", "tp8"]).layout == Layout(8, 1, 8, 0), "dp is what is left"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--layout tp8,dp9", ["is of 72 GPUs (tp·pp·dp·cp) and --gpus=64: dp8 would make it"]),
        ("--layout tp16", ["tp16 does not divide the 8 GPUs of a node", "allowed: 1, 2, 4, 8"]),
        ("--layout pp64,dp1 --interleave 2", ["pp64 of 2 chunks is more stages than the 80 layers, allowed: up to 40"]),
        ("--layout dp64 --global-batch 96", ["dp64 does not share --global-batch=96", "allowed: 1, 2, 4, 8, 16, 32"]),
        ("--layout tp2,tp4", ["names tp twice"]),
        ("--layout tp", ["has 'tp', allowed: tpN, ppN, dpN, cpN, epN"]),
        ("--layout cp64,dp1 --seq 8190", ["cp64 does not cut --seq=8190 into 128 equal runs"]),
        ("--layout ep2", ["ep2 does not divide the 1 experts of the model"]),
        ("--layout pp64 --zero 1", ["--zero=1 shards over dp x cp, which is one rank"]),
        ("--layout pp4,dp16 --interleave 3 --global-batch 32", ["--interleave=3 needs a multiple of pp4 microbatches"]),
        ("--base nf4", ["--lora RANK is missing"]),
        ("--gpu a100 --dtype fp8", ["which --gpu='a100-80gb' does not have"]),
        ("--gpu h1000", ["did you mean 'h100'", "any other: --flops and --gpu-memory"]),
        ("--params 7B", ["--model and --params each set the model"]),
        ("--width 100", ["--width is set by --model too"]),
        ("--zero 4 --dtype fp4", ["--zero='4' is not known", "--dtype='fp4' is not known"]),
    ],
)  # fmt: skip
def test_refusals_name_the_allowed_values(more: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    kept = LINE.split()
    for option in ("--gpu", "--seq", "--global-batch"):
        if f"{option} " in f"{more} ":
            at = kept.index(option)
            del kept[at : at + 2]
    assert main([*kept, *more.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("refused    ") for line in lines)
    assert all(any(each in line for line in lines) for each in words), lines


def decoded(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*line.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    return found


def test_json_contains_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = decoded(f"{LINE} --tokens 1e12", capsys)
    picked = next(each for each in found["layouts"] if each["name"] == found["take"])
    assert sum(picked["parts_s"].values()) == pytest.approx(picked["step_s"])
    assert sum(picked["memory_bytes"].values()) == pytest.approx(picked["held_bytes"])
    assert found["training"]["days"] == pytest.approx(1e12 / picked["tokens_per_s"] / 86400)
    assert found["training"]["gpu_hours"] == pytest.approx(64 * 24 * found["training"]["days"])
    assert picked["loses"] == "" and all(each["loses"] for each in found["layouts"] if each is not picked)
    fitting = [each["fits"] for each in found["layouts"]]
    assert fitting == sorted(fitting, reverse=True)
    layout = decoded(f"{LINE} --layout tp8,pp4,dp2 --zero 1", capsys)["layout"]
    assert layout["axes"] == {"tp": 8, "pp": 4, "dp": 2, "cp": 1, "ep": 1, "etp": 1, "zero": 1, "chunks": 1}
    nothing = decoded("--params 70B --gpus 1 --gpu rtx4090", capsys)
    assert nothing["take"] is None and nothing["would_fit"] and nothing["training"] is None


# The effect of each option, compared with the paper that introduced it.


def test_recomputation_repeats_the_forward_pass() -> None:
    none, half, full = (priced(f"{LINE} --layout tp8,pp2 --recompute {each}") for each in ("none", "half", "full"))
    assert full.parts["products"] == pytest.approx(4 / 3 * none.parts["products"])
    assert half.parts["products"] == pytest.approx(3.5 / 3 * none.parts["products"])
    assert full.parts["attention"] == pytest.approx(4.5 / 3.5 * none.parts["attention"])
    assert full.memory["activations"] < half.memory["activations"] < none.memory["activations"]


def test_full_recomputation_stores_no_attention_scores() -> None:
    """Llama 3 8B has 16 GB of activations at 131k positions; the scores of one layer alone would take 2 TB."""
    line = "--model llama3-8b --gpus 8 --gpu h100 --seq 131072 --recompute full --layout cp8"
    assert priced(line).memory["activations"] < 16e9
    assert priced(f"{line} --attention scores").memory["activations"] > 2e11


def test_chunks_divide_the_bubble() -> None:
    plain, chunked = (priced(f"{LINE} --layout tp8,pp4,dp2 --interleave {each}") for each in (1, 5))
    assert chunked.parts["bubble"] == pytest.approx(plain.parts["bubble"] / 5)
    assert chunked.memory["activations"] == pytest.approx(plain.memory["activations"] * (1 + 3 / (4 * 5)))


def test_expert_parallelism_sends_tokens_and_divides_weights() -> None:
    """4·k·b·s·h·(e-1)/e bytes per layer and microbatch, and 1/e of the experts on each rank."""
    line = "--model mixtral-8x7b --gpus 8 --gpu h100 --seq 4096 --global-batch 8"
    one, all_ = (priced(f"{line} --layout dp8,ep{e} --zero 0") for e in (1, 8))
    assert one.sent["expert"] == 0 == one.parts["expert"]
    assert all_.sent["expert"] == 32 * 4 * 2 * 4096 * 4096 * 2 * 7 / 8
    assert all_.parts["expert"] > 0
    experts = 32 * 8 * 3 * 4096 * 14336
    assert one.memory["parameters"] - all_.memory["parameters"] == pytest.approx(2 * experts * 7 / 8)


DEEPSEEK = "--model deepseek-v3 --gpus 256 --gpu h100 --seq 4096 --global-batch 2048 --zero 1 --layout tp2,pp8,dp16"


def test_experts_are_assigned_over_tensor_slices() -> None:
    """With tp2 and dp16, 32 ranks have complete experts (ETP 1), or 16 pairs of ranks have halves (ETP 2)."""
    folded, cut = (priced(f"{DEEPSEEK},{axes}") for axes in ("ep32", "ep16,etp2"))
    assert folded.layout.name == "tp 2 x ep 32 x pp 8 x zero1 16" and "etp 2" in cut.layout.name
    for kind in ("parameters", "gradients"):
        assert folded.memory[kind] == pytest.approx(cut.memory[kind])
    assert folded.parts["products"] < cut.parts["products"], "halves are narrower, of twice as many rows"


def test_tokens_are_sent_per_node_or_per_expert() -> None:
    """A token with 8 experts on 4 nodes reaches 4·(1 - (3/4)^8) = 3.6 nodes, of which 3/4 are other nodes."""
    once, each = (priced(f"{DEEPSEEK},ep32 --dispatcher {name}") for name in ("deepep", "alltoall"))
    assert each.parts["expert"] / once.parts["expert"] == pytest.approx(8 / (4 * (1 - 0.75**8)), rel=0.05)
    near = priced("--model mixtral-8x7b --gpus 8 --gpu h100 --layout dp8,ep8")
    far = priced("--model mixtral-8x7b --gpus 8 --gpus-per-node 1 --gpu h100 --layout dp8,ep8")
    assert far.parts["expert"] > 5 * near.parts["expert"]
    assert priced(f"{DEEPSEEK},ep32 --overlap-ep").parts["expert"] < once.parts["expert"]


def test_expert_gradients_are_summed_over_fewer_ranks() -> None:
    """With ep8 in nodes of 8, the ranks with the same experts are on eight nodes, one GPU on each."""
    line = "--model mixtral-8x7b --gpus 64 --gpu h100 --zero 1 --latency 0us --node-latency 0us --layout dp64"
    whole, sharded = (priced(f"{line},{axes}") for axes in ("ep1", "ep8"))
    assert sharded.sent["data"] < whole.sent["data"] / 4
    assert sharded.parts["data"] > 0.6 * whole.parts["data"]


@pytest.mark.parametrize(("loss", "share"), [("fp32", 1), ("fused", 5 / 12), ("chunked", 1 / 8)])
def test_logits_memory_depends_on_the_loss(loss: str, share: float) -> None:
    plain, other = (priced(f"{LINE} --layout dp64 --zero 3 {more}") for more in ("--loss fp32", f"--loss {loss}"))
    assert other.memory["logits"] == pytest.approx(share * plain.memory["logits"])
    assert priced(f"{LINE} --layout dp64 --zero 3 --software torchtitan --dtype fp8").memory["logits"] == pytest.approx(
        5 / 12 * plain.memory["logits"]
    )


def test_fitted_shares_depend_on_the_software() -> None:
    """An H200 has the chip of an H100; both are faster with NVIDIA's kernels."""
    shares = {
        (card, software): read_question(
            f"--params 7B --gpus 8 --gpu {card} --software {software}".split()
        ).job.gpu.shares
        for card in ("h100", "h200")
        for software in ("torchtitan", "megatron", "mpt")
    }
    assert shares["h100", "megatron"] == shares["h200", "megatron"]
    assert shares["h100", "megatron"].matrix > 1.1 * shares["h100", "torchtitan"].matrix
    assert shares["h100", "mpt"] != shares["h100", "torchtitan"]


def test_every_answer_has_an_error_band(capsys: pytest.CaptureFixture[str]) -> None:
    """The band is the error of its kind; a layout may or may not fit if its memory is within the band of the limit."""
    found = decoded(f"{LINE} --layout tp8,pp4,dp2 --zero 1", capsys)
    assert found["band"]["kind"] == "dense bf16" and found["band"]["step"] > 1.2 and found["band"]["memory"] > 1.05
    step_s, factor = found["layout"]["step_s"], found["band"]["step"]
    assert main([*LINE.split(), "--layout", "tp8,pp4,dp2", "--zero", "1"]) == 0
    printed = capsys.readouterr().out
    low, high = re.search(r"band       ([\d.]+) to ([\d.]+) s", printed).groups()  # type: ignore[union-attr]
    assert float(low) == pytest.approx(step_s / factor, rel=0.01) and float(high) == pytest.approx(
        step_s * factor, rel=0.01
    )
    held = found["layout"]["held_bytes"] / 0.9
    for memory, words in ((held * 1.05, "may or may not"), (held / 1.05, "(as planned: no"), (held * 1.5, "yes"), (held / 1.5, "no, by")):  # fmt: skip
        main([*LINE.split(), "--layout", "tp8,pp4,dp2", "--zero", "1", "--gpu-memory", f"{memory / 1e9:.3f}GB"])
        assert words in capsys.readouterr().out.replace("\n           ", " ").split("\nfits ")[1].split("\n")[0]


def test_groups_over_nodes_use_all_links_of_a_node() -> None:
    """ZeRO-3's gathers use all eight links of a node together; a group with one GPU per node uses one."""
    line = "--model llama3-70b --gpus 64 --gpu h100 --link 1Gbit --latency 0us --node-latency 0us"
    job = read_question(line.split()).job
    spread = step_parts(job, Layout(1, 1, 64, 3))["data"] / sent(job, Layout(1, 1, 64, 3))["data"]
    narrow = step_parts(job, Layout(8, 1, 8, 3))["data"] / sent(job, Layout(8, 1, 8, 3))["data"]
    assert narrow / spread == pytest.approx(8, rel=0.05)


def test_fp8_speeds_up_only_matrix_products() -> None:
    plain, fast = (priced(f"{LINE} --layout dp64 --zero 3 --dtype {each}") for each in ("bf16", "fp8"))
    assert 1.7 < plain.parts["products"] / fast.parts["products"] < 2.1
    assert plain.parts["vocabulary"] == fast.parts["vocabulary"]
    assert plain.parts["attention"] == fast.parts["attention"]


def test_adapters_need_little_gradient_and_optimizer_memory() -> None:
    """The figures in torchtune's README for Llama 3 8B on one GPU: 18.9 GiB with 8-bit moments in host memory, the
    optimizer step in the backward pass and a chunked loss; 16.2 GiB with adapters."""
    line = "--model llama3-8b --gpus 1 --gpu rtx4090 --recompute full --layout dp1 --batch 2 --microbatches 1"
    full = priced(f"{line} --precision bf16 --optimizer paged-adamw8bit --step-in-backward")
    assert full.held_bytes / 2**30 == pytest.approx(18.9, rel=0.1) and full.fits
    adapters = priced(f"{line} --lora 8")
    assert adapters.held_bytes / 2**30 == pytest.approx(16.2, rel=0.1) and adapters.fits
    assert not priced(f"{line} --lora 8 --loss fp32").fits
    lora, qlora = (priced(f"{line} --lora 16 --base {each}") for each in ("bf16", "nf4"))
    assert lora.memory["gradients"] < 1e8 and lora.memory["parameters"] == pytest.approx(16.1e9, rel=0.01)
    assert qlora.memory["parameters"] < 0.4 * lora.memory["parameters"]


def test_memory_with_no_sync_and_with_offload() -> None:
    """Without sync, the weights and gradients of 70B over tp 4 take 35 GB each for any number of shards. With FSDP's
    offload a GPU stores no shard (torchtune: 13.9 GiB for bf16 training of 70B on 8 A100)."""
    line = "--model llama3-70b --gpus 32 --gpu h200 --layout tp4,dp8 --zero 3 --precision bf16 --microbatch 2 --global-batch"
    plain, once = (priced(f"{line} 32{more}") for more in ("", " --no-sync"))
    assert once.held_bytes - plain.held_bytes == pytest.approx(2 * 35.3e9 - plain.memory["gradients"], rel=0.01)
    assert priced(f"{line} 16 --no-sync").memory == priced(f"{line} 16").memory, "of one microbatch nothing waits"
    line = (
        "--model llama3-70b --gpus 8 --gpu a100 --layout dp8 --precision bf16 --recompute full --offload --loss chunked"
    )
    assert priced(f"{line} --zero 3").held_bytes / 2**30 == pytest.approx(10, rel=0.1)
    assert priced(f"{line} --zero 2").memory["parameters"] == pytest.approx(2 * 70.55e9)


def test_optimizer_memory_per_parameter() -> None:
    adam, small, sgd = (priced(f"{LINE} --layout dp64 --optimizer {each}") for each in ("adamw", "adamw8bit", "sgd"))
    count = 70.55e9
    assert [each.memory["optimizer"] / count for each in (adam, small, sgd)] == pytest.approx([12, 6, 4])
    assert priced(f"{LINE} --layout dp64 --offload").memory["optimizer"] == 0


def test_mfu_counts_no_operation_twice() -> None:
    job = read_question([*LINE.split(), "--recompute", "full"]).job
    executed = executed_flops(job.shape, job.num_parameters, job.seq, job.step_tokens, "full")
    assert 1.25 < executed / model_flops(job) < 1.4
    mixtral = read_question(["--model", "mixtral-8x7b", "--gpus", "8", "--gpu", "h100"]).job
    shape, count, _ = named("mixtral-8x7b")
    per_token = model_flops(mixtral) / mixtral.step_tokens - 6 * 32 * 2048 * 4096
    assert per_token == pytest.approx(6 * (active(shape, count) - 32000 * 4096))


def test_overlap_hides_tensor_parallel_messages() -> None:
    waits, hidden = (priced(f"{LINE} --layout tp8,dp8 --zero 1{each}") for each in ("", " --overlap-tp"))
    assert hidden.parts["tensor"] == pytest.approx(waits.parts["tensor"] / 4)


def test_hidden_communication_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Compute hides ZeRO-3's gathers, except for one layer per pass."""
    found = decoded(f"{LINE} --layout dp64 --zero 3", capsys)["layout"]
    assert found["messages_s"]["data"] > 20 * found["parts_s"]["data"] > 0
    assert main([*LINE.split(), "--layout", "tp8,dp8", "--zero", "3"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hidden ")]
    assert "tensor" in line and ", 0% of it overlapped by compute; data" in line


def test_no_time_or_memory_is_negative() -> None:
    for layout in (Layout(8, 2, 2, 1, 2), Layout(1, 1, 64, 3), Layout(2, 4, 8, 2), Layout(1, 64, 1, 0)):
        job = read_question(LINE.split()).job
        assert all(part >= 0 and math.isfinite(part) for part in step_parts(job, layout).values())
        assert all(each >= 0 for each in memory_by_class(job, layout).values())


def test_zero_option_selects_the_stage() -> None:
    question = read_question([*LINE.split(), "--zero", "1"])
    assert list(question.stages) == [1]
    with pytest.raises(ConfigError):
        read_question([*LINE.split(), "--zero", "one"])
