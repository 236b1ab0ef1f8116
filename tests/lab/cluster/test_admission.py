"""Admission without sockets: which processes are refused, which wait, and which become members."""

from typing import Any

import pytest
from msgspec.structs import replace

from distlab.lab.cluster.admission import IN_TRANSIT_S, STRANGER_S, Admission, claim_of, differences
from distlab.lab.cluster.messages import Claim
from distlab.lab.config import Config

LOST_AFTER_S = 2.5


def claim(rank: int, **changes: Any) -> Claim:
    plain = Claim(
        rank, 3, "dp", "v1", {"LAB_STEPS": "5"}, f"host{rank}", 100 + rank, f"uid{rank}", "10.0.0.9", 7000 + rank
    )
    return replace(plain, **changes)


class Applicants:
    """An admission with rank 0 in it; a peer is the uid of its claim."""

    def __init__(self, *ranks: int, sealed: bool = False) -> None:
        self.admission = Admission(claim(0), "dp-1", 60.0, LOST_AFTER_S)
        self.now = 0.0
        for rank in (0, *ranks):
            self.request(claim(rank))
        if sealed:
            self.admission.seal(0.0)

    def request(self, claimed: Claim, ip: str = "") -> str:
        self.admission.request(claimed.uid, claimed, ip or f"10.0.0.{claimed.rank + 1}", self.now, claimed.pid)
        return self.reply(claimed.uid)

    def reply(self, uid: str, now: float | None = None) -> str:
        """Return the reply to this connection, with `!` in front of a refusal."""
        self.now = self.now if now is None else now
        for reply in self.admission.replies(self.now):
            if reply.peer == uid:
                return f"{'!' * reply.refused}{reply.sentence}"
        return ""

    def heartbeat(self, now: float, *uids: str) -> None:
        for uid in uids:
            self.admission.on_heartbeat(uid, now)


def test_missing_ranks_are_named_until_all_have_joined() -> None:
    applicants = Applicants(2)
    assert applicants.reply("uid2") == "waiting for rank 1"
    assert applicants.request(claim(1)) == ""
    members = applicants.admission.seal(0.1)
    assert [(each.rank, each.host, each.ip, each.pid, each.life, each.next_port) for each in members] == [
        (rank, f"host{rank}", f"10.0.0.{rank + 1}", 100 + rank, 100 + rank, 7000 + rank) for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 4}, ["WORLD_SIZE=4 on rank 1", "WORLD_SIZE=3 on rank 0"]),
        ({"run_mode": "comm"}, ["RUN_MODE=comm on rank 1", "RUN_MODE=dp on rank 0"]),
        ({"version": "v2"}, ["version of the code is v2 on rank 1", "version of the code is v1 on rank 0"]),
        ({"settings": {"LAB_STEPS": "6"}}, ["LAB_STEPS=6 on rank 1", "LAB_STEPS=5 on rank 0"]),
        ({"settings": {}}, ["LAB_STEPS=20 on rank 1", "LAB_STEPS=5 on rank 0"]),
        ({"settings": {"LAB_STEPS": "5", "LAB_BUG": "x"}}, ["LAB_BUG=x on rank 1", "LAB_BUG=unset on rank 0"]),
        ({"rank": 3, "world_size": 4}, ["WORLD_SIZE=4 on rank 3", "WORLD_SIZE=3 on rank 0"]),
    ],
)
def test_differing_settings_are_named_with_both_values_on_all_ranks(
    changes: dict[str, object], words: list[str]
) -> None:
    applicants = Applicants()
    refused = applicants.request(replace(claim(1), **changes))
    assert refused.startswith("!") and all(word in refused for word in [*words, "host1", "host0"])
    assert applicants.request(claim(2)) == refused == applicants.reply("uid0")


def test_a_duplicate_rank_is_refused_with_both_hosts() -> None:
    applicants = Applicants(1)
    assert (
        applicants.request(claim(1, uid="other", host="elsewhere", pid=7)) == "waiting for the earlier rank 1 to answer"
    )
    applicants.heartbeat(IN_TRANSIT_S / 2, "uid1")
    assert not applicants.reply("other", IN_TRANSIT_S).startswith("!"), "that heartbeat may have been in transit"
    applicants.heartbeat(IN_TRANSIT_S + 0.1, "uid1")
    refused = applicants.reply("other", 1.0)
    assert "rank 1 runs twice, on host host1 (pid 101) and on host elsewhere (pid 7)" in refused
    assert applicants.reply("uid1") == refused


def test_a_second_rank_0_is_refused_at_once() -> None:
    assert Applicants().request(claim(0, uid="other")).startswith("!rank 0 runs twice")


@pytest.mark.parametrize("how", ["its connection ended", "it is silent"])
def test_a_rank_that_restarts_during_the_start_replaces_its_old_process(how: str) -> None:
    applicants = Applicants(1, 2)
    if how == "its connection ended":
        applicants.admission.end("uid1", 0.1)
        assert applicants.admission.missing() == [1]
    applicants.request(claim(1, uid="again", pid=7))
    applicants.heartbeat(LOST_AFTER_S, "uid0", "uid2", "again")
    assert applicants.reply("again", LOST_AFTER_S + 0.1) == ""
    assert applicants.admission.missing() == []
    assert applicants.admission.members[1].claim.pid == 7


