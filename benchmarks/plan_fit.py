"""The shares of GPUs' peaks, fitted to published runs and written to the package's gpus.json.

`python -m benchmarks.plan_fit`, after a change of published.json or of the planner's formulas; `distlab plan --score`
says how far off the planner is then.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from distlab.lab.report.reading import write_atomically
from distlab.tools.plan.costs import cost
from distlab.tools.plan.gpu import TABLE, Shares
from distlab.tools.plan.score import Row, asked, published

GRID = (
    [share / 100 for share in range(30, 96)],  # of products
    [share / 100 for share in range(10, 81, 5)],  # of attention
    [share / 100 for share in range(40, 91, 10)],  # of memory
)


def fitted_shares(rows: Sequence[Row]) -> Shares:
    """Of all shares on the grid those with the least mean square of logarithms of predicted over measured steps.

    Attention reaches no more of the peak than large products do, which keeps few rows from saying otherwise."""

    def off(shares: Shares) -> float:
        return mean(
            math.log(cost(replace(job, gpu=replace(job.gpu, shares=shares)), layout).step_s / measured) ** 2
            for job, layout, measured in jobs
        )

    jobs = [(*asked(row), row.step_s) for row in rows if row.step_s is not None]
    return min((Shares(*each) for each in itertools.product(*GRID) if each[1] <= each[0]), key=off)


def fit(path: Path = TABLE) -> list[str]:
    """Fit every kind that published.json names rows for, write gpus.json, and say what was found; raises OSError."""
    found = json.loads(path.read_text())
    rows = {row.name: row for row in published().rows}
    said = []
    for kind, names in published().fit.items():
        shares = fitted_shares([rows[name] for name in names])
        found["fitted"][kind] = {
            "matrix_share": shares.matrix, "attention_share": shares.attention, "memory_share": shares.memory,
            "rows": names,
        }  # fmt: skip
        said.append(
            f"{kind}: products {shares.matrix:.0%}, attention {shares.attention:.0%} of the peak, memory"
            f" {shares.memory:.0%} of its rate, by {len(names)} rows"
        )
    parts = [
        f' "{part}": {{\n' + ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in found[part].items()) + "\n }"
        for part in ("gpus", "fitted")
    ]
    write_atomically(path, ["{\n" + ",\n".join(parts) + "\n}\n"])
    return said


if __name__ == "__main__":
    print("\n".join(fit()))
