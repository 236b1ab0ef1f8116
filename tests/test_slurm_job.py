"""engines/slurm/job.sh with a fake srun: which exit codes requeue the job, and how often."""

import os
import subprocess
from pathlib import Path

import pytest

JOB = Path(__file__).parents[1] / "engines" / "slurm" / "job.sh"


def submitted(folder: Path, code: int, **variables: str) -> tuple[int, str, str]:
    """Return the script's exit code, the arguments of srun and the calls of scontrol."""
    for name, does in (
        ("srun", f'echo "$LAB_RUN_ID $LAB_RESUME $*" >{folder}/started; exit {code}'),
        ("scontrol", f'echo "$*" >{folder}/requeued'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LAB_", "SLURM_"))}
    environ |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
    } | variables
    done = subprocess.run(["sh", str(JOB)], env=environ, stdout=subprocess.PIPE, check=False, timeout=30)
    requeued = folder / "requeued"
    return (
        done.returncode,
        (folder / "started").read_text().strip(),
        requeued.read_text().strip() if requeued.exists() else "",
    )


def test_ranks_are_tasks_of_a_resumable_run(tmp_path: Path) -> None:
    assert submitted(tmp_path, 0) == (0, "slurm-7 auto --label python -m workers", "")
    assert submitted(tmp_path, 0, LAB_RUN_ID="mine")[1].startswith("mine auto ")


@pytest.mark.parametrize("code", [3, 137])
def test_a_lost_rank_requeues_the_job_a_few_times(tmp_path: Path, code: int) -> None:
    assert submitted(tmp_path, code)[::2] == (code, "requeue 7")
    (tmp_path / "requeued").unlink()
    assert submitted(tmp_path, code, SLURM_RESTART_COUNT="3")[::2] == (code, "")


@pytest.mark.parametrize("code", [1, 2, 143])
def test_other_exit_codes_do_not_requeue_the_job(tmp_path: Path, code: int) -> None:
    assert submitted(tmp_path, code)[::2] == (code, "")


def test_outside_of_a_job_the_script_explains_its_start() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(["sh", str(JOB)], env=environ, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode != 0
    assert "start it by sbatch" in done.stderr
