"""Parse sizes as people write them, and refuse impossible ones."""

import pytest

from distlab.cli import sizes
from distlab.cli.plan import main
from distlab.cli.sizes import NotASize


@pytest.mark.parametrize(
    ("written", "bytes_per_s"),
    [
        ("50GBps", 50e9), ("50GB/s", 50e9), ("50gB", 50e9), ("50Gbps", 6.25e9), ("50gbps", 6.25e9), ("50Gbit", 6.25e9),
        ("50GBIT/s", 6.25e9), ("100mbit", 12.5e6),
    ],
)  # fmt: skip
def test_a_large_b_is_a_byte_and_a_small_one_a_bit(written: str, bytes_per_s: float) -> None:
    assert sizes.rate(written) == bytes_per_s


@pytest.mark.parametrize("written", ["50Gb", "50Gb/s", "50GBPS", "50gb", "50Gbps/s", "50G", "50Gbits", "50"])
def test_an_ambiguous_rate_is_refused(written: str) -> None:
    with pytest.raises(NotASize, match="in bits, or 50GB/s or 50GBps, in bytes"):
        sizes.rate(written)


@pytest.mark.parametrize(
    "option",
    ["params {}", "params {}T", "gpus {}", "layers {}", "gpu-memory {}GB", "link {}Gbit", "latency {}s", "flops {}"],
)
@pytest.mark.parametrize("digits", [20, 310, 5000])
def test_sizes_beyond_any_machine_are_refused(option: str, digits: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A float of more than 310 digits is infinite, and cannot become a whole number."""
    assert main(f"--params 7B --gpus 64 --gpu-memory 80GB --{option.format('9' * digits)}".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"refused    --{option.split()[0]}=") and "is beyond any machine, allowed: up to 1e+" in line


@pytest.mark.parametrize(
    ("option", "code"), [("gpus 1000000000", 0), ("gpus 1000000008", 2), ("params 1000000T", 0), ("params 1000001T", 2)]
)
def test_the_largest_size_is_allowed(option: str, code: int) -> None:
    assert main(f"--params 7B --gpus 64 --gpu-memory 80GB --{option}".split()) == code


@pytest.mark.parametrize(
    ("option", "words"), [("params", "is nothing"), ("flops", "is nothing"), ("utilisation", "is out of range")]
)
def test_tiny_sizes_are_refused(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"--params 7B --gpus 64 --gpu-memory 80GB --{option} 0.{'0' * 310}1".split()) == 2
    assert words in capsys.readouterr().err


def test_the_largest_allowed_sizes_have_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    most = (
        "--params 1000000T --gpus 1000000000 --gpu-memory 80GB --layers 1000000000 --seq 1000000000 --batch 1000000000"
    )
    assert main(most.split()) == 0
    printed = capsys.readouterr().out
    assert "take       nothing" in printed and "inf" not in printed.split() and "nan" not in printed.split()
