"""Real processes that try to join: ranks that do not fit together all end with the same sentence and code 3."""

import contextlib
import http.server
import re
import signal
import socket
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from distlab.lab.cluster.address import resolve
from distlab.lab.cluster.join import key_of, signed_address
from distlab.lab.cluster.launch import free_port
from distlab.lab.config import Config
from tests.lab.cluster.cluster_of_processes import Processes, Rank
from tests.techniques.transport.strangers import answers_to_forged, silent


def refusals(ranks: list[Rank]) -> set[str]:
    """Return the sentences of ranks that all ended with 3 and without a traceback."""
    assert [rank.end() for rank in ranks] == [3] * len(ranks), "\n".join(rank.text for rank in ranks)
    assert not any("Traceback" in rank.text or "frame #" in rank.text for rank in ranks)
    return {
        line.removeprefix("refused: ")
        for rank in ranks
        for _, line in rank.lines
        if not line.startswith(("imported", "waiting", "joined", "step", "verdict", "key", "dropped"))
    }


def test_three_ranks_join_and_agree(processes: Processes) -> None:
    ranks = processes.world(3, steps=2)
    assert [rank.end() for rank in ranks] == [0, 0, 0]
    joined = {line for rank in ranks for _, line in rank.lines if line.startswith("joined")}
    assert len(joined) == 1
    found = re.fullmatch(r"joined (dp-\d{8}-\d{6}) 0@127.0.0.1 1@127.0.0.1 2@127.0.0.1", joined.pop())
    assert found
    assert [path.name for path in processes.runs.iterdir()] == [found[1]]  # no other run can claim that name


def test_the_run_id_is_taken_from_the_environment(processes: Processes) -> None:
    assert processes.rank(0, 1, steps=1, LAB_RUN_ID="mine").end() == 0
    assert "joined mine" in processes.all[0].text


def test_a_duplicate_rank_is_named_on_every_rank(processes: Processes) -> None:
    sentences = refusals([processes.rank(0, 3), processes.rank(1, 3), processes.rank(1, 3)])
    assert len(sentences) == 1
    assert socket.gethostname() in sentences.pop().partition("rank 1 runs twice")[2]


def test_a_late_duplicate_rank_ends_alone(processes: Processes) -> None:
    ranks = processes.world(2, steps=4000)
    for rank in ranks:
        rank.until("step 1")
    assert "rank 1 runs twice" in refusals([processes.rank(1, 2)]).pop()
    after = len(ranks[0].lines)
    ranks[0].until(f"step {after + 20}")


@pytest.mark.parametrize("joined_first", [False, True])
def test_another_world_size_ends_all(processes: Processes, joined_first: bool) -> None:
    ranks = processes.world(2)
    if joined_first:
        ranks[1].until("step 1")
    sentences = refusals([*ranks, processes.rank(2, 3)])
    assert len(sentences) == 1
    assert re.match(r"WORLD_SIZE=3 on rank 2 .* but WORLD_SIZE=2 on rank 0", sentences.pop())


def test_mode_version_and_settings_must_agree(processes: Processes) -> None:
    sentences = refusals([processes.rank(0, 2), processes.rank(1, 2, version="v2", RUN_MODE="comm", LAB_STEPS="9")])
    assert len(sentences) == 1
    sentence = sentences.pop()
    assert "RUN_MODE=comm, the version of the code is v2, LAB_DEPTH=8, LAB_STEPS=9 on rank 1" in sentence
    assert "RUN_MODE=dp, the version of the code is v1, LAB_DEPTH=4, LAB_STEPS=20 on rank 0" in sentence


def test_missing_ranks_are_named_during_the_wait_and_at_the_end(processes: Processes) -> None:
    sentences = refusals([processes.rank(rank, 4, LAB_JOIN_TIMEOUT_S="6") for rank in (0, 2)])
    assert sentences == {"ranks 1 and 3 of 4 did not join in 6 s (LAB_JOIN_TIMEOUT_S)"}
    assert all("waiting for ranks 1 and 3" in rank.text for rank in processes.all)


def test_a_missing_rank_0_is_named(processes: Processes) -> None:
    sentences = refusals([processes.rank(1, 2, LAB_JOIN_TIMEOUT_S="5")])
    assert "waiting for rank 0: nothing listens at 127.0.0.1" in sentences.pop()


class Silent(http.server.BaseHTTPRequestHandler):
    pass


