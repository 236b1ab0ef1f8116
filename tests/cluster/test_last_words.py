"""What is left behind by a rank, and what is said for it once the kernel has killed it."""

import socket
from pathlib import Path

from distlab.cluster import oom_notice
from distlab.cluster.heartbeat import Hearing, RunPosition
from distlab.cluster.rendezvous_server import receive, udp_socket


def test_the_others_are_told_at_the_addresses_that_were_left(tmp_path: Path) -> None:
    place = tmp_path / "words"
    place.touch()
    with udp_socket(socket.AF_INET, "127.0.0.1") as other:
        oom_notice.leave(2, [b"one", b"two"], socket.AF_INET, [other.getsockname()], place)
        assert place.stat().st_mode & 0o077 == 0
        assert "rank 2 was killed by the OOM killer" in oom_notice.say(place)
        assert [datagram for datagram, _ in receive(other)] == [b"one", b"two"]


def test_nothing_is_left_where_nobody_would_read_it(tmp_path: Path) -> None:
    oom_notice.leave(2, [], socket.AF_INET, [], tmp_path / "words")
    assert list(tmp_path.iterdir()) == []
    assert "before it met the others" in oom_notice.say(tmp_path / "words")


def test_a_killed_rank_is_silent_at_once_whatever_still_arrives_of_it() -> None:
    hearing, dead = Hearing(0, range(3), 2.5, 0.0), Hearing(2, range(3), 2.5, 0.0)
    hearing.killed.add(2)
    hearing.take(dead.beat(RunPosition(1, 7, "flat"), 0.5, 0.1), 0.2)
    assert hearing.heard(0.3) == {0, 1}
    assert set(hearing.hears(0.3)) == {0, 1}
    last = hearing.seen(RunPosition(), 0.3)
    assert [rank for rank in last if last[rank].killed] == [2]
