"""The explanation of the choice: the rows of the table, the reason, and remedies that make the model fit."""

from dataclasses import replace

import pytest

from distlab.cli.plan import main
from distlab.tools.plan import advice
from distlab.tools.plan.advice import framework, plan, reason, remedies
from distlab.tools.plan.answer import answer_lines
from distlab.tools.plan.layout import KINDS, layouts
from tests.documents import faults
from tests.tools.plan.test_layouts import GRID, job_of

BETWEEN = "--params 20B --gpus 16 --gpu-memory 48GB"
STRATEGIES = ("dp  ", "zero1  ", "zero2  ", "zero3  ", "tp ", "pp ", "cp ")


def test_table_contains_every_named_layout() -> None:
    """With little memory, the pick is neither the simplest layout of its kind nor the fastest."""
    longest = 0
    for line in [*GRID, BETWEEN]:
        job = job_of(line)
        chosen = plan(job)
        names = [each.layout.name for each in chosen.shown]
        assert [row.split("  ")[0] for row in answer_lines(job, [], chosen) if row.startswith(STRATEGIES)] == names
        assert len(names) == len(set(names))
        longest = max(longest, len(names))
        if chosen.pick is not None:
            fastest = min(chosen.fitting, key=lambda each: each.step_s)
            assert {chosen.pick.layout.name, fastest.layout.name} <= set(names)
        else:
            assert min(each.held_bytes for each in chosen.shown) == min(
                each.held_bytes for each in chosen.costs.values()
            )
    assert 8 <= longest <= 11
    chosen = plan(job_of(BETWEEN))
    pick, costs = chosen.pick, chosen.costs
    assert pick is not None and pick is costs["tp x zero2"]
    assert costs["tp x zero1"].fits
    assert costs["tp x zero3"].step_s < pick.step_s < costs["tp x zero1"].step_s / advice.SLACK


def test_gains_below_one_percent_are_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    hair = job_of("--params 7B --gpus 16 --gpu-memory 60GB --node-link 27GB/s")
    chosen = plan(hair)
    assert chosen.pick is not None and min(each.step_s for each in chosen.fitting) < chosen.pick.step_s
    assert "faster, but changes" not in reason(chosen, hair)
    more = job_of("--params 7B --gpus 64 --gpu-memory 80GB")
    assert "zero3 would be 3% faster, but changes the model more" in reason(plan(more), more)
    monkeypatch.setattr(advice, "NOTABLE", 1e-9)
    assert "would be 0% faster" in reason(chosen, hair)


def test_each_kind_has_a_framework_and_modes() -> None:
    job = job_of("--params 7B --gpus 64 --gpu-memory 80GB")
    for _, tensor, pipeline, stage in KINDS:
        layout = next(layouts(job, tensor, pipeline, stage))
        tool, commands = framework(layout)
        assert [fault for command in commands for fault in faults(command)] == []
        assert len(commands) == max(1, tensor + pipeline + (stage > 0))
        assert ("fully_shard" in tool) == (stage == 3 or (stage == 2 and pipeline))


def test_context_parallelism_only_if_nothing_else_fits() -> None:
    line = "--params 7B --gpus 64 --gpu-memory 80GB --recompute selective --seq"
    short, long = plan(job_of(f"{line} 65536")), plan(job_of(f"{line} 131072"))
    assert not any(each.layout.context > 1 for each in short.costs.values())
    assert long.pick is not None and long.pick.layout.context == 16 and "cp 16 x zero2 4" in long.pick.layout.name
    assert "nothing that keeps samples whole fits; cp x dp does not fit" in reason(long, job_of(f"{line} 131072"))
    tool, commands = framework(long.pick.layout)
    assert "context_parallel" in tool
    assert [fault for command in commands for fault in faults(command)] == []
    assert "RUN_MODE=cp make run" in commands
    odd = plan(job_of(f"{line} 131071"))
    assert odd.pick is None and not any(each.layout.context > 1 for each in odd.costs.values())


@pytest.mark.parametrize("params", ["13B", "70B"])
@pytest.mark.parametrize("gpus", [1, 2, 5, 8])
@pytest.mark.parametrize("more", ["", "--batch 8", "--recompute", "--gpus-per-node 6"])
def test_each_remedy_makes_the_model_fit(params: str, gpus: int, more: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten GPUs, twice five, would fill two nodes of eight only in part, so sixteen are named. On one GPU there is no
    ZeRO that could offload."""
    line = f"--params {params} --gpus {min(gpus, 6) if 'node' in more else gpus} --gpu-memory 24GB {more}"
    job = job_of(line)
    lines = list(remedies(job))
    options = [words.split(":")[0] for words in lines if words.startswith("--")]
    for option in options:
        main([*line.split(), *option.split()])
        assert "take       nothing" not in (printed := capsys.readouterr().out) and "refused" not in printed, option
    assert any(option.startswith("--gpus") for option in options)
    size = next(words for words in lines if words.startswith("GPUs of"))
    leaner = f"{line} --recompute --batch 1" if "with" in size else line
    gigabytes = {"GB": 1.0, "TB": 1e3}[size.split()[3].rstrip(",:")] * float(size.split()[2])
    assert plan(replace(job_of(leaner), gpu_memory_bytes=gigabytes * 1.01e9)).pick is not None
    assert plan(replace(job_of(leaner), gpu_memory_bytes=gigabytes * 0.98e9)).pick is None


def test_other_remedies_do_not_assume_recomputation() -> None:
    lines = list(remedies(job_of("--params 70B --gpus 16 --gpu-memory 80GB --precision fp32")))
    assert lines[0].startswith("--recompute: then ")
    assert lines[-1].startswith("GPUs of 86.2 GB: ")
    assert not any("recompute" in words for words in lines[1:])
    large = "--params 1T --gpus 3072 --gpu-memory 80GB --layers 128 --width 25600 --heads 160"
    assert [words.split(":")[0] for words in remedies(job_of(large))] == [
        "--recompute",
        "--gpus 6144",
        "GPUs of 46.3 GB",
    ]


def test_kinds_left_out_for_one_reason_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--params", "1B", "--gpus", "7", "--gpu-memory", "80GB", "--heads", "7", "--layers", "7"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert [line.split(": ")[0] for line in lines] == [
        "left out   tp x zero1, tp x zero2, tp x zero3",
        "left out   pp x zero1, pp x zero2, pp x zero3",
        "left out   tp x pp x dp, tp x pp x zero1, tp x pp x zero2, tp x pp x zero3",
    ]
