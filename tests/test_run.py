"""`./run` without a Docker engine: local processes instead of containers, with real exit codes; and its calls of an
engine."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from signal import SIGHUP, SIGINT

import pytest
import yaml

from distlab.lab.config import ON_ONE_MACHINE, Config
from distlab.lab.config.commands import COMMANDS, commands_for_users
from distlab.lab.config.settings import GONE, aliases, modes, one_typo_from
from tests.lab.config.test_config import OF_OTHERS
from tests.launched import clean, ended

TOP = Path(__file__).parent.parent
SMALL = {
    "LAB_MODEL": "mlp",
    "LAB_WIDTH": "16",
    "LAB_DEPTH": "2",
    "LAB_STEPS": "3",
    "LAB_VARIANT": "flat",
    "WORLD_SIZE": "2",
}
NO_ENGINE = {"DOCKER_HOST": "tcp://127.0.0.1:1"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources with a .venv of this test's own Python, and the stamp that ./install writes."""
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", ".*cache", "__pycache__", ".hypothesis", ".coverage*")
    copy = Path(shutil.copytree(TOP, tmp_path / "distlab", ignore=ignored))
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    stamp = subprocess.run(
        "cat install pyproject.toml constraints.txt compose/requirements.lock | cksum",
        shell=True,
        cwd=copy,
        stdout=subprocess.PIPE,
        check=True,
    )
    (copy / ".venv" / "installed-run").write_bytes(stamp.stdout)
    return copy


@pytest.mark.parametrize("fails", [False, True])
def test_the_output_of_pip_is_shown_only_if_it_fails(checkout: Path, *, fails: bool) -> None:
    (checkout / ".venv" / "installed-run").unlink()
    script = (
        f'#!/bin/sh\necho "$@" and the words of pip\ncase "$*" in *"pip install --req"*) exit {3 * fails} ;; esac\n'
    )
    (checkout / ".venv" / "bin" / "python").write_text(script)
    done = subprocess.run(["./install"], cwd=checkout, capture_output=True, text=True, timeout=30, check=False)
    lines = done.stderr.splitlines()
    assert lines[0] == "install    PyTorch and what the lab imports go into .venv: a minute or more, once"
    assert done.returncode == 3 * fails and done.stdout == ""
    assert ("--require-hashes --no-deps -r compose/requirements.lock and the words of pip" in done.stderr) == fails
    assert (len(lines) == 1) != fails and (checkout / ".venv" / "installed-run").exists() != fails


