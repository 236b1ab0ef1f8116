"""A rank's live state: what is written is read, whole or not at all, and what is none is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from distlab.report.reading import BrokenRecord
from distlab.report.status import places, read_status, status_path, write_status
from tests.live.states import state

pytestmark = pytest.mark.timeout(60)

WHOLE = state(
    waits_for=[2],
    losses={"ring": [[0, 1.5], [1, None]]},
    sent=[[["127.0.0.1", 5], ["127.0.0.1", 6], 700]],
    phase="send",
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_status(tmp_path, WHOLE)
    assert read_status(status_path(tmp_path, 0)) == WHOLE
    assert places(tmp_path) == {0: tmp_path / "live.rank0.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["live.rank0.json"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"rank": 0, "wor', "is not the live state of a rank (Unterminated"),
        ("", "is not the live state of a rank (Expecting value"),
        ("[]", "is not the live state of a rank (Expected `object`"),
        ('{"rank": 0}', "missing required field"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    status_path(tmp_path, 0).write_text(text)
    with pytest.raises(BrokenRecord, match=r"live\.rank0\.json") as broken:
        read_status(status_path(tmp_path, 0))
    assert sentence in str(broken.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "five"), ("work", None), ("waits_for", ["rank 2"]), ("losses", {"ring": [[0]]}), ("losses", {"ring": 5}),
        ("sent", [[["127.0.0.1", 5], ["127.0.0.1"], 700]]), ("sent", [[5, 6, 7]]), ("sent", [["a"]]),
    ],
)  # fmt: skip
def test_a_value_that_is_none_is_named(tmp_path: Path, name: str, value: Any) -> None:
    write_status(tmp_path, WHOLE)
    written = json.loads(status_path(tmp_path, 0).read_text())
    status_path(tmp_path, 0).write_text(json.dumps(written | {name: value}))
    with pytest.raises(BrokenRecord, match=r"live\.rank0\.json is not the live state of a rank"):
        read_status(status_path(tmp_path, 0))
