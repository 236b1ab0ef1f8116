"""Scripts for GPUs on a machine without one: calls with a CPU equivalent run, the others are refused with a message."""

import os
import sys
from pathlib import Path

import pytest
import torch

from distlab.tools.check.watch.cuda_stand_in import Frameworks, names_cuda, on_cpu
from tests.tools.check.cases import SCRIPTS, assert_ended, check, check_text

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


RIGHT = SCRIPTS / "right"
BEGIN = "import torch\nimport torch.distributed as dist\n\n"
WITHOUT = "needs a GPU, and this machine has none"
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {  # exit code, script, messages
    "no CPU equivalent": (
        2, "torch.cuda.set_device(0)\nstream = torch.cuda.current_stream()\n",
        (f"torch.cuda's current_stream at train.py:5 {WITHOUT}",),
    ),
    **{
        line: (2, f"torch.cuda.set_device(0)\ntorch.cuda.{line}\n", ("at train.py:5", WITHOUT))
        for line in ("Stream()", "CUDAGraph()", "FloatTensor(3)", "get_device_capability()")
    },
    "calls of checkpoints and profilers": (
        0, "dist.init_process_group('nccl')\nstate = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()\n"
        "drawn = torch.rand(2)\ntorch.cuda.set_rng_state(state[0])\ntorch.cuda.random.set_rng_state_all(state[1])\n"
        "assert not torch.equal(torch.rand(2), drawn)\n"
        "with torch.cuda.nvtx.range('sum'):\n    dist.all_reduce(drawn.cuda())\ntorch.cuda.nvtx.mark('end')\n", (),
    ),
    "raises its own error without a GPU": (
        1, "torch.cuda.set_device(0)\nraise RuntimeError('CUDA is not available')\n", (),
    ),
    "a failure of its own": (
        1, "torch.cuda.is_available()\nprint('once')\nraise ValueError('no such file')\n",
        ("ValueError: no such file",),
    ),
    "a framework": (
        0, "import accelerate\n\ndist.init_process_group('gloo')\n",
        ("check sets ACCELERATE_USE_CPU=true: without it accelerate trains each rank alone",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls_without_a_cpu_equivalent_are_refused_and_the_rest_runs(name: str, tmp_path: Path) -> None:
    code, text, messages = CASES[name]
    (tmp_path / "accelerate.py").write_text("import os\n\nassert os.environ['ACCELERATE_USE_CPU'] == 'true'\n")
    checked = check_text(BEGIN + text, tmp_path)
    assert_ended(checked, code, *messages)
    assert checked.output.count("once\n") in (0, 2), "a failure of its own is not run twice"


def test_a_script_that_queries_the_gpu_runs_on_its_own_cpu_path(tmp_path: Path) -> None:
    query = "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nassert device == 'cpu'\n"
    reduction = "dist.init_process_group('gloo')\ndist.all_reduce(torch.ones(2, device=device))\n"
    checked = check_text(BEGIN + query + reduction, tmp_path)
    assert_ended(checked, 0)
    assert "has no GPU" not in checked.output


@pytest.mark.parametrize(
    ("name", "words", "code", "message", "times"),
    [
        ("cuda_ddp", [], 0, "this machine has no GPU: check runs the script's CUDA calls on the CPU", 1),
        ("cuda_asked", ["3"], 0, "asks for a GPU at cuda_asked.py:17 and ends without one: check runs it again", 1),
        ("cuda_asked", ["3"], 0, "There are not enough GPUs", 2),  # with any ending, and any way to query
        ("spawned_halves", [], 1, "asks at spawned_halves.py:24 how many GPUs there are, and ends", 1),
        ("spawned_halves", [], 1, "one per rank, 2 here: set WORLD_SIZE to the number that the script needs", 1),
    ],
)
def test_mapped_calls_and_second_runs_are_reported(
    name: str, words: list[str], code: int, message: str, times: int, tmp_path: Path
) -> None:
    checked = check(RIGHT / f"{name}.py", 2, tmp_path, *words)
    assert_ended(checked, code)
    assert checked.one_line.count(message) == times


def test_a_variable_that_is_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    messages: list[str] = []
    Frameworks(messages.append).find_spec("accelerate")
    assert not messages
    assert os.environ["ACCELERATE_USE_CPU"] == "false"
    assert not any(isinstance(each, Frameworks) for each in sys.meta_path)


def test_devices_that_name_cuda_are_the_cpu() -> None:
    assert [on_cpu(each) for each in ("cuda", "cuda:1", torch.device("cuda", 0), 1)] == ["cpu"] * 4
    kept = ("cpu", torch.device("meta"), None, True, torch.float32)
    assert all(on_cpu(each) is each for each in kept)


def test_modules_next_to_the_script_are_searched(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import model\n")
    assert not names_cuda(script)
    (tmp_path / "model.py").write_text("DEVICE = 'cuda'\n")
    assert names_cuda(script)
    script.write_text("from accelerate import Accelerator\n")
    assert not names_cuda(script)
    script.write_text("import torch\n\nprint(torch.accelerator.is_available())\n")
    assert names_cuda(script)