class Empty(BaseHTTPRequestHandler):
    """An empty package index."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_torch_comes_only_from_its_index(checkout: Path) -> None:
    """pip does not even use the index of a pip.conf."""
    (checkout / ".venv" / "installed-run").unlink()
    settings = checkout / "pip.conf"
    settings.write_text("[global]\nextra-index-url = http://127.0.0.1:9/other\nfind-links = /other\n")
    asks = f'shift 3; exec {sys.executable} -m pip install --dry-run --retries 0 --target {checkout}/none "$@"'
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *--index-url*) {asks} ;; *" - "*) exec {sys.executable} "$@" ;; esac\n')
    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}/cpu"
        environ = os.environ | {"TORCH_INDEX_URL": index, "PIP_CONFIG_FILE": str(settings)}
        done = ended(["./install"], cwd=checkout, environ=environ, timeout_s=60)
        server.shutdown()
    assert f"Looking in indexes: {index}" in done.stderr and "Looking in links: http://127.0.0.1:" in done.stderr
    assert "other" not in done.stderr, done.stderr


def run(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = clean() | NO_ENGINE | SMALL | variables
    return ended(["./run", *arguments], cwd=checkout, environ=environ, timeout_s=110)


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({}, 0, "rank 0 | PASS"),
        ({"LAB_BUG": "means_of_shards"}, 1, "rank 0 | FAIL"),
        ({"LAB_STEP": "5"}, 2, "did you mean 'LAB_STEPS'?"),
    ],
    ids=["passes", "fails", "refused"],
)
def test_the_ranks_are_local_processes(checkout: Path, variables: dict[str, str], code: int, words: str) -> None:
    done = run(checkout, **variables)
    assert words in done.stdout + done.stderr
    assert done.returncode == code


def test_other_commands_run_locally(checkout: Path) -> None:
    assert run(checkout, "dp", "LAB_STEPS=2").returncode == 0
    assert "PASS" in run(checkout, "report", "runs/latest").stdout
    assert "The gradient of a mean" in run(checkout, "explain", "dp", RUN_MODE="tp").stdout
    assert "clean      no run in runs/ that may be removed" in run(checkout, "report", "--clean", "7").stdout


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("train.py", "'train.py' is not a command, a mode or a setting (did you mean 'train'?)"),
        ("STEPS=5", "'STEPS=5' is not a command, a mode or a setting (did you mean 'LAB_STEPS=5'?)"),
        ("something", "'something' is not a command, a mode or a setting: ./run --help lists them"),
        ("ddp", "'ddp' is not a command, a mode or a setting (did you mean 'dp'?)"),
        ("reprot", "'reprot' is not a command, a mode or a setting (did you mean 'report'?)"),
        ("RUN_MODE=ddp", "RUN_MODE='ddp' is not a mode (did you mean 'dp'?), allowed: comm, compress, "),
        ("LAB_STEPZ=4", "LAB_STEPZ is not a variable of the lab (did you mean 'LAB_STEPS'?)"),
        ("WORLD_SIZE=0", "WORLD_SIZE='0' is out of range: expected a whole number from 1 to 8"),
        ("WORLD_SIZE=03", "WORLD_SIZE='03' is out of range"),
        ("WORLD_SIZE=three", "WORLD_SIZE='three' is out of range"),
    ],
)
def test_an_unknown_argument_is_refused_before_a_build(word: str, sentence: str) -> None:
    done = run(TOP, word, PATH="/usr/bin:/bin")
    assert done.returncode == 2
    assert done.stderr.startswith(f"refused    {sentence}")


@pytest.mark.parametrize("name", GONE)
def test_removed_names_are_refused_with_their_replacement(name: str) -> None:
    done = run(TOP, name if name.islower() else f"{name}=1", PATH="/usr/bin:/bin")
    assert (done.returncode, done.stderr) == (2, f"refused    {name}: {GONE[name]}\n")


def test_a_misspelt_variable_of_check_is_refused_before_a_build(checkout: Path) -> None:
    done = run_under_an_engine(checkout, "check", "mine/ddp.py", LAB_HANG_AFTER="3")
    assert done.returncode == 2
    assert "LAB_HANG_AFTER is not a variable of the lab (did you mean 'LAB_HANG_AFTER_S'?)" in done.stderr
    assert "compose build" not in (checkout / "calls").read_text()


def test_a_puzzle_is_written_locally_even_with_an_engine(checkout: Path) -> None:
    done = run_under_an_engine(checkout, "puzzle", "3")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "fill in ring_all_reduce, then: distlab puzzle 3")
    assert (checkout / "puzzles" / "03_ring_all_reduce.py").is_file()
    assert "compose run" not in (checkout / "calls").read_text()


@pytest.mark.parametrize("words", [["--help"], ["help"], ["explain", "-h"], ["dp", "--help"]], ids=" ".join)
def test_help_names_every_command_and_mode(words: list[str]) -> None:
    done = run(TOP, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        re.findall(r"^  ./run (\w+) +\w", done.stdout, re.MULTILINE)[-len(commands_for_users()) :]
        == commands_for_users()
    )
    assert all(COMMANDS[name].what in done.stdout for name in commands_for_users())
    assert f"Modes: {' '.join(modes())}\n" in done.stdout


DOCKER = """#!/bin/sh
# A fake engine: it writes its arguments, and the Compose file that ./run made, to files.
echo "$*" >>calls
for file in $(echo "${COMPOSE_FILE:-}" | tr : ' '); do case $file in ./.own*) cat "$file" >made ;; esac; done
case "$*" in *--check*) exit "$REFUSES" ;; esac
case "$*" in "compose ps -aq"*) printf '%s\n' ${CONTAINERS:-one other} ;; esac
case "$*" in "compose config") echo "name: ${COMPOSE_PROJECT_NAME:-distlab}" ;; esac
case "$*" in ps*working_dir*) echo "${ELSEWHERE:-}" ;; esac
case "$*" in inspect*Status*ExitCode*working_dir*) echo "${STATUS:-exited} 0 ${FOLDER:-$PWD}" ;; esac
STOPS=${STOPS:-none}
case "$STOPS $*" in none*) ;; *"compose up"*) mkdir -p runs/x && echo >runs/x/rank0.jsonl && kill -"$STOPS" $PPID && sleep 0.3; exit ;; esac
case "$*" in "compose up"*) env >variables && mkdir -p runs/latest && echo '{"verdict": "pass"}' >runs/latest/run.json ;; esac
"""


def run_under_an_engine(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `./run WORDS` with the fake engine."""
    return run(checkout, *words, **engine_variables(checkout) | variables)


