"""What is asked of a link, what is refused, and what the rank is told of it."""

from pathlib import Path

import pytest

from distlab.cluster import link
from distlab.cluster.link import Shaped, bits_s, refusals, seconds, shaped
from distlab.config import Config

RANK = {"RANK": "0", "MASTER_ADDR": "worker0", "WORLD_SIZE": "2"}


def config_of(**settings: str) -> Config:
    return Config.read(RANK | settings)


def test_rates_and_delays_are_numbers() -> None:
    assert [bits_s(rate) for rate in ("500kbit", "100mbit", "2.5gbit")] == [5e5, 1e8, 2.5e9]
    assert [seconds(delay) for delay in ("500us", "5ms", "0.5s", "1s")] == [5e-4, 5e-3, 0.5, 1.0]


def test_a_link_that_nobody_shaped_is_refused_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SHAPED", tmp_path / "shaped")
    settings = {"LAB_NET_RATE": "100mbit", "LAB_NET_DELAY": "5ms"}
    (fault,) = refusals(config_of(**settings))
    assert fault.startswith("LAB_NET_RATE=100mbit and LAB_NET_DELAY=5ms and this rank's link was not shaped")
    assert fault.endswith("docker compose -f docker-compose.yaml -f compose/net.yaml up")
    (fault,) = refusals(config_of(LOCAL_RANK="0", LAB_NET_DELAY="5ms"))
    assert "LAB_NET_DELAY=5ms: local ranks have no link to shape" in fault
    assert refusals(config_of()) == []
    assert refusals(Config.read(settings | {"RANK": "0", "MASTER_ADDR": "worker0", "WORLD_SIZE": "1"})) == []


def test_what_was_done_is_read_back_and_counts_for_these_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SHAPED", tmp_path / "shaped")
    done = Shaped(None, "5ms", "this kernel has no netem")
    link.tell_rank(done)
    assert shaped(config_of(LAB_NET_DELAY="5ms")) == done
    assert refusals(config_of(LAB_NET_DELAY="5ms")) == []
    assert shaped(config_of(LAB_NET_DELAY="6ms")) is None
    assert len(refusals(config_of(LAB_NET_DELAY="6ms"))) == 1
