"""Who is let in, without sockets: what is refused and to whom, who waits, and who is a member."""

from typing import Any

import pytest
from msgspec.structs import replace

from distlab.lab.cluster.admission import CROSSING_S, STRANGER_S, Admission, claim_of, differences
from distlab.lab.cluster.messages import Claim
from distlab.lab.config import Config

LOST_AFTER_S = 2.5


def claim(rank: int, **changes: Any) -> Claim:
    plain = Claim(
        rank, 3, "dp", "v1", {"LAB_STEPS": "5"}, f"host{rank}", 100 + rank, f"uid{rank}", "10.0.0.9", 7000 + rank
    )
    return replace(plain, **changes)


class Door:
    """An admission with rank 0 in it; a peer is the uid of its claim."""

    def __init__(self, *ranks: int, sealed: bool = False) -> None:
        self.admission = Admission(claim(0), "dp-1", 60.0, LOST_AFTER_S)
        self.now = 0.0
        for rank in (0, *ranks):
            self.ask(claim(rank))
        if sealed:
            self.admission.seal(0.0)

    def ask(self, asked: Claim, ip: str = "") -> str:
        self.admission.ask(asked.uid, asked, ip or f"10.0.0.{asked.rank + 1}", self.now, asked.pid)
        return self.said(asked.uid)

    def said(self, uid: str, now: float | None = None) -> str:
        """What this connection is told, with `!` in front of a refusal."""
        self.now = self.now if now is None else now
        for reply in self.admission.look(self.now):
            if reply.peer == uid:
                return f"{'!' * reply.refused}{reply.sentence}"
        return ""

    def hear(self, now: float, *uids: str) -> None:
        for uid in uids:
            self.admission.hear(uid, now)


def test_the_missing_are_named_until_all_are_there() -> None:
    door = Door(2)
    assert door.said("uid2") == "waiting for rank 1"
    assert door.ask(claim(1)) == ""
    members = door.admission.seal(0.1)
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
def test_what_differs_is_named_with_both_values_to_all(changes: dict[str, object], words: list[str]) -> None:
    door = Door()
    refused = door.ask(replace(claim(1), **changes))
    assert refused.startswith("!") and all(word in refused for word in [*words, "host1", "host0"])
    assert door.ask(claim(2)) == refused == door.said("uid0")


def test_a_doubled_rank_is_refused_with_both_hosts() -> None:
    door = Door(1)
    assert door.ask(claim(1, uid="other", host="elsewhere", pid=7)) == "waiting for the earlier rank 1 to respond"
    door.hear(CROSSING_S / 2, "uid1")
    assert not door.said("other", CROSSING_S).startswith("!"), "that sign of life may have been on its way"
    door.hear(CROSSING_S + 0.1, "uid1")
    refused = door.said("other", 1.0)
    assert "rank 1 runs twice, on host host1 (pid 101) and on host elsewhere (pid 7)" in refused
    assert door.said("uid1") == refused


def test_a_second_rank_0_is_doubled_at_once() -> None:
    assert Door().ask(claim(0, uid="other")).startswith("!rank 0 runs twice")


@pytest.mark.parametrize("how", ["its connection ended", "it is silent"])
def test_a_rank_that_restarts_while_others_arrive_takes_its_own_place(how: str) -> None:
    door = Door(1, 2)
    if how == "its connection ended":
        door.admission.end("uid1", 0.1)
        assert door.admission.missing() == [1]
    door.ask(claim(1, uid="again", pid=7))
    door.hear(LOST_AFTER_S, "uid0", "uid2", "again")
    assert door.said("again", LOST_AFTER_S + 0.1) == ""
    assert door.admission.missing() == []
    assert door.admission.members[1].claim.pid == 7


@pytest.mark.parametrize(("ends", "why"), [(True, "its connection ended"), (False, "no heartbeat for 2.5 s")])
def test_a_rank_that_came_and_is_gone_ends_the_start(ends: bool, why: str) -> None:
    door = Door(1)
    if ends:
        door.admission.end("uid1", 0.0)
    for now, said in (
        (2.4, f"waiting for {'ranks 1 and 2' if ends else 'rank 2'}"),
        (2.6, f"!rank 1 lost before all ranks had joined: {why}"),
    ):
        door.hear(now, "uid0")
        assert door.said("uid0", now) == said
    door = Door(1)
    door.admission.forgive(2.0)
    assert door.said("uid0", 2.6) == "waiting for rank 2", "rank 0 has not run itself"


