"""Where the key of a run comes from, and which ranks come to the same one."""

from pathlib import Path

import pytest

from distlab.cluster.authenticated_messages import Key, key_of
from distlab.config import Config, ConfigError

NOWHERE = Path("/nowhere/lab_key")


def key(run: str = "", secret: Path = NOWHERE, **environ: str) -> Key:
    return key_of(Config.read({"RANK": "1", "MASTER_ADDR": "a"} | environ), run, secret)


def test_what_is_given_makes_the_key() -> None:
    given = key(LAB_KEY="0123456789abcdef")
    assert given == key(LAB_KEY="0123456789abcdef", MASTER_PORT="7", RUN_MODE="comm")
    assert given != key(LAB_KEY="0123456789abcdeF")
    assert (len(given.secret), given.derived) == (32, False)


def test_without_one_it_is_derived_from_what_all_ranks_share_whatever_else_differs() -> None:
    derived = key()
    assert derived.derived
    assert derived == key(RUN_MODE="comm", WORLD_SIZE="3", LAB_STEPS="7", RANK="0")  # those are refused by name
    assert derived != key(MASTER_PORT="7")
    assert derived != key("another run of the agent")


def test_a_mounted_secret_is_taken_where_no_variable_is_set(tmp_path: Path) -> None:
    secret = tmp_path / "lab_key"
    secret.write_text("0123456789abcdef\n")
    assert key(secret=secret) == key(LAB_KEY="0123456789abcdef")
    assert key(secret=secret, LAB_KEY="fedcba9876543210") == key(LAB_KEY="fedcba9876543210")
    secret.write_text("")
    assert key(secret=secret) == key()


def test_a_file_of_ones_own_comes_before_a_mounted_one(tmp_path: Path) -> None:
    own, mounted = tmp_path / "own", tmp_path / "lab_key"
    own.write_text("0123456789abcdef\n")
    mounted.write_text("fedcba9876543210\n")
    assert key(secret=mounted, LAB_KEY_FILE=str(own)) == key(LAB_KEY="0123456789abcdef")
    assert key(LAB_KEY="fedcba9876543210", LAB_KEY_FILE=str(own)) == key(LAB_KEY="fedcba9876543210")


def test_a_mounted_secret_that_is_too_short_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "lab_key"
    secret.write_text("guess")
    with pytest.raises(ConfigError, match="lab_key, the key of this run, holds 5 characters: expected 16 and more"):
        key(secret=secret)


def test_a_secret_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "lab_key"
    secret.write_text("0123456789abcdef")

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("distlab.cluster.authenticated_messages.read_key", denied)
    with pytest.raises(ConfigError, match="lab_key, the key of this run, cannot be read: Permission denied"):
        key(secret=secret)
