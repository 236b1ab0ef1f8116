"""One script under `distlab check`, in local ranks: what it said, and how long that took."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.warm import Warm

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 100
NONE_OF_OURS = re.compile("LAB_|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_|RUN_MODE|TORCHELASTIC")


class Checked(NamedTuple):
    """What became of a script."""

    code: int
    said: str
    run: dict[str, Any]
    seconds: float

    @property
    def sentences(self) -> list[str]:
        """What was found."""
        return [finding["sentence"] for finding in self.run.get("findings", [])]


def check(
    script: Path, world_size: int, folder: Path, *words: str, module: str = "tests.check.undrawn", **environ: str
) -> Checked:
    """Run `distlab check script words` on so many local ranks, with its runs in `folder`."""
    clean = {name: value for name, value in os.environ.items() if not NONE_OF_OURS.match(name)}
    run_id = f"{script.stem}-{time.monotonic_ns()}"
    own = {
        "WORLD_SIZE": str(world_size),
        "LAB_RUNS_DIR": str(folder),
        "LAB_RUN_ID": run_id,
        "LAB_COLLECTIVE_TIMEOUT_S": "60",
    }
    began = time.monotonic()
    started = Warm(module, [str(script), *words], clean | own | environ)
    started.stdin.close()
    try:
        said = started.stdout.read()
        code = started.wait(TIMEOUT_S)
    finally:
        started.kill()
        started.stdout.close()
    seconds = time.monotonic() - began
    written = folder / run_id / "run.json"
    return Checked(code, said, json.loads(written.read_text()) if written.exists() else {}, seconds)


def line_of(script: Path, marker: str) -> str:
    """`file.py:12` of the line that ends with this marker."""
    lines = script.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# ({marker})")]
    return f"{script.name}:{number}"
