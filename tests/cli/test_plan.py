"""`distlab plan` compared with published cases and the modes' predictions; its choices, reasons and refusals."""

import itertools
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distlab.cli.plan import MOST_RANKS, command, main, read_question, shrunk
from distlab.experiments import cp, dp, fsdp, tp
from distlab.experiments.mesh import MODE
from distlab.lab.config import Config, ConfigError
from distlab.lab.report.reading import to_line
from distlab.lab.report.records import End, Profile, Record, Start, Table
from distlab.lab.workload.model import outline
from distlab.techniques.collectives.costs import FITTED, LATENCY, RATE
from distlab.techniques.pipeline_parallel.costs import bubble
from distlab.techniques.sharded.costs import mixed_precision_bytes
from distlab.techniques.tensor_parallel.costs import tensor_parallel_bytes
from distlab.tools.plan import costs
from distlab.tools.plan.advice import framework, plan, remedies
from distlab.tools.plan.job import Job, Weights
from distlab.tools.plan.layout import KINDS, Layout, layouts
from distlab.tools.plan.memory import memory_by_class, microbatches
from distlab.tools.plan.model import GPT2_VOCABULARY, Shape, guessed
from distlab.tools.plan.step_time import ring_bytes, ring_s, sent, tensor_s


def job_of(line: str) -> Job:
    return read_question(line.split()).job


SHARED = ("dp", "zero1", "zero2", "zero3")
SEVEN = "--params 7B --gpus 64 --gpu-memory 80GB"


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters on 64 ranks: the memory between two steps."""
    memory = memory_by_class(job_of("--params 7.5B --gpus 64 --gpu-memory 80GB"), Layout(1, 1, 64, stage))
    rest = sum(memory[name] for name in ("parameters", "gradients", "optimizer"))
    assert round(rest / 1e9, 1) == gigabytes


def test_dp_of_7b_needs_112_gb_and_does_not_fit() -> None:
    chosen = plan(job_of(SEVEN))
    memory = chosen.costs["dp"].memory
    assert memory["parameters"] + memory["gradients"] + memory["optimizer"] == mixed_precision_bytes(7e9) == 112e9
    assert not chosen.costs["dp"].fits
    assert chosen.pick is not None and chosen.pick.layout.stage == 1
    assert "ZeRO-1" in framework(chosen.pick.layout)[0]


def gpt(layers: int, width: int, heads: int, vocabulary: int = GPT2_VOCABULARY) -> Shape:
    return Shape(layers, width, heads, heads, 4 * width, False, vocabulary, True)


@pytest.mark.parametrize(
    ("params", "layers", "width", "heads"), [("175B", 96, 12288, 96), ("6.7B", 32, 4096, 32), ("13B", 40, 5120, 40)]
)
def test_guessed_shapes_equal_gpt3(params: str, layers: int, width: int, heads: int) -> None:
    """Brown et al. 2020, table 2.1 (its 13B is 5140 wide, which its 40 heads do not divide)."""
    assert job_of(f"--params {params} --gpus 8 --gpu-memory 80GB").shape == gpt(layers, width, heads)


@pytest.mark.parametrize("written", ["10K", "1M", "125M", "350M", "1.3B", "70B", "1T"])
def test_guessed_shapes_have_about_the_requested_parameters(written: str) -> None:
    job = job_of(f"--params {written} --gpus 8 --gpu-memory 80GB")
    assert job.shape.width % job.shape.heads == 0
    assert 0.5 < (job.shape.body + job.shape.ends) / job.num_parameters < 2


def test_guesses_keep_the_requested_sizes() -> None:
    assert guessed(7e9, layers=10).layers == 10
    assert guessed(7e9, width=4096) == gpt(35, 4096, 32)
    assert guessed(7e9, heads=7).width % 7 == 0
    assert guessed(1e6, 2, 100, 10) == gpt(2, 100, 10, 3333)  # a third of its parameters
    assert guessed(1e6, 2, 100, 10, 77) == gpt(2, 100, 10, 77)


def test_gpt3_on_128_gpus_needs_two_axes() -> None:
    """Megatron's tp 8 x pp 16 fits. Tensor parallelism alone fits with ZeRO-3, pipelines alone do not fit, and on 16
    GPUs nothing fits."""
    chosen = plan(job_of("--params 175B --gpus 128 --gpu-memory 80GB"))
    assert [name for name, each in chosen.costs.items() if each.fits] == [
        "tp x zero3",
        *(f"tp x pp x {data}" for data in SHARED),
    ]
    assert chosen.pick is not None and chosen.pick.layout == Layout(2, 1, 64, 3)
    job = job_of("--params 175B --gpus 128 --gpu-memory 80GB")
    megatron = costs.cost(job, Layout(8, 16, 1, 0))
    assert megatron.fits
    assert sum(megatron.memory[name] for name in ("parameters", "gradients", "optimizer")) == pytest.approx(
        18 * (174.38e9 / 128 + 50304 * 12288 / 8),
        rel=1e-4,  # Megatron-LM's gradients are float32; each end of the model is in one stage
    )
    assert megatron.bubble == bubble(16, 4 * 128)
    assert plan(job_of("--params 175B --gpus 16 --gpu-memory 80GB")).pick is None


SIZES = {"LAB_WIDTH": "32", "LAB_HEADS": "4", "LAB_DEPTH": "2", "LAB_SEQ": "8", "LAB_BATCH": "16", "WORLD_SIZE": "4"}


def tiny(**changed: Any) -> tuple[Config, Job]:
    """The settings of the lab's own gpt, and the same model as a job of the planner."""
    config = Config.read(SIZES | {"RUN_MODE": "dp", "LAB_MICROBATCHES": "2"})
    job = job_of(
        f"--params {outline(config).num_parameters()} --gpus 4 --gpu-memory 1GB --layers 2 --width 32 --heads 4 --seq 8"
        " --batch 2 --microbatches 2 --precision fp32 --optimizer sgd"
    )
    return config, replace(job, **changed)


