"""Slow links: refused settings, the queues that are installed, and kernels without them; the kernel is a fake."""

import errno
from pathlib import Path
from typing import Any

import pytest
from pyroute2.netlink.exceptions import NetlinkError

from distlab.lab.cluster import link
from distlab.lab.cluster.link import LinkError, Shaped, bits_s, bucket, refusals, seconds, shape, shaped
from distlab.lab.config import Config

RANK = {"RANK": "0", "MASTER_ADDR": "worker0", "WORLD_SIZE": "2"}


def config_of(**settings: str) -> Config:
    return Config.read(RANK | settings)


def test_rates_and_delays_are_numbers() -> None:
    assert [bits_s(rate) for rate in ("500kbit", "100mbit", "2.5gbit")] == [5e5, 1e8, 2.5e9]
    assert [seconds(delay) for delay in ("500us", "5ms", "0.5s", "1s")] == [5e-4, 5e-3, 0.5, 1.0]


def test_an_unshaped_link_is_refused_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SHAPED", tmp_path / "shaped")
    settings = {"LAB_NET_RATE": "100mbit", "LAB_NET_DELAY": "5ms"}
    (fault,) = refusals(config_of(**settings))
    assert fault.startswith("LAB_NET_RATE=100mbit and LAB_NET_DELAY=5ms: this rank's link was not shaped")
    assert fault.endswith("docker compose -f docker-compose.yaml -f compose/net.yaml up")
    (fault,) = refusals(config_of(LOCAL_RANK="0", LAB_NET_DELAY="5ms"))
    assert "LAB_NET_DELAY=5ms: local ranks have no link to shape" in fault
    assert refusals(config_of()) == []
    assert refusals(Config.read(settings | {"RANK": "0", "MASTER_ADDR": "worker0", "WORLD_SIZE": "1"})) == []


def test_the_result_is_read_back_for_the_same_settings_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SHAPED", tmp_path / "shaped")
    done = Shaped(None, "5ms", "this kernel has no netem")
    link.write_shaped(done)
    assert shaped(config_of(LAB_NET_DELAY="5ms")) == done
    assert refusals(config_of(LAB_NET_DELAY="5ms")) == []
    assert shaped(config_of(LAB_NET_DELAY="6ms")) is None
    assert len(refusals(config_of(LAB_NET_DELAY="6ms"))) == 1


class Interface(dict[str, Any]):
    """An interface as pyroute2 lists it."""

    def get_attr(self, name: str) -> Any:
        return {"IFLA_MTU": self["mtu"]}[name]


LOOPBACK, ETH0 = Interface(index=1, flags=1 | 8, mtu=65536), Interface(index=7, flags=1, mtu=1500)
ETH1, DOWN = Interface(index=9, flags=1, mtu=9000), Interface(index=2, flags=0, mtu=1480)


class Kernel:
    """A fake of pyroute2's IPRoute: records the queues, and refuses some kinds with an errno."""

    def __init__(self, *interfaces: Interface, refuses: dict[str, int] | None = None) -> None:
        self.interfaces, self.refuses = interfaces, refuses or {}
        self.queues: list[tuple[str, str, int, dict[str, Any]]] = []

    def get_links(self) -> tuple[Interface, ...]:
        return self.interfaces

    def tc(self, command: str, kind: str, index: int, **parameters: Any) -> None:
        if kind in self.refuses:
            raise NetlinkError(self.refuses[kind])
        self.queues.append((command, kind, index, parameters))

    def roots(self) -> list[str]:
        """Return the kinds of the root queues, each of which replaced the one before."""
        return [kind for _, kind, _, parameters in self.queues if "root" in parameters]


def test_the_rate_counts_data_without_headers_and_the_bucket_grows_with_it() -> None:
    wanted = {1e7: 3028, 1e8: 13070, 5e8: 65349, 2e9: 261395}  # two packets, then a millisecond's worth
    for rate, burst in wanted.items():
        parameters = bucket(rate, 1500)
        assert parameters["rate"] * 1448 / 1514 == pytest.approx(rate / 8, rel=1e-6)
        assert parameters["burst"] == burst
        assert parameters["limit"] >= burst + (1 << 20)
    assert bucket(1e7, 9000)["burst"] == 2 * 9014


def test_every_outward_interface_gets_the_delay_and_behind_it_the_rate() -> None:
    kernel = Kernel(LOOPBACK, DOWN, ETH0, ETH1)
    assert shape(kernel, config_of(LAB_NET_RATE="100mbit", LAB_NET_DELAY="5ms")) == Shaped("100mbit", "5ms")
    assert [(kind, index) for _, kind, index, _ in kernel.queues] == [
        ("netem", 7),
        ("tbf", 7),
        ("netem", 9),
        ("tbf", 9),
    ]
    delay, rate = (more for *_, more in kernel.queues[:2])
    assert (delay["delay"], delay["root"], delay["handle"]) == (5000, True, "1:")
    assert rate == {"parent": "1:1", "handle": "2:"} | bucket(1e8, 1500)


def test_a_single_queue_is_the_root() -> None:
    rate, delay = Kernel(ETH0), Kernel(ETH0)
    shape(rate, config_of(LAB_NET_RATE="10mbit"))
    shape(delay, config_of(LAB_NET_DELAY="1ms"))
    assert [kernel.roots() for kernel in (rate, delay)] == [["tbf"], ["netem"]]


def test_a_kernel_without_netem_is_reported_and_still_gets_the_rate() -> None:
    kernel = Kernel(ETH0, refuses={"netem": errno.ENOENT})
    done = shape(kernel, config_of(LAB_NET_RATE="100mbit", LAB_NET_DELAY="5ms"))
    assert done.lacks == "this kernel has no netem, so LAB_NET_DELAY=5ms delays nothing here"
    assert kernel.roots() == ["tbf"]


@pytest.mark.parametrize(
    ("kernel", "settings", "words"),
    [
        (Kernel(ETH0, refuses={"tbf": errno.ENOENT}), {"LAB_NET_RATE": "1mbit"}, "LAB_NET_RATE=1mbit: this kernel has no token bucket"),
        (Kernel(ETH0, refuses={"tbf": errno.EPERM}), {"LAB_NET_RATE": "1mbit"}, r"refused tbf \(Operation not permitted\)"),
        (Kernel(ETH0, refuses={"tbf": errno.EINVAL}), {"LAB_NET_RATE": "1mbit"}, r"refused tbf \(Invalid argument\)"),
        (Kernel(ETH0, refuses={"netem": errno.EINVAL}), {"LAB_NET_DELAY": "1ms"}, r"refused netem \(Invalid argument\)"),
        (Kernel(LOOPBACK, DOWN), {"LAB_NET_RATE": "1mbit"}, "no network interface that is up"),
        (Kernel(ETH0), {"LAB_NET_RATE": "40gbit"}, "LAB_NET_RATE=40gbit is out of range, allowed: 34gbit at most"),
        (Kernel(ETH0), {"LAB_NET_DELAY": "300s"}, "LAB_NET_DELAY=300s is out of range, allowed: 100s at most"),
    ],
)  # fmt: skip
def test_a_link_that_cannot_be_shaped_is_refused_in_one_sentence(
    kernel: Kernel, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(LinkError, match=words) as raised:
        shape(kernel, config_of(**settings))
    assert "\n" not in str(raised.value)
