"""Bytes of compressed sums, compared with sums by hand."""

import pytest

from distlab.experiments.compress.predictions import FORMULAS, bucket_bytes, bucket_calls, topk_pays_below
from distlab.techniques.compression.compressors import num_kept
from distlab.techniques.compression.powersgd import factors

SHAPES = [(100, 50), (50,)]  # 5050 numbers


def sent(method: str, world_size: int, itemsize: int = 4, ratio: float = 0.01) -> float:
    return bucket_bytes(method, world_size, SHAPES, itemsize, ratio=ratio, low_rank=4)


def test_bytes_by_hand() -> None:
    assert sent("dense", 2) == 20200
    assert sent("fp16", 2) == sent("fp16", 2, itemsize=8) == 10100
    assert sent("int8", 2) == 5050 + 4
    assert sent("topk", 3) == 2 * 8 * 50  # round(50.5) is the even 50
    assert sent("randomk", 2) == 4 * 50
    assert sent("powersgd", 2) == 4 * (4 * 150 + 50)
    assert {sent(method, 1) for method in FORMULAS} == {0.0}


def test_only_topk_bytes_grow_with_the_world_size() -> None:
    for method in FORMULAS:
        growth = sent(method, 256) / sent(method, 2)
        assert growth == pytest.approx(255 if method == "topk" else 2 * 255 / 256), method


@pytest.mark.parametrize(("ratio", "itemsize", "worlds"), [(0.01, 4, 100), (0.1, 4, 10), (0.1, 8, 13.33), (1.0, 4, 1)])
def test_topk_saves_bytes_below_the_crossing(ratio: float, itemsize: int, worlds: float) -> None:
    crossing = topk_pays_below(ratio, itemsize)
    assert crossing == pytest.approx(worlds, rel=1e-3)
    for world_size in range(2, 200):
        message = 10_000 * ratio * (4 + itemsize) * (world_size - 1)
        dense = 2 * (world_size - 1) / world_size * itemsize * 10_000
        assert (message < dense - 1e-6) == (world_size < crossing - 1e-9)


def test_kept_numbers_and_factors_are_bounded() -> None:
    assert num_kept(10, 1e-6) == num_kept(1, 0.5) == 1
    assert num_kept(7, 1.0) == 7
    assert factors((3, 3), 4) == 9
    assert factors((1, 1), 1) == 1
    assert factors((6, 2, 8), 2) == 2 * (6 + 16)
    assert factors((12,), 1) == 12
    assert [bucket_calls(method, SHAPES, 4) for method in ("dense", "int8", "powersgd")] == [1, 2, 2]
    assert bucket_calls("powersgd", [(50,), (3, 3)], 4) == 1
