"""Scripts under `distlab drill`: wrong ones from public reports, each with its corrected version, and right ones."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset

from distlab.cli.drill import VALUED, read_options
from distlab.tools.check.start.command import leading_options
from distlab.tools.drill.recording import innermost
from distlab.tools.drill.runs import RecordedRun
from distlab.tools.drill.verdict import WholeRun, count_samples
from tests.launched import clean, ended_warm

FILES = Path(__file__).parent / "files"
MINE = Path(__file__).parents[3] / "mine"
WRONG = {  # options, and parts of what is printed
    "optimizer_forgotten": ("", "the optimizer's state of rank 0", "nothing loads the optimizer"),
    "schedule_forgotten": ("", "the learning rate of rank 0", "nothing loads the schedule"),
    "rate_reset": ("", "the learning rate of rank 0", " loads the schedule"),
    "random_forgotten": ("--kill rank1@step9", "the random state of rank 0", "nothing loads the random state"),
    "loader_forgotten": ("", "read twice", "rank 1 reads"),
    "position_before_step": ("", "8 read twice"),
    "epoch_reset": ("--kill rank1@step11", "read in another epoch"),
    "epoch_skipped": ("--kill rank1@step8", "the resumed run took no step"),
    "position_by_rank": ("--resume 1", "48 read twice"),
    "shard_of_rank_0": ("--kill rank1@step9", "16 lost"),
    "not_atomic": ("--faults kill@save", "the resumed run failed: RuntimeError"),
}
RIGHT = [
    name for name in re.findall(r"^def (\w+)\(\):", (FILES / "script_survives.py").read_text(), re.MULTILINE)
    if name != "net"
]  # fmt: skip
SAVING = ("plain", "saves_on_sigterm", "sharded")  # tested with all faults


def drilled(*words: str) -> subprocess.CompletedProcess[str]:
    return ended_warm("distlab", ["drill", "WORLD_SIZE=2", *words], environ=clean(), timeout_s=170)


def processes_of(place: Path) -> list[int]:
    """Return the processes that were started with this path in their environment."""
    found = []
    for each in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [int(each.parent.name)] if str(place).encode() in each.read_bytes() else []
    return found


def printed(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stdout.split())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_named(name: str) -> None:
    options, *expected = WRONG[name]
    words = [*(["--faults", "kill"] if "--faults" not in options else []), *options.split()]
    done = drilled(*words, str(FILES / "script_resumes.py"), name)
    assert done.returncode == 1, done.stdout
    assert [each for each in expected if each not in printed(done)] == [], done.stdout


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", WRONG)
def test_its_corrected_version_passes(name: str) -> None:
    options = WRONG[name][0]
    words = [*(["--faults", "kill"] if "--faults" not in options else []), *options.split()]
    done = drilled(*words, str(FILES / "script_resumes.py"), name, "right")
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_passes(name: str) -> None:
    words = [] if name in SAVING else ["--faults", "kill"]
    done = drilled(*words, str(FILES / "script_survives.py"), name)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("to the bit") == (4 if name in SAVING else 1)


def test_the_sampler_inside_nested_batch_samplers_is_found() -> None:
    sampler = DistributedSampler[int](TensorDataset(torch.ones(9)), 3, 0)
    inner = BatchSampler(sampler, 2, drop_last=False)
    outer = SimpleNamespace(batch_sampler=inner)  # as accelerate's
    assert innermost(outer) is innermost(inner) is innermost(sampler) is sampler


@pytest.mark.timeout(180)
def test_the_scripts_that_mine_shows() -> None:
    right = drilled("--json", "--faults", "kill", str(MINE / "resume.py"), "--epochs", "1")
    assert json.loads(right.stdout)["verdict"] == "pass"
    wrong = drilled(str(MINE / "resume_rank_0.py"))
    assert wrong.returncode == 1, wrong.stdout
    assert "rank 0 waits in barrier" in printed(wrong)


# Loads its weights times a factor, saves to the folder that its first argument names, and starts a process.
TIMES = """
import os, subprocess, sys
import torch
import torch.distributed as dist
folder, factor = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
subprocess.Popen(["sleep", "100"])
torch.manual_seed(0)
model, begin = torch.nn.Linear(2, 1), 0
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if "--go-on" in sys.argv:
    found = torch.load(f"{folder}/state.pt")
    model.load_state_dict({name: factor * each for name, each in found["model"].items()})
    begin = found["step"]