def claim(mode: Any, config: Config, variant: str, name: str) -> float:
    predicted: float = max(
        next(each.value for each in mode.MODE.predict(config) if (each.variant, each.name) == (variant, name))
    )
    return predicted


@pytest.mark.parametrize(
    ("mode", "variant", "stage"), [(dp, "flat", 0), (fsdp, "zero1", 1), (fsdp, "zero2", 2), (fsdp, "zero3", 3)]
)
def test_costs_equal_the_modes_predictions(mode: Any, variant: str, stage: int) -> None:
    """Every layer's number of parameters is a multiple of four here, so there is no padding."""
    config, job = tiny()
    layout = Layout(1, 1, 4, stage)
    memory = memory_by_class(job, layout)
    assert sum(memory[name] for name in ("parameters", "gradients", "optimizer")) == claim(
        mode, config, variant, "rest bytes"
    )
    assert sent(job, layout)["data"] == claim(mode, config, variant, "wire bytes")
    # Another size is another number: the comparison can fail.
    assert sent(replace(job, num_parameters=job.num_parameters + 4), layout)["data"] != sent(job, layout)["data"]


def test_adams_step_counters_are_not_planned() -> None:
    config, job = tiny(weights=Weights(4, masters=False, moment_bytes=8))
    adam = config.model_copy(update={"optimizer": "adamw"})
    tensors = len(list(outline(config).parameters()))
    memory = memory_by_class(job, Layout(1, 1, 4, 0))
    rest = sum(memory[name] for name in ("parameters", "gradients", "optimizer"))
    assert claim(dp, adam, "flat", "rest bytes") == rest + 4 * tensors


def test_tensor_parallel_bytes_equal_the_modes_prediction() -> None:
    """The mode also counts embedding, output layer and loss: half a layer and three numbers per token."""
    config, job = tiny(sequence_parallel=False)
    mode = config.model_copy(update={"run_mode": "tp"})
    boundary = 16 * 8 * 32 * 4
    ends = tensor_parallel_bytes(4, 1, boundary) + 1.5 * 3 * 16 * 8 * 4
    assert sent(job, Layout(4, 1, 1, 0))["tensor"] + ends == claim(tp, mode, "megatron", "wire bytes")