def engine_variables(checkout: Path) -> dict[str, str]:
    """Return variables with which the fake engine is found."""
    docker = checkout / "bin" / "docker"
    docker.parent.mkdir(exist_ok=True)
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    return {"PATH": f"{docker.parent}:{os.environ['PATH']}", "REFUSES": "0"}


def code_and_calls(checkout: Path, refuses: int = 0, words: Sequence[str] = (), **variables: str) -> tuple[int, str]:
    """Return the exit code and all calls of Docker."""
    done = run_under_an_engine(checkout, *words, REFUSES=str(refuses), **variables)
    return done.returncode, (checkout / "calls").read_text()


def test_a_modes_own_variables_reach_every_rank(checkout: Path) -> None:
    """Variables that are not in the Compose file, after a container has accepted them; the extra file is removed at
    the end."""
    (checkout / "docker-compose.override.yaml").write_text("services: {}\n")
    code, calls = code_and_calls(checkout, RUN_MODE="mine/mode.py", LAB_MINE="5", LAB_YOURS="a b")
    assert code == 0
    assert "compose up" in calls
    made = yaml.safe_load((checkout / "made").read_text())["services"]
    assert made == {f"worker{rank}": {"environment": ["LAB_MINE", "LAB_YOURS"]} for rank in range(ON_ONE_MACHINE)}
    assert list(checkout.glob(".own-names*")) == []


def test_an_invalid_variable_of_a_mode_starts_no_rank(checkout: Path) -> None:
    code, calls = code_and_calls(checkout, refuses=2, RUN_MODE="mine/mode.py", LAB_STEP="5")
    assert code == 2
    assert re.search(r"compose run .* -e LAB_STEP .*worker0 python -m distlab\.lab\.config\.variables --check\n", calls)
    assert "compose up" not in calls


def test_known_names_need_no_container_to_check(checkout: Path) -> None:
    code, calls = code_and_calls(checkout, LAB_RUNS_DIR="elsewhere")
    assert code == 0
    assert "--check" not in calls
    assert not (checkout / "made").exists()


def test_fewer_exit_codes_than_ranks_return_3(checkout: Path) -> None:
    code, calls = code_and_calls(checkout, CONTAINERS="one")
    assert code == 3
    assert "compose up" in calls


def test_every_typing_error_is_refused_before_a_container_starts(checkout: Path) -> None:
    """./run must check names itself: distlab/lab/config gets no variables that are not in the Compose file."""
    named = ["RUN_MODE", "RANK", "MASTER_PORT", "LAB_KEY_FILE"]  # few, because ./run starts a process per wrong name
    slipped = {slip for name in named for slip in one_typo_from(name)} - aliases(Config).keys()
    others = set(OF_OTHERS) - os.environ.keys()
    done = run_under_an_engine(checkout, WORLD_SIZE="9", **dict.fromkeys([*slipped, *others], "2"))
    assert done.returncode == 2
    refused = [line.split()[1] for line in done.stderr.splitlines()]
    assert refused.pop(0) == "WORLD_SIZE='9'"
    assert sorted(refused) == sorted(slipped)
    assert not (checkout / "calls").exists() or "up" not in (checkout / "calls").read_text()


@pytest.mark.parametrize("words", [["LAB_STEPS=7", "WORLD_SIZE=2"], ["RUN_MODE=tp", "WORLD_SIZE=2"]], ids=" ".join)
def test_make_quick_is_a_small_run_with_the_set_variables(checkout: Path, words: list[str]) -> None:
    done = ended(["make", "quick", *words], cwd=checkout, environ=clean() | engine_variables(checkout), timeout_s=60)
    assert done.returncode == 0, done.stderr
    variables = set((checkout / "variables").read_text().splitlines())
    assert {"LAB_WIDTH=32", "LAB_DEPTH=4", "DISTLAB_STARTED_BY=make run", *words} <= variables
    assert ("LAB_STEPS=5" in variables) == ("LAB_STEPS=7" not in words)


def test_the_standard_output_has_only_run_json(checkout: Path) -> None:
    local = run(checkout, "dp", "--json")
    assert local.returncode == 0, local.stderr
    assert json.loads(local.stdout)["verdict"] == "pass"
    assert "rank 0 | PASS" in local.stderr
    done = run_under_an_engine(checkout, "dp", "--json", "--quiet")
    assert (done.returncode, done.stdout) == (0, '{"verdict": "pass"}\n')