for step in range(begin, 6):
    optimizer.zero_grad()
    model(torch.full((4, 2), step + 1.0)).sum().backward()
    optimizer.step()
    if step % 2 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step + 1}, f"{folder}/state.pt")
    dist.barrier()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("factor", ["1", "2"])
def test_the_state_folder_is_copied_and_changed_weights_are_found(factor: str, tmp_path: Path) -> None:
    state, script = tmp_path / "state", tmp_path / "own" / "train.py"
    for folder in (state, script.parent, tmp_path / "tmp"):
        folder.mkdir()
    (state / "state.pt").write_text("of a run before")
    script.write_text(TIMES)
    words = ["--faults", "kill", "--resume-words", "--go-on", "--state", str(state), str(script), str(state), factor]
    command = [sys.executable, "-m", "distlab", "drill", "WORLD_SIZE=2", "--json", *words]
    done = subprocess.run(
        command, env=clean(TMPDIR=str(tmp_path / "tmp")), capture_output=True, text=True, check=False, timeout=170
    )
    last = json.loads(done.stdout)["runs"][-1]
    if factor == "1":
        assert (done.returncode, last["weights"], last["why"]) == (0, "to the bit", "")
    else:
        assert done.returncode == 1
        assert "begins with weights that no step had; train.py:" in last["why"]
    assert [each.read_text() for each in state.iterdir()] == ["of a run before"]
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["RUN_MODE=server"], "RUN_MODE=server makes none, since asynchronous workers have no common state"),
        (["RUN_MODE=dp", "LAB_RESUME=auto"], "drill sets LAB_RESUME itself: leave it out"),
        (
            ["RUN_MODE=dp", "LAB_VARIANT=ring,flat"],
            "LAB_VARIANT=ring,flat names several: expected one, such as bucketed",
        ),
        (["--resume=9", str(FILES / "script_survives.py")], "--resume is '9': expected numbers of ranks"),
    ],
)
def test_a_refusal_is_json_too(words: list[str], why: str) -> None:
    done = drilled("--json", *words)
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"]) == (2, "refused")
    assert result["why"][0].startswith(why)


def test_a_failure_before_any_resume_is_json_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no data')\n")
    done = drilled("--json", str(tmp_path / "train.py"))
    result = json.loads(done.stdout)
    assert (done.returncode, result["verdict"]) == (1, "fail")
    assert result["why"] == "the whole run failed: ValueError: no data (train.py:1)"


def test_a_rank_in_an_endless_loop_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nwhile os.environ['RANK'] == '1':\n    pass\n")
    done = drilled("LAB_COLLECTIVE_TIMEOUT_S=3", str(tmp_path / "train.py"))
    assert done.returncode == 1, done.stdout
    assert "rank 1 took no step for 3 s (LAB_COLLECTIVE_TIMEOUT_S) after step 0 before its first call" in printed(done)


def padded(epochs: list[list[int]], size: int, folder: Path) -> RecordedRun:
    """Return a run of one step per epoch, whose samples a DistributedSampler divides and pads."""
    parts = [[samples + samples[: -len(samples) % size] for samples in epochs] for _ in range(size)]
    facts = [
        [{"step": step, "pads": True, "read": [[step, samples[rank::size]]]} for step, samples in enumerate(mine)]
        for rank, mine in enumerate(parts)
    ]
    return RecordedRun(folder, facts, "", hit=False)


@pytest.mark.parametrize(
    ("left_out", "again", "lost", "twice"), [(0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 2, 0), (0, 3, 0, 5), (1, 3, 1, 3)]
)
def test_padding_of_a_sampler_is_not_lost_or_read_twice(
    left_out: int, again: int, lost: int, twice: int, tmp_path: Path
) -> None:
    """Of 10 samples 4 ranks read 12 per epoch, 2 ranks read 10, and 3 ranks read another 12."""
    everything = list(range(10))
    whole = WholeRun(padded([everything] * 3, 4, tmp_path), 0.0, [])
    resumed = padded([everything, everything[left_out:] + everything[3 : 3 + again], everything], 3, tmp_path)
    before = padded([], 4, tmp_path)
    counts = count_samples(whole, before, resumed, 0)
    assert (counts.lost, counts.twice) == (lost, twice)


