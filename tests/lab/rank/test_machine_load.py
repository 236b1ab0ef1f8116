"""The load that Linux reports in /proc, and None for values that a system does not report."""

from pathlib import Path

import pytest

from distlab.lab.rank.machine_load import read_load

pytestmark = pytest.mark.timeout(20)


def test_cores_processor_load_and_pressure_are_read_from_proc(tmp_path: Path) -> None:
    for name, text in {
        "loadavg": "7.50 3.25 1.00 31/512 4242\n",
        "cpuinfo": "processor\t: 0\nmodel name\t: Example 9000\n\nprocessor\t: 1\nmodel name\t: Example 9000\n",
        "pressure/cpu": "some avg10=48.76 avg60=31.00 avg300=55.84 total=1\nfull avg10=0.00 avg60=0 avg300=0 total=0\n",
        "sys/kernel/random/boot_id": "one-boot\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    seen = read_load("end", tmp_path)
    assert (seen.moment, seen.machine, seen.processor) == ("end", "one-boot", "Example 9000")
    assert (seen.load_average, seen.runnable, seen.cpu_pressure) == (7.5, 30, 0.4876)
    assert seen.cores >= 1


@pytest.mark.parametrize("text", [None, "", "nonsense", "1.0 1.0 1.0"])
def test_values_that_a_system_does_not_report_are_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "loadavg").write_text(text)
    seen = read_load("start", tmp_path)
    assert (seen.load_average, seen.runnable, seen.cpu_pressure, seen.processor) == (None, None, None, "")
    assert seen.machine