@pytest.mark.parametrize(("ends", "why"), [(True, "its connection ended"), (False, "no heartbeat for 2.5 s")])
def test_a_rank_that_is_lost_after_joining_cancels_the_start(ends: bool, why: str) -> None:
    applicants = Applicants(1)
    if ends:
        applicants.admission.end("uid1", 0.0)
    for now, reply in (
        (2.4, f"waiting for {'ranks 1 and 2' if ends else 'rank 2'}"),
        (2.6, f"!rank 1 lost before all ranks had joined: {why}"),
    ):
        applicants.heartbeat(now, "uid0")
        assert applicants.reply("uid0", now) == reply
    applicants = Applicants(1)
    applicants.admission.restart_timeouts(2.0)
    assert applicants.reply("uid0", 2.6) == "waiting for rank 2", "rank 0 itself did not run"


def test_rank_0_stays_until_every_rank_is_informed() -> None:
    applicants = Applicants(1)
    applicants.request(claim(2, world_size=4))
    assert not applicants.admission.all_informed(), "rank 2 expects a rank 3"
    applicants.request(claim(3))
    assert applicants.admission.all_informed()


def test_a_restarted_rank_waits_for_the_end_of_the_old_run() -> None:
    applicants = Applicants(1, 2, sealed=True)
    applicants.admission.end("uid1", 3.0)
    applicants.now = 3.1
    assert "earlier run" in applicants.request(claim(1, uid="again"))
    for now in (3.5, 6.0):
        assert applicants.reply("again", now).startswith("waiting for the end of an earlier run")
    assert not applicants.admission.refusal


def test_a_late_duplicate_ends_alone() -> None:
    applicants = Applicants(1, 2, sealed=True)
    assert applicants.request(claim(1, uid="other")).startswith("waiting")
    applicants.heartbeat(IN_TRANSIT_S + 0.1, "uid1")
    assert "twice" in applicants.reply("other", 1.0) and not applicants.admission.refusal


def test_ranks_of_another_run_on_the_port_are_refused_and_end_no_run() -> None:
    """With the same key, at any time: its rank 0, its ranks with the same numbers, and ranks with higher numbers."""
    applicants = Applicants(1, 2, sealed=True)
    other_run = {"world_size": 4, "settings": {}, "run_mode": "comm"}
    strangers = [claim(rank, uid=f"other{rank}", **other_run) for rank in range(4)]
    assert "waiting for rank 0 to decide about" in applicants.request(strangers[3])
    assert applicants.request(strangers[0]).startswith(
        "!this port is used by the run dp-1, whose rank 0 is on host host0 (pid 100)"
    )
    assert "RUN_MODE=comm" in applicants.request(strangers[1])
    assert "WORLD_SIZE=4" in applicants.reply("other3", STRANGER_S + 0.2)
    assert not applicants.admission.refusal


@pytest.mark.parametrize(("requested_at", "all_end"), [(1.0, True), (61.0, False)])
def test_a_rank_of_a_larger_world_without_a_rank_0_cancels_the_start(requested_at: float, all_end: bool) -> None:
    applicants = Applicants(1, 2, sealed=True)
    applicants.now = requested_at
    assert applicants.request(claim(3, world_size=4)).startswith("waiting")
    assert "!WORLD_SIZE=4 on rank 3" in applicants.reply("uid3", requested_at + STRANGER_S + 0.1)
    assert bool(applicants.admission.refusal) == all_end


def test_ranks_on_the_machine_of_rank_0_are_reachable_from_others() -> None:
    applicants = Applicants()
    applicants.admission.members[0].ip = "127.0.1.1"
    applicants.request(claim(1), "127.0.0.1")
    applicants.request(claim(2), "10.0.0.3")
    assert [each.ip for each in applicants.admission.seal(0.0)] == ["10.0.0.9", "10.0.0.9", "10.0.0.3"]


def test_a_claim_has_only_settings_that_must_be_equal() -> None:
    environ = {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LAB_STEPS": "7", "LAB_VARIANT": "flat,ring",
        "LAB_RUNS_DIR": "/tmp/x", "LAB_JOIN_TIMEOUT_S": "9", "LAB_MEMORY": "900m", "LAB_PROOF": "0",
    }  # fmt: skip
    made = claim_of(Config.read(environ), "v1", "")
    own = {"LAB_DEPTH": "4"}  # a default of dp's own
    assert made.settings == own | {"LAB_STEPS": "7", "LAB_VARIANT": "flat,ring", "LAB_PROOF": "0"}
    assert differences(made, made) == ""


@pytest.mark.parametrize(
    ("mode", "settings", "contents", "words"),
    [
        ("dp", {}, ("ab", "cd"), "the sha256 of the text=ab"),
        ("compress", {"LAB_RATIO": "0.5"}, ("", ""), "LAB_RATIO=0.5"),
    ],
)
def test_the_text_and_variables_of_a_mode_must_be_equal_too(
    mode: str, settings: dict[str, str], contents: tuple[str, str], words: str
) -> None:
    environ = {"RUN_MODE": mode, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    one = claim_of(Config.read(environ | settings), "v1", "", {"the sha256 of the text": contents[0]})
    other = claim_of(Config.read(environ), "v1", "", {"the sha256 of the text": contents[1]})
    assert words in differences(one, other)
    assert differences(one, one) == ""