# On 2 ranks it trains on all 10 samples of each epoch, on others on the first ones; the argument is their number.
LEAVES_OUT = """
import os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
data = Subset(TensorDataset(torch.randn(10, 4)), range(10 if dist.get_world_size() == 2 else int(sys.argv[1])))
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 5, sampler=sampler)
model, begin = torch.nn.Linear(4, 1), 0
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if os.path.exists("state.pt"):
    found = torch.load("state.pt")
    model.load_state_dict(found["model"])
    begin = found["epoch"]
for epoch in range(begin, 6):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "epoch": epoch + 1}, "state.tmp")
        os.replace("state.tmp", "state.pt")
    dist.barrier()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("kept", "code"), [("10", 0), ("9", 1)])
def test_a_missing_sample_is_lost_in_spite_of_padding(kept: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES_OUT)
    done = drilled("--faults", "kill", "--kill", "rank1@step2", "--resume", "3", str(tmp_path / "train.py"), kept)
    assert done.returncode == code, done.stdout
    assert (" lost" in printed(done).partition("why")[2]) == bool(code), done.stdout


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\nopen('begun', 'w').close()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "distlab", "drill", "WORLD_SIZE=2", str(script)]
    environ = clean(TMPDIR=str(tmp_path / "drill"))
    (tmp_path / "drill").mkdir()
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as running:
        until = time.monotonic() + 60
        while not list(tmp_path.glob("drill/*/*/work/begun")) and time.monotonic() < until:
            time.sleep(0.1)
        assert len(processes_of(tmp_path)) > 2, "the command and its ranks"
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.glob("drill/distlab-drill-*"))
    assert not (tmp_path / "begun").exists()


def test_a_file_outside_of_the_copies_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "saves").mkdir()
    (tmp_path / "own").mkdir()
    script = tmp_path / "own" / "train.py"
    script.write_text(f"open({str(tmp_path / 'saves' / 'state')!r}, 'w')\n")
    done = drilled(str(script))
    assert done.returncode == 2, done.stdout
    assert "name its folder with --state" in printed(done)
    assert list((tmp_path / "saves").iterdir()) == []


def test_all_wrong_options_are_reported_together() -> None:
    done = drilled("--kill", "rank5@step0", "--resume", "x", "--faults", "flood", "absent.py")
    assert done.returncode == 2
    for each in ("--kill is 'rank5@step0'", "--resume is 'x'", "--faults is 'flood'", "'absent.py' does not exist"):
        assert each in done.stdout


def test_options_before_the_script() -> None:
    words = ["WORLD_SIZE=4", "--kill=rank2@step7", "--json", "--resume", "4,2", "train.py", "--steps", "9"]
    found, settings, rest, faults = leading_options(words, VALUED, ("--json",))
    assert (settings, rest, faults) == (["WORLD_SIZE=4"], ["train.py", "--steps", "9"], [])
    options, more = read_options(found, 4)
    assert (options["kill"], options["resume"], options["as_json"], more) == ((2, 7), [4, 2], True, [])


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--state"], "--state needs a value after it"),
        (["--fast", "train.py"], "--fast is not an option of this command; "),
    ],
)
def test_an_option_that_is_wrong_is_named(words: list[str], fault: str) -> None:
    assert leading_options(words, VALUED, ("--json",))[3][0].startswith(fault)


SMALL = {"LAB_STEPS": "8", "LAB_DEPTH": "1", "LAB_WIDTH": "16", "LAB_SEQ": "16", "LAB_BATCH": "8"}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["dp", "fsdp", "tp"])
def test_a_mode_of_the_lab_is_drilled(mode: str) -> None:
    words = [f"{name}={value}" for name, value in (SMALL | {"RUN_MODE": mode}).items()]
    done = drilled("--json", "--faults", "kill,kill@save", "--resume", "2,1", *words)
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"]) == (0, "pass"), done.stdout
    whole, again, alone, saving = found["runs"]
    assert "half written" in saving["begins"], "a file in a folder that is renamed after it"
    assert (whole["steps"], whole["samples"]) == (8, 64)
    assert [again[name] for name in ("weights", "begins", "samples")] == ["to the bit", "step 4", 64]
    assert [alone[name] for name in ("ranks", "samples", "lost", "twice")] == [1, 64, 0, 0]


@pytest.mark.timeout(240)
def test_a_mode_that_resumes_at_the_wrong_sample_fails() -> None:
    words = [f"{name}={value}" for name, value in SMALL.items()]
    done = drilled("--faults", "kill", *words, "RUN_MODE=dp", "LAB_BUG=resume_repeats_epoch")
    assert done.returncode == 1, done.stdout
    assert "samples: 32 lost and 32 read twice" in printed(done)
