"""The plan considers every layout: an exhaustive search gives the same result."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from distlab.cli.plan import read_question
from distlab.tools.plan import advice, costs
from distlab.tools.plan.advice import SLACK, plan
from distlab.tools.plan.job import Job
from distlab.tools.plan.layout import KINDS, Layout, layouts
from distlab.tools.plan.memory import layers, memory_by_class, microbatches, own_parameters
from distlab.tools.plan.step_time import compute_parts, data_s, link_of, sent, tensor_s


def job_of(line: str) -> Job:
    return read_question(line.split()).job


def every_layout(job: Job, most: int = 1) -> Iterator[Layout]:
    """Try all t, p, ZeRO stages, and c up to `most`."""
    in_node = min(job.gpus, job.gpus_per_node)
    for t, c in itertools.product(range(1, in_node + 1), range(1, most + 1)):
        for p in range(1, job.gpus // (t * c) + 1):
            whole = job.gpus % (t * c * p) == 0 and job.shape.heads % t == 0 and job.shape.layers >= p
            if whole and in_node % t == 0 and (c == 1 or job.seq % (2 * c) == 0):
                replicas = job.gpus // (t * c * p)
                if job.global_samples % (job.samples * replicas):
                    continue
                yield from (Layout(t, p, replicas, stage, c) for stage in range(4 if replicas * c > 1 else 1))


def searched(job: Job) -> Layout | None:
    """The simplest layout that fits within the slack of the fastest; of equally simple ones the fastest. Samples are
    cut only if nothing else fits."""
    return among(job, every_layout(job)) or among(job, every_layout(job, job.gpus))


def among(job: Job, considered: Iterable[Layout]) -> Layout | None:
    fitting = [each for each in (costs.cost(job, layout) for layout in considered) if each.fits]
    fastest = min((each.step_s for each in fitting), default=0.0)
    near = [each for each in fitting if each.step_s <= SLACK * fastest]
    best = min(near, key=lambda each: (each.layout.effort, each.step_s), default=None)
    return None if best is None else best.layout


GRID = [
    f"--params {params} --gpus {gpus} --gpu-memory {memory}"
    for params in ("350M", "7B", "30B", "65B", "100B", "175B")
    for gpus in (1, 2, 5, 6, 8, 24, 48, 96)
    for memory in ("16GB", "80GB")
]


@pytest.mark.parametrize("more", ["", "--recompute --link 10Gbit", "--gpus-per-node 6 --heads 36"])
def test_pick_equals_an_exhaustive_search(more: str) -> None:
    jobs = [job_of(f"{line} {more}") for line in GRID if not (more.startswith("--gpus") and line.split()[3] == "8")]
    found = [searched(each) for each in jobs]
    assert [None if pick is None else pick.layout for pick in (plan(each).pick for each in jobs)] == found
    assert found.count(None) > 5 and len(set(found)) > 15


def test_omitting_kinds_changes_the_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 billion parameters on 48 GPUs take 67.4 GB with tp x ZeRO-3; without that kind the pick has a pipeline."""
    job = job_of("--params 100B --gpus 48 --gpu-memory 80GB")
    pick = plan(job).pick
    assert pick is not None and pick.layout == searched(job) == Layout(2, 1, 24, 3)
    assert round(pick.held_bytes / 1e9, 1) == 67.4
    monkeypatch.setattr(advice, "KINDS", [kind for kind in KINDS if not (kind[1] or kind[2]) or kind[3] < 2])
    without = plan(job).pick
    assert without is not None and without.layout.pipeline > 1


def test_all_combinations_are_considered_once() -> None:
    assert len(KINDS) == len({kind[1:] for kind in KINDS}) == 16
    considered = [
        layout for kind in KINDS for layout in layouts(job_of("--params 7B --gpus 16 --gpu-memory 80GB"), *kind[1:])
    ]
    assert len(considered) == len(set(considered))
    assert set(considered) == set(every_layout(job_of("--params 7B --gpus 16 --gpu-memory 80GB")))


