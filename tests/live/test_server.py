"""The server of the page: three addresses to read, nothing to do, this machine alone; a taken port in one sentence."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from distlab.cluster.launch import free_port
from distlab.config import ConfigError
from distlab.live import server as shown_runs
from distlab.live.server import POLICY, Runs, hashed
from distlab.report.verdict import judge, write_run
from tests.live.states import BEGAN_AT, recorded, run_of, state
from tests.report.made_up import good_run

pytestmark = pytest.mark.timeout(90)


@contextmanager
def serving(*words: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`python -m distlab live` with these words, once it listens, and its port. Signals are as in a terminal: pytest
    may have inherited others."""
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LAB_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "distlab.cli.live", *words], text=True, stdout=subprocess.PIPE,
        env=environ | {"LAB_LIVE_PORT": str(port)} | variables,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"live       http://127.0.0.1:{port}\n"
        yield process, port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of the page of a run of three ranks."""
    folder = run_of(tmp_path_factory.mktemp("runs") / "dp-1", state(0), state(1), state(2))
    with serving(str(folder)) as (_, port):
        yield port


def asked(port: int, path: str, method: str = "GET", host: str = "") -> http.client.HTTPResponse:
    """The answer, its body not read yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    return connection.getresponse()


def test_the_page_is_whole_and_its_policy_lets_nothing_else_run(port: int) -> None:
    answer = asked(port, "/")
    assert answer.status == 200
    page = answer.read().decode()
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert "unsafe" not in POLICY
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"{tag}-src {hashed(inline)};" in POLICY
    assert "connect-src 'self'" in POLICY
    assert (answer.headers["X-Content-Type-Options"], answer.headers["Cache-Control"]) == ("nosniff", "no-store")
    assert "innerHTML" not in page
    assert re.findall(r"<(?:a|form|button|input)\b|https?://(?!www\.w3\.org/2000/svg)", page) == []


def test_the_state_is_a_snapshot(port: int) -> None:
    snapshot = json.loads(asked(port, "/state").read())
    assert snapshot["run_id"] == "dp-1"
    assert [rank["rank"] for rank in snapshot["ranks"]] == [0, 1, 2]


@pytest.mark.parametrize("path", ["/", "/state", "/events", "/elsewhere"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_can_be_done(port: int, path: str, method: str) -> None:
    answer = asked(port, path, method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")
    assert answer.headers["Content-Security-Policy"] == POLICY


def test_nothing_else_is_there(port: int) -> None:
    assert [asked(port, path).status for path in ("/elsewhere", "/../../etc/passwd", "/state/")] == [404, 404, 307]


def test_another_name_of_this_machine_is_refused(port: int) -> None:
    assert asked(port, "/state", host=f"elsewhere.example:{port}").status == 400
    assert asked(port, "/state", host=f"localhost:{port}").status == 200


def test_nobody_listens_but_on_the_loopback(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_events_come_four_times_a_second_and_end_with_the_server(tmp_path: Path) -> None:
    run_of(tmp_path / "dp-1", state(0), state(1), state(2))
    with serving(str(tmp_path / "dp-1")) as (process, port):
        answer = asked(port, "/events")
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        began = time.monotonic()
        for _ in range(5):
            snapshot = json.loads(answer.readline().removeprefix(b"data: "))
            assert answer.readline() == b"\n"
        assert 0.7 < time.monotonic() - began < 5
        assert [rank["how"] for rank in snapshot["ranks"]] == ["running"] * 3
        process.send_signal(signal.SIGTERM)
        rest = answer.read().split(b"\n\n")
        assert rest[-2].startswith(b"event: end\ndata: {")
        assert process.wait(timeout=10) == -signal.SIGTERM


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    with serving(str(tmp_path)) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130


def test_it_ends_with_its_launchers_pipe(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = subprocess.Popen(
            [sys.executable, "-m", "distlab.cli.live", str(tmp_path), "--new", "--socket", str(listening.fileno())],
            stdin=subprocess.PIPE, pass_fds=[listening.fileno()], stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert json.loads(asked(listening.getsockname()[1], "/state").read())["verdict"] == "waiting"
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "words", [["distlab.cli.live", "."], ["workers", "live", "dp"], ["workers", "LAB_LIVE=1"]], ids=" ".join
)
def test_a_port_that_is_taken_is_refused_in_one_sentence(words: list[str], tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LAB_")}
        done = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, timeout=60, check=False,
            env=environ | {"LAB_LIVE_PORT": str(port), "LAB_RUNS_DIR": str(tmp_path / "runs")},
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout + done.stderr == (
        f"refused    LAB_LIVE_PORT={port} cannot be opened on 127.0.0.1 (Address already in use): choose another port\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_shows_nothing_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers", "live", str(tmp_path / "absent")], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2


# Which run is shown: the one that was named, else the newest, and the shown one until it is over.


@pytest.fixture(autouse=True)
def at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is looked at each time."""
    monkeypatch.setattr(shown_runs, "LOOK_S", 0.0)


def test_the_newest_run_is_shown_until_it_is_over(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first", state(0))
    (tmp_path / "latest").symlink_to("first")
    runs = Runs(tmp_path)
    assert runs.snapshot().run_id == "first"
    time.sleep(0.02)
    run_of(tmp_path / "second", state(0))
    assert runs.snapshot().run_id == "first"  # which goes on
    write_run(first, judge(good_run(3)))
    assert runs.snapshot().verdict == "pass"
    assert runs.snapshot().run_id == "second"


def test_a_new_one_is_waited_for(tmp_path: Path) -> None:
    run_of(tmp_path / "before", state(0))
    runs = Runs(tmp_path, new=True)
    assert (runs.snapshot().run_id, runs.snapshot().verdict) == ("", "waiting")
    run_of(tmp_path / "now", state(0, began_at=time.time()))
    assert runs.snapshot().run_id == "now"


def test_a_folder_that_the_first_run_makes_is_waited_for(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs", new=True)
    assert runs.snapshot().verdict == "waiting"
    run_of(tmp_path / "runs" / "first", state(0, began_at=time.time()))
    assert runs.snapshot().run_id == "first"


def test_a_run_that_is_named_stays(tmp_path: Path) -> None:
    run_of(tmp_path / "named", state(0))
    runs = Runs(tmp_path / "named")
    write_run(tmp_path / "named", judge(good_run(3)))
    run_of(tmp_path / "newer", state(0, began_at=BEGAN_AT + 9))
    assert [runs.snapshot().run_id for _ in range(2)] == ["named", "named"]


def test_what_shows_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder: name that of a run, such as runs/latest"):
        Runs(tmp_path / "absent")
    recorded(run_of(tmp_path / "unshown"), 0)
    with pytest.raises(ConfigError, match="shows nothing: its ranks ran without LAB_LIVE=1"):
        Runs(tmp_path / "unshown")
