"""A container's memory and its limit, read from both kinds of cgroup."""

from pathlib import Path

from distlab.measure.process_memory import ContainerMemory


def test_version_2_without_the_cache(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "950\n",
        "memory.stat": "anon 5\ninactive_file 150\nactive_file 100\n",
    }.items():
        (tmp_path / name).write_text(text)
    memory = ContainerMemory(tmp_path)
    assert (memory.limit_bytes, memory.used_bytes(), memory.kept_bytes(), memory.share()) == (1000, 800, 700, 0.8)
    (tmp_path / "memory.max").write_text("max\n")
    unlimited = ContainerMemory(tmp_path)
    assert (unlimited.limit_bytes, unlimited.used_bytes(), unlimited.share()) == (None, 800, None)


def test_version_1_without_the_cache(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    files = {
        "memory.limit_in_bytes": "1000",
        "memory.usage_in_bytes": "950",
        "memory.stat": "cache 9\ntotal_inactive_file 50\n",
    }
    for name, text in files.items():
        (tmp_path / "memory" / name).write_text(text)
    assert ContainerMemory(tmp_path).share() == 0.9
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    unlimited = ContainerMemory(tmp_path)
    assert (unlimited.used_bytes(), unlimited.share()) == (None, None)  # it may be the whole machine


def test_no_limit_is_no_share(tmp_path: Path) -> None:
    assert (ContainerMemory(tmp_path).used_bytes(), ContainerMemory(tmp_path).share()) == (None, None)
    (tmp_path / "memory.max").write_text("max\n")
    assert ContainerMemory(tmp_path).share() is None
