"""An injected bug that the files of a run do not tell in clear: LAB_BUG=mystery:7 in place of its name.

What `make explain` says of the bug stands encoded in the records, where `distlab reveal` reads it: whoever looks for
the bug reads the log and the report first, and neither a search for its name nor a glance at run.json gives it away.
Encoded is not encrypted: anyone who wants to can decode it.
"""

import base64
import json
import re
import zlib
from collections.abc import Mapping

from distlab.report.reading import from_json

MYSTERY = re.compile(r"mystery:([0-9]{1,9})")
UNTOLD = "one of the bugs that {mode} can show with these settings; `distlab reveal` tells which"
MOST_BYTES = 1 << 16  # of a mistake in clear
NAMED = re.compile(r"\s*\(?LAB_BUG=[a-z0-9_, ]+\)?")


def mystery_number(bug: str | None) -> int | None:
    """The 7 of mystery:7; None of any other value of LAB_BUG."""
    found = MYSTERY.fullmatch(bug or "")
    return int(found[1]) if found else None


def seal_mistake(bug: str, mode: str, mistake: Mapping[str, str]) -> dict[str, str]:
    """What the records of a run say of a mistake that is not told: its `name`, `what` and `check` under `sealed`."""
    sealed = base64.b64encode(zlib.compress(json.dumps(dict(mistake)).encode())).decode()
    return {"name": bug, "what": UNTOLD.format(mode=mode), "check": "", "sealed": sealed}


def is_sealed(mistake: Mapping[str, str] | None) -> bool:
    """Whether this mistake of a run is one that is not told."""
    return bool(mistake and mistake.get("sealed"))


def open_mistake(mistake: Mapping[str, str]) -> dict[str, str]:
    """The mistake of a run in clear: its `name`, `what` and `check`; raises ValueError where it was damaged."""
    if not is_sealed(mistake):
        return dict(mistake)
    try:
        opened = from_json(zlib.decompressobj().decompress(base64.b64decode(mistake["sealed"]), MOST_BYTES))
        return {name: str(opened[name]) for name in ("name", "what", "check")}
    except (ValueError, LookupError, TypeError, zlib.error) as error:
        raise ValueError(f"the injected bug {mistake['name']} was written otherwise: {error}") from None


def without_bugs(text: str) -> str:
    """A lesson's text without the bugs that it names, as `trains as well (LAB_BUG=double_reduce).` does."""
    return NAMED.sub("", text)