def test_context_parallel_bytes_equal_the_modes_prediction() -> None:
    """Keys and values travel around the ring, and the gradients are summed once over its ranks."""
    config, job = tiny()
    mode = config.model_copy(update={"run_mode": "cp", "microbatches": 1})
    found = sent(job, Layout(1, 1, 1, 0, context=4))
    assert found["data"] + found["context"] == claim(cp, mode, "zigzag", "wire bytes")
    assert found["context"] == 3 * 3 / 4 * 2 * 16 * 8 * 32 * 4 * 2  # 3(c-1)/c of K and V, of two layers


def test_context_parallelism_divides_activations_and_messages() -> None:
    """ZeRO shards over all replicas, whether they have other samples or other positions."""
    job = job_of(f"{SEVEN} --seq 8192")
    whole, cut = Layout(2, 2, 16, 3), Layout(2, 2, 4, 3, context=4)
    assert memory_by_class(job, whole)["activations"] == 4 * memory_by_class(job, cut)["activations"]
    assert {**memory_by_class(job, whole), "activations": 0} == {
        **memory_by_class(job, cut),
        "activations": 0,
    }
    per_microbatch = [sent(job, each)["pipeline"] / microbatches(job, each) for each in (whole, cut)]
    assert per_microbatch[0] == 4 * per_microbatch[1]


def test_attention_hides_all_but_the_last_ring_turn() -> None:
    job, layout = job_of(f"{SEVEN} --seq 131072 --latency 0us"), Layout(1, 1, 8, 0, context=8)
    all_s = ring_bytes(job, layout) / job.link.effective
    over_nodes = replace(job, gpus_per_node=4)
    assert ring_s(over_nodes, layout, attention=1e9) == pytest.approx(all_s / 21)
    assert ring_s(over_nodes, layout, attention=0.0) == pytest.approx(all_s)
    again = replace(job, recompute="full")
    assert ring_bytes(again, layout) == pytest.approx(4 / 3 * ring_bytes(job, layout))


def test_recomputation_repeats_tensor_parallel_sums() -> None:
    """Six all_reduces per layer instead of four; selective recomputation repeats only scores, which need no message."""
    plain, again = job_of(f"{SEVEN} --no-sequence-parallel"), job_of(f"{SEVEN} --no-sequence-parallel --recompute")
    layout = Layout(8, 1, 8, 0)
    assert sent(again, layout)["tensor"] == 1.5 * sent(plain, layout)["tensor"]
    assert tensor_s(again, layout, 0.0) == pytest.approx(1.5 * tensor_s(plain, layout, 0.0))
    assert sent(job_of(f"{SEVEN} --no-sequence-parallel --recompute selective"), layout) == sent(plain, layout)


def test_assumed_peak_depends_on_the_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """NVIDIA's data sheet of the A100: 312 TFLOP/s in bf16 and fp16, 156 in TF32."""
    mixed, single, with_flops = (
        job_of(f"{SEVEN} {more}") for more in ("", "--precision fp32", "--precision fp32 --flops 19.5T")
    )
    assert (mixed.gpu.flops, single.gpu.flops, with_flops.gpu.flops) == (312e12, 156e12, 19.5e12)
    for more, words in (
        ("", "GPU        assumed (A100: NVIDIA, data sheet"),
        ("--precision fp32", "in TF32 half of its peak, where PyTorch is allowed it): name yours with --gpu"),
        ("--precision fp32 --flops 19.5T", "GPU        peak given; else assumed (A100"),
        ("--gpu h200", "GPU        H200: NVIDIA, data sheet"),
        ("--gpu mi300x", "shares of the peak are those of A100"),
    ):
        assert main(f"{SEVEN} {more}".split()) == 0
        assert words in re.sub(r"\n {11}", " ", capsys.readouterr().out)


def test_a_slow_link_changes_the_choice() -> None:
    fast, slow = (plan(job_of(f"{SEVEN} --link {rate}")) for rate in ("400Gbit", "10Gbit"))
    assert slow.costs["zero3"].exposed_s > 10 * fast.costs["zero3"].exposed_s
    assert slow.costs["zero3"].compute_s == fast.costs["zero3"].compute_s
    assert slow.pick is not None and slow.pick.layout.pipeline > 1
    assert plan(job_of(f"{SEVEN} --link 100Tbit --latency 0us")).costs["dp"].exposed_s == 0