def test_a_refused_run_prints_no_json(checkout: Path) -> None:
    (checkout / "runs" / "latest").mkdir(parents=True, exist_ok=True)
    (checkout / "runs" / "latest" / "run.json").write_text("{}")
    for done in (run(checkout, "dp", "--json", "LAB_STEPS=x"), run_under_an_engine(checkout, "--json", "LAB_STEPZ=1")):
        assert (done.returncode, done.stdout) == (2, "")
        assert "refused    LAB_STEP" in done.stderr
    assert run(checkout, "dp", "--json", "LAB_VARIANT=rign").returncode == 2
    assert [path.name for path in (checkout / "runs").iterdir()] == ["latest"]


@pytest.mark.parametrize(("signal", "code"), [("TERM", 143), ("HUP", 143), ("INT", 130)])
def test_a_stopped_run_is_judged_from_its_records(checkout: Path, signal: str, code: int) -> None:
    stopped, calls = code_and_calls(checkout, STOPS=signal)
    assert stopped == code
    assert re.search(r"compose run .*worker0 python -m distlab report runs/x$", calls, re.MULTILINE)
    assert (checkout / "runs" / "latest").resolve() == checkout / "runs" / "x"


SLEEPS = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
while True: dist.barrier(); time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [(["dp", "LAB_STEPS=100000"], SIGHUP, 143), (["check", "sleeps.py"], SIGINT, 130)],
    ids=["run", "check"],
)
def test_a_stopped_run_of_processes_leaves_its_verdict(
    checkout: Path, words: list[str], number: int, code: int
) -> None:
    (checkout / "sleeps.py").write_text(SLEEPS)
    environ = clean() | NO_ENGINE | {"WORLD_SIZE": "2"} | ({} if words[0] == "check" else SMALL)
    with subprocess.Popen(["./run", *words], cwd=checkout, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(r"^rank 0 \| (rank 0 of|check  )", line):
                break
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    run = json.loads((checkout / "runs" / "latest" / "run.json").read_text())
    assert run["verdict"] == "lost" and {error["exit_code"] for error in run["errors"]} == {code}
    assert (checkout / "runs" / "latest" / "report.html").stat().st_uid == os.getuid()


@contextmanager
def locked(lock: Path, words: str) -> Iterator[None]:
    """Lock the file as a live run does."""
    with lock.open("w") as file:
        file.write(words)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_second_run_in_a_clone_is_refused(
    checkout: Path,
) -> None:
    with locked(checkout / ".running-distlab", "17 2026-11-26 22:02:48\n"):
        done = run_under_an_engine(checkout)
        assert done.returncode == 2
        assert done.stderr.endswith(
            "refused    a run of this folder is going on since 2026-11-26 22:02:48: stop it, or use another"
            " COMPOSE_PROJECT_NAME\n"
        )
        calls = (checkout / "calls").read_text()
        assert "compose down" not in calls and "compose up" not in calls
        assert run_under_an_engine(checkout, COMPOSE_PROJECT_NAME="distlab").returncode == 2, (
            "the same name as by default"
        )
        assert run_under_an_engine(checkout, COMPOSE_PROJECT_NAME="other").returncode == 0
    assert run_under_an_engine(checkout).returncode == 0, "a killed run leaves its file without a lock"
    assert list(checkout.glob(".running*")) == []


def test_a_run_of_another_folder_is_not_stopped(checkout: Path) -> None:
    done = run_under_an_engine(checkout, ELSEWHERE="/home/other/distlab")
    assert done.returncode == 2
    assert (
        "refused    a run of /home/other/distlab has the name distlab too: stop it, or use another COM" in done.stderr
    )
    assert "compose down" not in (checkout / "calls").read_text()
    assert run_under_an_engine(checkout, ELSEWHERE=str(checkout)).returncode == 0, (
        "the containers belong to an earlier run of this folder"
    )


@pytest.mark.parametrize("state", [{"STATUS": "running"}, {"STATUS": "created"}, {"FOLDER": "/home/other/distlab"}])
def test_only_own_stopped_containers_have_an_exit_code(checkout: Path, state: dict[str, str]) -> None:
    done = run_under_an_engine(checkout, **state)
    assert done.returncode == 3
    assert "0 of 2 ranks have an exit code" in done.stderr


@pytest.mark.parametrize("mode", ["experiments/dp", "/tmp/mode.py", "mode.py"])
def test_a_mode_outside_of_the_checkout_is_refused(checkout: Path, mode: str) -> None:
    done = code_and_calls(checkout, RUN_MODE=mode)
    assert done[0] == 2
    assert "compose" not in done[1].replace("compose version", "")
