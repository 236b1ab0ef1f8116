"""Scripts for GPUs on a machine without one: the CPU does what it honestly can, the rest is refused in a sentence."""

import os
import sys
from pathlib import Path

import pytest
import torch

from distlab.tools.check.watch.cuda_stand_in import Frameworks, names_cuda, on_cpu
from tests.tools.check.cases import SCRIPTS, check

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_what_is_mapped_is_said_once(tmp_path: Path) -> None:
    checked = check(SCRIPTS / "right" / "cuda_ddp.py", 2, tmp_path)
    assert checked.code == 0, checked.said
    assert checked.told.count("there is no GPU here: the CPU does what the script asks of CUDA") == 1


def test_what_has_no_counterpart_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "streams.py"
    script.write_text("import torch\n\ntorch.cuda.set_device(0)\nstream = torch.cuda.current_stream()\n")
    checked = check(script, 2, tmp_path)
    assert checked.code == 2, checked.said
    said = checked.told
    assert "torch.cuda's current_stream at streams.py:4 needs a GPU, of which there is none here" in said


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.Stream()",
        "torch.cuda.CUDAGraph()",
        "torch.cuda.FloatTensor(3)",
        "torch.cuda.get_device_capability()",
    ],
)
def test_what_torch_raises_for_want_of_a_gpu_is_refused(line: str, tmp_path: Path) -> None:
    script = tmp_path / "needs.py"
    script.write_text(f"import torch\n\ntorch.cuda.set_device(0)\n{line}\n")
    checked = check(script, 2, tmp_path)
    assert checked.code == 2, checked.said
    said = checked.told
    assert "at needs.py:4" in said and "needs a GPU, of which there is none here" in said


def test_what_a_checkpoint_and_a_profiler_ask_for_is_there(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\n\ndist.init_process_group('nccl')\n"
        "state = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()\n"
        "drawn = torch.rand(2)\ntorch.cuda.set_rng_state(state[0])\ntorch.cuda.random.set_rng_state_all(state[1])\n"
        "assert not torch.equal(torch.rand(2), drawn)\n"
        "with torch.cuda.nvtx.range('sum'):\n    dist.all_reduce(drawn.cuda())\ntorch.cuda.nvtx.mark('end')\n"
    )
    checked = check(script, 2, tmp_path)
    assert checked.code == 0, checked.said


def test_a_script_that_raises_itself_for_want_of_a_gpu_has_failed(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text("import torch\n\ntorch.cuda.set_device(0)\nraise RuntimeError('CUDA is not available')\n")
    checked = check(script, 2, tmp_path)
    assert checked.code == 1, checked.said


def test_a_script_that_asks_first_has_its_own_way(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nassert device == 'cpu'\n"
        "dist.all_reduce(torch.ones(2, device=device))\n"
    )
    checked = check(script, 2, tmp_path)
    assert checked.code == 0, checked.said
    assert "no GPU here" not in checked.said


def test_a_script_that_ends_without_a_gpu_is_run_once_more(tmp_path: Path) -> None:
    """Whatever it ends with, and by whatever it asks."""
    checked = check(SCRIPTS / "right" / "cuda_asked.py", 2, tmp_path, "3")
    assert checked.code == 0, checked.said
    said = checked.told
    assert "asks for a GPU at cuda_asked.py:17 and ends without one: it is run once more" in said
    assert checked.said.count("There are not enough GPUs") == 2


def test_a_script_that_wants_more_gpus_than_ranks_is_told_so(tmp_path: Path) -> None:
    checked = check(SCRIPTS / "right" / "spawned_halves.py", 2, tmp_path)
    assert checked.code == 1, checked.said
    assert "asks at spawned_halves.py:24 how many GPUs there are, and ends" in " ".join(checked.sentences)
    assert "one a rank, 2 here: run it with WORLD_SIZE as large as" in " ".join(checked.sentences)


def test_a_failure_of_its_own_is_not_run_twice(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torch\n\ntorch.cuda.is_available()\nprint('once')\nraise ValueError('no such file')\n")
    checked = check(script, 2, tmp_path)
    assert checked.code == 1, checked.said
    assert checked.said.count("once") == 2, checked.said
    assert "ValueError: no such file" in " ".join(checked.sentences)


def test_a_framework_is_told_that_ranks_have_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("import os\n\nassert os.environ['ACCELERATE_USE_CPU'] == 'true'\n")
    script = tmp_path / "train.py"
    script.write_text("import accelerate\nimport torch.distributed as dist\n\ndist.init_process_group('gloo')\n")
    checked = check(script, 2, tmp_path)
    assert checked.code == 0, checked.said
    assert "ACCELERATE_USE_CPU=true is set: without a GPU accelerate trains each rank alone" in checked.told


def test_what_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    said: list[str] = []
    Frameworks(said.append).find_spec("accelerate")
    assert not said
    assert os.environ["ACCELERATE_USE_CPU"] == "false"
    assert not any(isinstance(each, Frameworks) for each in sys.meta_path)


def test_devices_that_name_cuda_are_the_cpu() -> None:
    assert [on_cpu(each) for each in ("cuda", "cuda:1", torch.device("cuda", 0), 1)] == ["cpu"] * 4
    kept = ("cpu", torch.device("meta"), None, True, torch.float32)
    assert all(on_cpu(each) is each for each in kept)


def test_a_module_beside_the_script_is_looked_into(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import model\n")
    assert not names_cuda(script)
    (tmp_path / "model.py").write_text("DEVICE = 'cuda'\n")
    assert names_cuda(script)
    script.write_text("from accelerate import Accelerator\n")
    assert not names_cuda(script)
    script.write_text("import torch\n\nprint(torch.accelerator.is_available())\n")
    assert names_cuda(script)