@pytest.mark.parametrize("gpus", [1, 7])
def test_zero_needs_more_than_one_replica(gpus: int) -> None:
    """If t or p takes all GPUs, ZeRO would be the same layout under another name."""
    job = job_of(f"--params 1B --gpus {gpus} --gpu-memory 80GB --heads 7 --layers 7")
    considered = [layout for kind in KINDS for layout in layouts(job, *kind[1:])]
    assert all(layout.replicas > 1 for layout in considered if layout.stage)
    assert len(considered) == len(set(considered)) == (1 if gpus == 1 else 6)
    left_out = plan(job).left_out
    assert len(left_out) == (15 if gpus == 1 else 10)
    if gpus > 1:
        assert {left_out[f"tp x zero{stage}"] for stage in (1, 2, 3)} == {
            "t must divide the 7 GPUs of a node and the 7 heads, ZeRO needs two replicas"
        }
        assert left_out["tp x pp x zero3"].endswith("t·p must divide the 7 GPUs, and p must be at most the 7 layers")


def test_a_tensor_group_stays_in_one_node() -> None:
    """With six GPUs per node, groups of four would cross nodes; groups of two or three do not."""
    job = job_of("--params 30B --gpus 24 --gpu-memory 80GB --gpus-per-node 6 --heads 12")
    assert {layout.tensor for layout in layouts(job, True, False, 1)} == {2, 3, 6}
    assert [link_of(job, ranks) == job.node_link for ranks in (2, 3, 4, 6, 12, 24)] == [
        True, True, False, True, False, False,
    ]  # fmt: skip
    alone = replace(job, gpus=4)  # one node, partly filled
    assert {layout.tensor for layout in layouts(alone, True, False, 0)} == {2, 4}
    assert link_of(alone, 4) == job.node_link
    prime = job_of("--params 30B --gpus 24 --gpu-memory 80GB --gpus-per-node 6 --heads 7")
    assert plan(prime).left_out["tp x dp"] == "t must divide the 6 GPUs of a node and the 7 heads"


def test_a_pipeline_saves_zero3_no_bytes() -> None:
    """ZeRO-3 gathers 1/p of the layers for p times as many microbatches. ZeRO-1 sums once per step and sends 1/p."""
    job = job_of("--params 7B --gpus 64 --gpu-memory 80GB --vocabulary 1 --precision fp32")
    job = replace(job, num_parameters=job.shape.body)
    for stage, saved in ((1, 4), (3, 1)):
        alone, piped = (sent(job, layout)["data"] for layout in (Layout(1, 1, 64, stage), Layout(1, 4, 16, stage)))
        assert alone / (63 / 64) == pytest.approx(saved * piped / (15 / 16), rel=1e-4)
    once, summed = (sent(job, Layout(1, 4, 16, stage))["data"] for stage in (1, 2))
    assert once == summed, "ZeRO-2's gradients stay whole in a pipeline until the last microbatch"