def test_a_small_model_on_one_and_eight_gpus() -> None:
    alone = plan(job_of("--params 100M --gpus 1 --gpu-memory 80GB"))
    assert set(alone.left_out) >= {"tp x dp", "pp x dp"}
    assert alone.pick is not None and alone.pick.layout.name == "dp" and alone.pick.sent_bytes == 0
    small = plan(job_of("--params 100M --gpus 8 --gpu-memory 80GB"))
    assert small.pick is not None and "DDP" in framework(small.pick.layout)[0]


def test_remedies_are_printed_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--params 70B --gpus 8 --gpu-memory 80GB --batch 4"
    lines = list(remedies(job_of(line)))
    assert lines[0].startswith("--gpus 16 --recompute --batch 1: then ")
    leaner = f"{line} --recompute --batch 1"
    assert plan(job_of(f"{leaner} --gpus 16")).pick is not None
    assert plan(job_of(leaner)).pick is None
    assert [words.split(" ")[0] for words in lines[:3]] == ["--gpus", "--offload", "GPUs"]
    assert all("a different training" in words for words in lines[3:])
    assert main(line.split()) == 0
    printed = capsys.readouterr().out
    assert "take       nothing:" in printed and "would fit  --gpus 16" in printed
    # Recomputation comes first if it is enough.
    assert next(remedies(job_of("--params 7B --gpus 2 --gpu-memory 80GB --batch 4"))).startswith("--recompute")


def test_all_faults_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (
        "--gpus 0 --gpu-memory 80Gbit --link 100 --precison mixed --recompute some --utilisation 140% --calibrate"
        " /absent"
    )
    assert main(wrong.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("refused    ") for line in lines)
    for words in (
        "--model, --config or --params is missing", "--gpus='0' is nothing", "--gpu-memory='80Gbit' is not a size", "--link='100' is not a rate",
        "did you mean '--precision'?", "--recompute='some'", "--utilisation='140%'", "/absent is not the folder of a run",
    ):  # fmt: skip
        assert any(words in line for line in lines), words


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--width 100 --heads 3", "is not a multiple of --heads=3"),
        ("--gpus 12", "does not fill nodes"),
        ("--reserve 100%", "leaves no memory"),
        ("--params seven", "is not a number"),
        ("--gpus 1.5", "is not a whole number"),
        ("--link 50Gb/s", "is not a rate"),
        ("--latency 5", "is not a time"),
        ("--seq", "expected one argument"),
    ],
)
def test_invalid_options_are_refused(more: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job_of(f"{SEVEN} {more}")


def test_units_of_options() -> None:
    job = job_of(
        "--params 1.5b --gpus 8 --gpu-memory 80GiB --link 400Gbps --node-link 50GB/s --latency 2ms --utilisation 0.5"
    )
    assert (job.num_parameters, job.gpu_memory_bytes) == (1.5e9, 80 * 2**30)
    assert job.link.bytes_per_s == job.node_link.bytes_per_s == 50e9
    assert (job.link.latency_s, job.gpu.shares.matrix) == (2e-3, 0.5)


def run_of(folder: Path, mode: str, *records: Record) -> Path:
    """A folder of a run with one rank's records."""
    folder.mkdir()
    config = {
        "LAB_MODEL": "gpt", "LAB_SEQ": 64, "LAB_BATCH": 16, "LAB_RECOMPUTE": False, "LAB_WIDTH": 128, "LAB_DEPTH": 6,
        "LAB_HEADS": 4,
    }  # fmt: skip
    start = Start(0, "made-up", mode, 2, "host", config, {}, {}, "gpt, 1.5M parameters")
    lines = [to_line(record) for record in (start, *records, End(0, 0.0, None, 0.0, 0.0))]
    (folder / "rank0.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_calibration_replaces_data_sheets(tmp_path: Path) -> None:
    table = Table(FITTED, ["variant", "rounds", LATENCY, RATE, "typically off by"], [["gloo", 2, 250.0, 0.0125, "9%"]])
    comm = run_of(tmp_path / "comm", "comm", table)
    seconds = {"forward": 0.02, "backward": 0.04}
    trained = run_of(
        tmp_path / "dp", "dp", Profile("flat", seconds), Profile("naive", {"forward": 9.0, "backward": 9.0})
    )
    job, sources, *_ = read_question([*SEVEN.split(), "--calibrate", str(comm), str(trained)])
    assert job.link == job.node_link
    assert (job.link.latency_s, job.link.bytes_per_s) == (250e-6, 12.5e6)
    # Per token: 6 FLOP per parameter except the embedding's, and 7·s·h per layer of attention.
    body = 12 * 128**2 * 6 + 128 * (13 * 6 + 2 + 64)
    flops = 6 * (body + 256 * 128) + 7 * 64 * 128 * 6
    assert job.gpu.flops == pytest.approx(flops * 8 * 64 / 0.06)
    assert (job.gpu.shares.matrix, job.gpu.told) == (1.0, "measured")
    assert len(sources) == 2


@pytest.mark.parametrize(
    ("mode", "records", "words"),
    [
        ("comm", [], "has no fitted all_reduce"),
        ("comm", [Table(FITTED, ["variant", LATENCY, RATE], [["gloo", 1.0, -2.0]])], "did not grow with size"),
        ("comm", [Table(FITTED, ["variant", LATENCY, RATE], [["gloo", "fast", 1.0]])], "where a fitted number belongs"),
        ("tp", [Profile("megatron", {"forward": 1.0, "backward": 2.0})], "it takes a finished run, of comm"),
        ("dp", [], "it takes a finished run, of comm"),
    ],
)
def test_a_run_without_usable_figures_is_refused(tmp_path: Path, mode: str, records: list[Record], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_question([*SEVEN.split(), "--calibrate", str(run_of(tmp_path / "run", mode, *records))])


def test_plan_needs_no_torch() -> None:
    program = f"import sys, distlab.cli.plan as plan; plan.main({SEVEN.split()}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "take       zero1:" in done.stdout and "see it     RUN_MODE=fsdp LAB_VARIANT=zero1 make run" in done.stdout


# `--see`: the picked layout, reduced to at most 8 ranks, as a command that runs it.


def settings(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(line) if "=" in word)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(8, 16, 32, 1), (2, 2, 1, 2)),
        (Layout(1, 1, 64, 3), (8, 1, 1, 1)),
        (Layout(8, 1, 2, 0), (2, 1, 1, 4)),
        (Layout(1, 3, 2, 0), (2, 3, 1, 1)),
        (Layout(1, 1, 1, 0), (1, 1, 1, 1)),
        (Layout(8, 1, 4, 0, 2), (2, 1, 2, 2)),
        (Layout(8, 2, 4, 1, 2), (1, 2, 2, 2)),  # four axes of two ranks would be 16
    ],
)
def test_see_keeps_every_axis(layout: Layout, sizes: tuple[int, ...]) -> None:
    assert tuple(shrunk(layout).values()) == sizes
    assert math.prod(sizes) <= MOST_RANKS


