"""The stable interface in `interface.toml`: literals only, nothing computed from the code."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
FROZEN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("interface.toml").read_text())


def missing(now: Iterable[str], *path: str) -> list[str]:
    """Return the names at this key of interface.toml that are missing now."""
    frozen = FROZEN
    for key in path:
        frozen = frozen[key]
    return sorted(set(frozen) - set(now))


def claims_of(mode: str, kind: str) -> list[str]:
    """Return the checks and comparisons that interface.toml lists for a mode as "claimed" or "made"."""
    return [name for name, owners in FROZEN[kind].items() if mode in owners or owners == ["every mode"]]
