"""What users rely on, as `interface.toml` lists it: literals, and nothing that is computed from the code."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
FROZEN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("interface.toml").read_text())


def missing(now: Iterable[str], *path: str) -> list[str]:
    """The names at this place of interface.toml that are not there any more."""
    frozen = FROZEN
    for key in path:
        frozen = frozen[key]
    return sorted(set(frozen) - set(now))


def claims_of(mode: str, kind: str) -> list[str]:
    """The checks and comparisons of a mode that interface.toml has as "claimed" or "made"."""
    return [name for name, owners in FROZEN[kind].items() if mode in owners or owners == ["every mode"]]
