"""Memory near its limit, read from both kinds of cgroup."""

from pathlib import Path

from workers.cluster.pressure import MemoryPressure


def test_version_2_without_the_cache(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "950\n",
        "memory.stat": "anon 5\ninactive_file 150\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert MemoryPressure(tmp_path).share() == 0.8


def test_version_1_without_the_cache(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    files = {
        "memory.limit_in_bytes": "1000",
        "memory.usage_in_bytes": "950",
        "memory.stat": "cache 9\ntotal_inactive_file 50\n",
    }
    for name, text in files.items():
        (tmp_path / "memory" / name).write_text(text)
    assert MemoryPressure(tmp_path).share() == 0.9


def test_no_limit_is_no_share(tmp_path: Path) -> None:
    assert MemoryPressure(tmp_path).share() is None
    (tmp_path / "memory.max").write_text("max\n")
    assert MemoryPressure(tmp_path).share() is None
