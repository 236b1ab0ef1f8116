"""`./run` and `make run` in another user's clone: the ranks' exit codes and output, and no containers left."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.compose.containers import TINY, call, clean_environ

pytestmark = [pytest.mark.compose, pytest.mark.timeout(240)]

SMALL = TINY | {"LAB_VARIANT": "flat", "WORLD_SIZE": "2"}
LONG = SMALL | {"LAB_STEPS": "20000", "LAB_PROOF": "0"}


def run(clone: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return call(*(command or ("./run",)), environ=variables, folder=clone, timeout_s=200, check=False)


def at_terminal(clone: Path, answer: str, *command: str) -> str:
    """Return the output of a command in a terminal, in which `answer` is typed when it asks."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command, cwd=clone, env=clean_environ(), stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown, deadline = "", time.monotonic() + 100
    while time.monotonic() < deadline:
        if answer and "[y/N]" in shown:
            os.write(controller, f"{answer}\n".encode())
            answer = ""
        if not select.select([controller], [], [], 1)[0]:
            continue
        try:
            shown += os.read(controller, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            break
    try:
        assert process.wait(timeout=30) == 0, shown
    finally:
        process.kill()
    return shown


def containers_of(clone: Path) -> list[str]:
    """Return the containers of the clone's project, running or not."""
    return call("docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={clone.name}").stdout.split()


@contextmanager
def running(clone: Path, log: Path, variables: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `./run` in the background, and continue when its ranks train. Signals have their default handlers, which
    pytest may have changed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["./run"], cwd=clone, env=clean_environ(variables), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not re.search(r"working .* of \d+ steps\)", log.read_text(errors="replace")):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "words", [("RUN_MODE=dp", "LAB_STEPS=8"), ("mine/resume.py", "--epochs", "1")], ids=["mode", "script"]
)
def test_a_drill_starts_its_ranks_in_one_container(words: tuple[str, ...], clone: Path) -> None:
    done = run(clone, "./run", "drill", "WORLD_SIZE=2", "--faults", "kill", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"kill, resume 2 +2 +8 +to the bit +\d+ +0 +0 ", done.stdout), done.stdout
    assert not containers_of(clone)


def test_a_run_leaves_only_files_of_the_owner(clone: Path) -> None:
    done = run(clone, "./run", "dp", *(f"{name}={value}" for name, value in SMALL.items()))
    assert done.returncode == 0, done.stdout
    assert "PASS" in done.stdout
    assert re.search(r"rerun +RUN_MODE=dp WORLD_SIZE=2 .* \./run$", done.stdout, re.MULTILINE)
    assert len(list(clone.glob("runs/*/run.json"))) >= 1
    strangers = {str(path) for path in clone.rglob("*") if (path.lstat().st_uid, path.lstat().st_gid) != (1234, 1234)}
    assert strangers == set()
    assert containers_of(clone) == []
    old = shutil.copytree(clone / "runs" / "latest", clone / "runs" / "old")
    for path in [old, *old.rglob("*")]:
        os.chown(path, 1234, 1234)
        os.utime(path, (0, 0))
    refused = run(clone, "make", "clean")
    assert "old        runs/old" in refused.stdout and "no terminal to ask in" in refused.stdout, refused.stdout
    kept = at_terminal(clone, "n", "make", "clean")
    assert "nothing is removed" in kept and old.exists(), kept
    removed = at_terminal(clone, "y", "make", "clean")
    assert "removed    runs/old" in removed and not old.exists(), removed
    assert (clone / "runs" / "latest" / "run.json").exists()


def test_make_run_prints_the_exit_code(clone: Path) -> None:
    done = run(
        clone, "make", "run", *[f"{name}={value}" for name, value in (SMALL | {"LAB_BUG": "means_of_shards"}).items()]
    )
    assert done.returncode == 2
    assert "exit code 1" in done.stdout
    done = run(clone, "make", "run", "RUN_MODE=tpp")
    assert done.returncode == 2
    assert "exit code 2" in done.stdout
    assert "RUN_MODE='tpp' is not a mode (did you mean 'tp'?)" in done.stdout


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"WORLD_SIZE": "9"}, "WORLD_SIZE='9' is out of range"),
        ({"LAB_STEP": "5"}, "LAB_STEP is not a variable of the lab (did you mean 'LAB_STEPS'?)"),
        ({"LAB_MEMORY": "lots"}, "lots"),
        ({"LAB_TEXT": "/etc/passwd"}, "containers see the folder texts/ alone"),
        ({"RUN_MODE": "experiments/dp"}, "containers see the folder mine/ alone"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_run_returns_2_for_refused_settings(clone: Path, variables: dict[str, str], sentence: str) -> None:
    done = run(clone, **variables)
    assert done.returncode == 2, done.stdout
    assert sentence in done.stdout
    assert containers_of(clone) == []


def test_run_returns_3_and_prints_the_survivors_messages(clone: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(clone, log, LONG | {"WORLD_SIZE": "3"}) as process:
        call("docker", "kill", f"{clone.name}-worker1-1")
        assert process.wait(timeout=90) == 3, log.read_text()
    lines = [line for line in log.read_text().splitlines() if "rank 1 lost" in line]
    assert {match.group() for line in lines if (match := re.search(r"worker\d", line))} >= {"worker0", "worker2"}
    assert containers_of(clone) == []


def test_a_second_run_is_refused_and_the_first_continues(clone: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(clone, log, LONG) as process:
        before = containers_of(clone)
        second = run(clone, **SMALL)
        assert second.returncode == 2, second.stdout
        assert "refused    a run of this folder is going on since 20" in second.stdout
        named = run(clone, **SMALL, COMPOSE_PROJECT_NAME=clone.name)
        assert named.returncode == 2, named.stdout
        assert (containers_of(clone), len(before), process.poll()) == (before, 2, None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143, log.read_text()
    assert containers_of(clone) == []
    assert list(clone.glob(".running*")) == []


def test_removed_containers_fail_the_run(clone: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(clone, log, LONG) as process:
        call("docker", "compose", "down", "--timeout", "1", environ={"WORLD_SIZE": "2"}, folder=clone)
        assert process.wait(timeout=60) != 0, log.read_text()
    assert "0 of 2 ranks have an exit code" in log.read_text()


@pytest.mark.parametrize(
    ("number", "code", "group"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGINT, 130, True)],
    ids=["ctrl-c", "sigterm", "as a CI cancels"],
)
def test_a_stopped_run_removes_its_containers(
    clone: Path, tmp_path: Path, number: signal.Signals, code: int, group: bool
) -> None:
    log = tmp_path / "log"
    with running(clone, log, LONG) as process:
        for _ in range(1 + group):  # the second one, while the ranks are stopped, changes nothing
            (os.killpg if group else os.kill)(process.pid, number)
            time.sleep(0.5)
        assert process.wait(timeout=30) == code, log.read_text()
    assert "was stopped by SIGTERM" in log.read_text()
    assert "panic" not in log.read_text()
    assert containers_of(clone) == []


def test_an_earlier_larger_cluster_is_removed_first(clone: Path) -> None:
    call(
        "docker",
        "compose",
        "up",
        "-d",
        "--build",
        environ=LONG | {"WORLD_SIZE": "4", "LAB_STEPS": "100000"},
        folder=clone,
        timeout_s=200,
    )
    assert len(containers_of(clone)) == 4
    done = run(clone, **SMALL)
    assert done.returncode == 0, done.stdout
    assert containers_of(clone) == []


def test_run_and_launcher_agree_on_the_worst_code() -> None:
    """./run and the launcher of local ranks agree on which code is the worst."""
    from distlab.lab.cluster.launch import worst

    source = Path("run").read_text()
    functions = source[source.index("severity()") : source.index("# Ends the ranks")]
    for codes in ([0, 3], [3, 1, 137], [2, 1], [143, 0], [137, 143], [3, 137, 143], [0, 0]):
        done = call("sh", "-c", functions + '\nworst "$@"', "sh", *map(str, codes))
        assert int(done.stdout) == worst(codes), codes
    assert os.access("run", os.X_OK)