@pytest.mark.parametrize("kind", ["silent", "http"])
def test_a_port_of_another_program_is_named_on_all_ranks(processes: Processes, kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", processes.port))
        taken.listen()
        if kind == "http":
            server = http.server.HTTPServer(("127.0.0.1", processes.port), Silent, bind_and_activate=False)
            server.socket.close()
            server.socket = taken
            threading.Thread(target=server.serve_forever, daemon=True).start()
        sentences = refusals(processes.world(2))
        if kind == "http":
            server.shutdown()
    assert sentences == {
        f"MASTER_PORT={processes.port} on 127.0.0.1 is used by another program, not by rank 0: choose another port"
    }
    assert all(rank.printed_after_s("is used by another program") < 12 for rank in processes.all)


def test_another_key_is_named_on_both_ends(processes: Processes) -> None:
    keys = [f"the key of {name} ......" for name in ("ours", "theirs")]
    ranks = [processes.rank(rank, 2, LAB_KEY=key, LAB_JOIN_TIMEOUT_S="12") for rank, key in enumerate(keys)]
    assert [rank.end() for rank in ranks] == [3, 3]
    assert re.search(r"rank 1 of 2 did not join in 12 s .*; \d+ connections had another key, the last one from"
                     r" 127.0.0.1: set the same LAB_KEY on all ranks", ranks[0].text)  # fmt: skip
    assert "is used by a rank 0 with another key: set the same LAB_KEY on all ranks of a run" in ranks[1].text
    assert "theirs" not in ranks[0].text + ranks[1].text


def test_messages_of_strangers_change_nothing_at_any_time(processes: Processes) -> None:
    ranks = [processes.rank(0, 2, steps=20)]
    ranks[0].until("waiting for rank 1")
    ranks.append(processes.rank(1, 2, steps=20))
    answers = 0
    with silent(processes.port, 20):
        while any(rank.process.poll() is None for rank in ranks):
            with contextlib.suppress(ConnectionError):
                answers += len(answers_to_forged(processes.port))
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].text
    assert answers and "dropped    a connection with another key, from 127.0.0.1" in ranks[0].text


def test_an_unknown_address_fails_in_time(processes: Processes) -> None:
    unknown: dict[str, Any] = {"MASTER_ADDR": "nobody.invalid", "LAB_JOIN_TIMEOUT_S": "5"}
    sentences = refusals([processes.rank(rank, 2, **unknown) for rank in (0, 1)])
    assert sentences == {
        "MASTER_ADDR='nobody.invalid' does not resolve to an address (5 s tried): set it to the host of rank 0"
    }
    for rank in processes.all:
        assert "waiting for MASTER_ADDR='nobody.invalid', which does not resolve to an address yet" in rank.text
        assert rank.after_import_s < 10


def test_an_address_may_become_known_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like that of a pod, which gets its name when it runs."""
    known_at, printed = time.monotonic() + 4.0, list[str]()
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("10.1.2.3", 0))]

    def getaddrinfo(*_: object, **__: object) -> object:
        if time.monotonic() < known_at:
            raise socket.gaierror("not yet")
        return found

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert resolve("job-0.job", 30.0, printed.append).ip == "10.1.2.3"
    assert printed == ["waiting for MASTER_ADDR='job-0.job', which does not resolve to an address yet"]


def test_a_fast_restart_waits_for_the_end_of_the_old_run(processes: Processes) -> None:
    old = processes.world(2)
    for rank in old:
        rank.until("step 1")
    old[1].process.kill()
    again = processes.rank(1, 2, steps=3)
    assert old[0].end() == 3
    assert "rank 1 lost" in old[0].text
    first = processes.rank(0, 2, steps=3)
    assert [first.end(), again.end()] == [0, 0], again.text


def test_ctrl_c_while_waiting_ends_a_rank_at_once(processes: Processes) -> None:
    rank = processes.rank(0, 2)
    rank.until("waiting for rank 1")
    rank.process.send_signal(signal.SIGTERM)
    assert rank.end(5) == 143


def test_ranks_join_over_the_store_of_torchrun(processes: Processes) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(processes.port),
    ]
    agent = processes.run([*command, "-m", "tests.lab.cluster.one_rank", "v1", "3", ""], {"RUN_MODE": "dp"})
    assert agent.end() == 0, agent.text
    assert agent.text.count("step 2") == 2


def test_ranks_with_different_restart_counts_find_the_current_server(processes: Processes) -> None:
    """An agent's store outlives the ranks, so it may have the address of an earlier server. It is open to all, so values
    without the key are ignored."""
    store = dist.TCPStore("127.0.0.1", processes.port, None, True, wait_for_workers=False)
    before = free_port()
    open_to_all = dist.PrefixStore("distlab/job", store)
    open_to_all.set("server", f"{processes.port} ")
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}
    late = processes.rank(1, 2, steps=2, **agent, TORCHELASTIC_RESTART_COUNT="0")
    late.until("waiting for rank 0$")
    key = key_of(Config.read({"MASTER_PORT": str(processes.port)}), "job").secret
    open_to_all.set("server", signed_address(key, f"{before} "))
    late.until(f"waiting for rank 0: nothing listens at 127.0.0.1 .*:{before}")
    first = processes.rank(0, 2, steps=2, **agent, TORCHELASTIC_RESTART_COUNT="1")
    assert [first.end(), late.end()] == [0, 0], late.text


def test_rank_0_is_lost_if_it_ends_after_it_admitted_a_rank(processes: Processes) -> None:
    ranks = [processes.rank(rank, 3, LAB_LOST_AFTER_S="1") for rank in (0, 1)]
    for rank in ranks:
        rank.until("waiting for rank 2")
    ranks[0].process.kill()
    assert ranks[1].end() == 3
    assert "rank 0 lost before all ranks had joined: its connection ended" in ranks[1].text


def test_a_rank_that_dies_after_joining_cancels_the_start_for_all(processes: Processes) -> None:
    ranks = [processes.rank(rank, 3, LAB_LOST_AFTER_S="1") for rank in (0, 1)]
    for rank in ranks:
        rank.until("waiting for rank 2")
    ranks[1].process.kill()
    assert ranks[0].end() == 3
    assert "rank 1 lost before all ranks had joined: its connection ended" in ranks[0].text