def test_rank_0_stays_until_every_rank_has_heard() -> None:
    door = Door(1)
    door.ask(claim(2, world_size=4))
    assert not door.admission.all_told(), "rank 2 believes in a rank 3"
    door.ask(claim(3))
    assert door.admission.all_told()


def test_the_successor_of_a_dead_rank_waits_for_the_end_of_the_old_run() -> None:
    door = Door(1, 2, sealed=True)
    door.admission.end("uid1", 3.0)
    door.now = 3.1
    assert "earlier run" in door.ask(claim(1, uid="again"))
    for now in (3.5, 6.0):
        assert door.said("again", now).startswith("waiting for the end of an earlier run")
    assert not door.admission.refusal


def test_a_late_double_ends_only_itself() -> None:
    door = Door(1, 2, sealed=True)
    assert door.ask(claim(1, uid="other")).startswith("waiting")
    door.hear(CROSSING_S + 0.1, "uid1")
    assert "twice" in door.said("other", 1.0) and not door.admission.refusal


def test_another_run_on_the_port_is_turned_away_and_ends_nothing() -> None:
    """With the same key, and as soon as it likes: its rank 0, its ranks of the same numbers and those beyond."""
    door = Door(1, 2, sealed=True)
    theirs = {"world_size": 4, "settings": {}, "run_mode": "comm"}
    strangers = [claim(rank, uid=f"theirs{rank}", **theirs) for rank in range(4)]
    assert "waiting for rank 0 to decide about" in door.ask(strangers[3])
    assert door.ask(strangers[0]).startswith("!this port is rank 0's of the run dp-1, on host host0 (pid 100)")
    assert "RUN_MODE=comm" in door.ask(strangers[1])
    assert "WORLD_SIZE=4" in door.said("theirs3", STRANGER_S + 0.2)
    assert not door.admission.refusal


@pytest.mark.parametrize(("asked_at", "all_end"), [(1.0, True), (61.0, False)])
def test_a_rank_of_a_larger_world_without_a_rank_0_breaks_the_start(asked_at: float, all_end: bool) -> None:
    door = Door(1, 2, sealed=True)
    door.now = asked_at
    assert door.ask(claim(3, world_size=4)).startswith("waiting")
    assert "!WORLD_SIZE=4 on rank 3" in door.said("uid3", asked_at + STRANGER_S + 0.1)
    assert bool(door.admission.refusal) == all_end


def test_ranks_on_rank_0s_machine_are_found_by_others_too() -> None:
    door = Door()
    door.admission.members[0].ip = "127.0.1.1"
    door.ask(claim(1), "127.0.0.1")
    door.ask(claim(2), "10.0.0.3")
    assert [each.ip for each in door.admission.seal(0.0)] == ["10.0.0.9", "10.0.0.9", "10.0.0.3"]


def test_a_claim_carries_what_must_agree_and_nothing_else() -> None:
    environ = {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LAB_STEPS": "7", "LAB_VARIANT": "flat,ring",
        "LAB_RUNS_DIR": "/tmp/x", "LAB_JOIN_TIMEOUT_S": "9", "LAB_MEMORY": "900m", "LAB_PROOF": "0",
    }  # fmt: skip
    made = claim_of(Config.read(environ), "v1", "")
    own = {"LAB_DEPTH": "4"}  # a default of dp's own
    assert made.settings == own | {"LAB_STEPS": "7", "LAB_VARIANT": "flat,ring", "LAB_PROOF": "0"}
    assert differences(made, made) == ""


@pytest.mark.parametrize(
    ("mode", "given", "contents", "words"),
    [
        ("dp", {}, ("ab", "cd"), "the sha256 of the text=ab"),
        ("compress", {"LAB_RATIO": "0.5"}, ("", ""), "LAB_RATIO=0.5"),
    ],
)
def test_the_text_and_a_modes_own_variables_must_agree_too(
    mode: str, given: dict[str, str], contents: tuple[str, str], words: str
) -> None:
    environ = {"RUN_MODE": mode, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    one = claim_of(Config.read(environ | given), "v1", "", {"the sha256 of the text": contents[0]})
    other = claim_of(Config.read(environ), "v1", "", {"the sha256 of the text": contents[1]})
    assert words in differences(one, other)
    assert differences(one, one) == ""
