"""Dumps as torch's recorder writes them with NCCL, for tests that need no run and no GPU."""

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
FOLDER = "/home/me/job"
BEGAN_NS = 1_700_000_000 * 10**9
WORLD = "0"


def entry(
    op: str, seq: int, line: int = 12, *, group: str = WORLD, state: str = "completed", number: int = 0, size: int = 4,
    dtype: str = "Float", callers: Sequence[tuple[str, int]] = (),
) -> dict[str, Any]:  # fmt: skip
    """A call of train.py at this line, `seq` from 0; "send 0->1" is a message."""
    message = op.startswith(("send", "recv"))
    began = BEGAN_NS + number * 10**7
    frames = [(f"{TORCH}/distributed_c10d.py", 2500, op.split(" ")[0]), (f"{TORCH}/c10d_logger.py", 81, "wrapper")]
    frames += [(f"{FOLDER}/{file}", number, "step") for file, number in callers]
    frames += [(f"{FOLDER}/train.py", line, "<module>")]
    return {
        "frames": [{"filename": file, "line": number, "name": name} for file, number, name in frames],
        "record_id": number, "pg_id": int(group), "process_group": (group, "node" if group != WORLD else "default_pg"),
        "collective_seq_id": seq + 1, "p2p_seq_id": seq + 1 if message else 0, "op_id": number + 1,
        "profiling_name": f"nccl:{op}", "time_created_ns": began, "duration_ms": None, "is_p2p": message,
        "input_sizes": [[size]], "input_dtypes": [dtype], "output_sizes": [[size]], "output_dtypes": [dtype],
        "state": state, "time_discovered_started_ns": began + 10**5 if state != "scheduled" else None,
        "time_discovered_completed_ns": began + 10**6 if state == "completed" else None,
        "retired": state == "completed", "timeout_ms": 600000,
    }  # fmt: skip


def dump(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[int]], version: str = "2.10"
) -> dict[str, Any]:
    """The dump of one rank, which is in these groups."""
    described = {
        name: {"name": name, "desc": "node" if name != WORLD else "default_pg", "ranks": str(list(ranks))}
        for name, ranks in groups.items()
    }
    return {"version": version, "entries": list(entries), "pg_config": described, "pg_status": {}}


def numbered(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    """The same entries, numbered one after another."""
    for number, each in enumerate(entries):
        began = BEGAN_NS + number * 10**7
        each |= {"record_id": number, "op_id": number + 1, "time_created_ns": began}
    return list(entries)


def write_dumps(folder: Path, dumps: Mapping[int, Any], *, as_json: bool = False) -> Path:
    """Write these dumps by rank, and return the folder; as JSON they have no frames."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, value in dumps.items():
        plain = value | {"entries": [{k: v for k, v in each.items() if k != "frames"} for each in value["entries"]]}
        data = json.dumps(plain).encode() if as_json else pickle.dumps(value)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return folder