def test_see_prints_a_valid_run_for_every_kind() -> None:
    job, *_ = read_question([*SEVEN.split(), "--recompute"])
    for (_, tensor, pipeline, stage), context in itertools.product(KINDS, (False, True)):
        environment = settings(command(next(layouts(job, tensor, pipeline, stage, context)), job))
        config = Config.read(environment)
        assert ("cp" in environment["LAB_MESH"]) == context
        assert MODE.refuse(config) == []
        assert not set(config.variant) & set(MODE.cannot(config))
        assert config.recompute
        assert (f"zero{stage}" in config.variant) == bool(stage)


@pytest.mark.parametrize("see", [True, False])
def test_see_adds_the_command_at_the_end(see: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN.split(), *(["--see"] if see else [])]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert ("RUN_MODE=mesh" in last) == see
    assert not see or settings(last)["LAB_MESH"] == "dp8"


def test_see_shows_long_samples_with_context_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    long = "--seq 131072 --recompute selective --node-link 900GB/s --link 100Gbit --see"
    assert main([*SEVEN.split(), *long.split()]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert settings(last)["LAB_MESH"] == "dp2,cp2,tp2"


@pytest.mark.parametrize("more", ["", "--tokens 1e12 --see", "--layout tp8,pp4,dp2 --zero 1"])
def test_the_answer_is_no_wider_than_a_terminal(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"--model llama3-70b --gpus 64 --gpu h100 {more}".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith(("see it", "together"))] == []
    assert any(line.startswith(" " * 11) for line in lines)


def test_the_score_is_no_wider_than_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--score"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
