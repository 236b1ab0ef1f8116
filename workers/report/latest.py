"""runs/latest, the link to the newest run: put in place in one step, whatever an earlier process left beside it."""

import secrets
import time
from contextlib import suppress
from pathlib import Path

LATEST = "latest"
STALE_S = 60.0  # a draft lives for two calls of the kernel


def point_latest(folder: Path) -> None:
    """Make `latest` beside `folder` a link to it; two runs that end at once leave one of the two, never none.

    A draft has a name of its own: containers number their processes alike, and one that was killed leaves its draft.
    """
    runs = folder.parent
    for draft in runs.glob(f".{LATEST}.*"):
        with suppress(OSError):  # another run's, which is done with it
            if time.time() - draft.lstat().st_mtime > STALE_S:
                draft.unlink()
    draft = runs / f".{LATEST}.{secrets.token_hex(8)}"
    draft.symlink_to(folder.name)
    try:
        draft.replace(runs / LATEST)
    finally:
        draft.unlink(missing_ok=True)