def test_the_first_gather_of_a_pass_is_exposed() -> None:
    """With one layer per stage all gathers are exposed, with eight layers one eighth, however long the compute."""
    job = job_of("--params 1B --gpus 8 --gpu-memory 80GB --layers 8 --latency 0us --node-latency 0us")
    for pipeline, depth in ((4, 2), (2, 4), (1, 8)):
        layout = Layout(1, pipeline, 8 // pipeline, 3)
        gathers_s = 2 / 3 * sent(job, layout)["data"] / job.node_link.effective
        assert data_s(job, layout, 1e9) == pytest.approx(gathers_s / depth)


LLAMA = "--params 405B --layers 126 --width 16384 --heads 128 --seq 8192 --gpus 16384 --gpu-memory 80GB"


def test_llama_3_405b_layout_is_considered() -> None:
    """Dubey et al. 2024, table 4: 16,384 GPUs as tp 8 x pp 16 x dp 128, a global batch of 2,048 samples, 16 per
    replica; 126 layers in 16 stages."""
    job = job_of(f"{LLAMA} --global-batch 2048")
    published = Layout(8, 16, 128, 1)
    assert published in set(layouts(job, True, True, 1))
    assert microbatches(job, published) == 16
    assert layers(job, published) == 8
    assert plan(job).left_out["dp"].startswith("the replicas must share the batch of 2048 samples")
    fuller = compute_parts(job, published)["products"] / compute_parts(job, Layout(8, 1, 2048, 1))["products"]
    assert fuller == pytest.approx(8 * 16 / 126), "every rank waits for the stages of 8 layers"


@pytest.mark.parametrize("layout", [Layout(1, 4, 4, 0), Layout(2, 4, 2, 1), Layout(1, 4, 4, 2), Layout(1, 4, 4, 3)])
def test_uneven_stages_cost_as_much_as_the_largest(layout: Layout) -> None:
    """10 layers in 4 stages cost as much as 12 in stages of 3, except for the output layer: it is in the last stage,
    which has only one layer."""
    shape = "--gpus 16 --gpu-memory 80GB --width 4096 --heads 32 --vocabulary 1000 --global-batch 64"
    ends = 1000 * 4096
    uneven, even = (
        costs.cost(replace(job_of(f"--params 2B --layers {n} {shape}"), num_parameters=n * 2e8 + ends), layout)
        for n in (10, 12)
    )
    assert uneven.memory == pytest.approx(even.memory)
    assert uneven.sent == pytest.approx(even.sent)
    assert uneven.parts["vocabulary"] == 0 < even.parts["vocabulary"]
    for figure in ("products", "attention", "elementwise", "tensor", "pipeline"):
        assert uneven.parts[figure] == pytest.approx(even.parts[figure]), figure


def test_balanced_stages_share_the_output_layer() -> None:
    """Of 12 layers in 4 stages, the last has 3 and the output layer; balanced, each has a quarter of that layer."""
    shape = "--params 2B --layers 12 --gpus 16 --gpu-memory 80GB --width 4096 --heads 32 --global-batch 64"
    plain, balanced = (costs.cost(job_of(f"{shape} {more}"), Layout(1, 4, 4, 0)) for more in ("", "--balanced"))
    assert plain.parts["vocabulary"] == pytest.approx(4 * balanced.parts["vocabulary"])


def test_replicas_divide_the_global_batch() -> None:
    job = job_of("--params 7B --gpus 64 --gpu-memory 80GB --global-batch 96")
    replicas = {layout.replicas for kind in KINDS for layout in layouts(job, *kind[1:])}
    assert replicas and all(96 % each == 0 for each in replicas) and 64 not in replicas
    assert job.on(128).global_samples == 96
    assert job_of("--params 7B --gpus 64 --gpu-memory 80GB").on(128).global_samples == 512


@pytest.mark.parametrize(
    ("layout", "bytes_a_parameter"),
    [
        (Layout(8, 1, 8, 0), 18),  # Megatron-LM
        (Layout(8, 1, 8, 1), 6 + 12 / 8),  # with its distributed optimizer
        (Layout(1, 1, 64, 0), 16),
        (Layout(1, 1, 64, 1), 4 + 12 / 64),  # DeepSpeed's ZeRO-1
        (Layout(8, 1, 8, 3), 16 / 8),
    ],
)
def test_megatron_sums_gradients_in_float32(layout: Layout, bytes_a_parameter: float) -> None:
    job = job_of("--params 7B --gpus 64 --gpu-memory 80GB")
    memory = memory_by_class(job, layout)
    rest = sum(memory[name] for name in ("parameters", "gradients", "optimizer"))
    assert rest == pytest.approx(bytes_a_parameter * own_parameters(job, layout))


def test_sequence_parallelism_sends_a_quarter_more_bytes() -> None:
    """Korthikanti et al. 2022, section 4.2.2: inputs that are not stored are gathered again."""
    job = job_of("--params 7B --gpus 64 --gpu-memory 80GB")
    whole = replace(job, sequence_parallel=False)
    layout = Layout(8, 1, 8, 0)
    assert sent(job, layout)["tensor"] == pytest.approx(1.25 * sent(whole, layout)["tensor"])
    assert tensor_s(job, layout, 0.0) == tensor_s(whole, layout, 0.0), "under the compute of the backward pass"
