"""`make fit` (compose/fit.sh): compute a memory limit that dp exceeds and fsdp keeps, and judge its runs.

    limit      a memory limit between what a rank of fsdp (zero3) needs and what one of dp needs, halfway
    judge      whether dp was killed within that limit, fsdp was not, and both trained to the same losses (without a
               limit, dp)

Both need a rank's memory without a model, which is measured, and the bytes of `measure`'s formulas: dp 16·P for
float32 with Adam; zero3 16·P/N, the layers that are whole at the same time, and at its start the dense model that it
shards, 4·P.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from distlab.cli import prints_refusals
from distlab.lab.config import Config
from distlab.lab.measure.storages import SavedActivations
from distlab.lab.report.reading import read_run
from distlab.lab.report.records import Losses, select
from distlab.lab.report.verdict import judge
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import outline
from distlab.techniques.sharded.costs import WHOLE_LAYERS, rest_bytes

MIB = 2**20
FLOAT32_BYTES = 4
POLL_S = 0.02
# The same numbers are summed in another order, and AdamW divides by a gradient's own size: where that is rounding noise
# a weight may step the other way.
LOSS_TOLERANCE = 1e-4


class Need(NamedTuple):
    """Bytes of tensors on one rank, with the calculation in words."""

    nbytes: float
    formula: str


def dp_need(num_parameters: int, activation_bytes: int) -> Need:
    """Return dp's need: everything on every rank."""
    stored = sum(rest_bytes(0, num_parameters, num_parameters).values())
    return Need(stored + activation_bytes, f"16·P = {mb(stored)}, activations {mb(activation_bytes)}")


def zero3_need(layers: Sequence[int], num_ranks: int, activation_bytes: int) -> Need:
    """Return the larger of its start, with the dense model, and of a step; `layers` in parameters."""
    total, layer = sum(layers), FLOAT32_BYTES * max(layers)
    start = FLOAT32_BYTES * (total + total / num_ranks) + layer
    stored = sum(rest_bytes(3, total, total / num_ranks).values())
    step = stored + WHOLE_LAYERS * layer + activation_bytes
    if start > step:
        return Need(start, f"at its start 4·P + 4·P/N and a layer of {mb(layer)}; a step takes {mb(step)}")
    whole = f"{WHOLE_LAYERS} whole layers of {mb(layer)}, activations {mb(activation_bytes)}"
    return Need(step, f"16·P/N = {mb(stored)}, {whole}; its start takes {mb(start)}")


def activations(config: Config) -> int:
    """Return a rank's activation bytes, counted on a model without data."""
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    inputs, targets, _ = batches.microbatches(0, 0, config.world_size)[0]
    model = outline(config)
    with SavedActivations() as saved:
        model(inputs.to("meta"), targets.to("meta"))
    return saved.peak_bytes


def base() -> int:
    """Return a rank's bytes without a model: the most private memory of a tiny run.

    The kernel cannot take them back. Code and other files that it has mapped are left out: under a limit they go first.
    """
    with tempfile.TemporaryDirectory() as folder:
        tiny = {
            "WORLD_SIZE": 1, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "RUN_MODE": "fsdp", "LAB_VARIANT": "zero3",
            "LAB_WIDTH": 8, "LAB_HEADS": 1, "LAB_RUNS_DIR": folder, "LAB_PROOF": 0, "LAB_STEPS": 3,
        }  # fmt: skip
        log = Path(folder) / "log"
        with log.open("w") as output:
            settings = [f"{name}={value}" for name, value in tiny.items()]
            command = ["env", *settings, sys.executable, "-m", "distlab", "run"]
            rank = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        most = 0
        while rank.poll() is None:
            most = max(most, own_bytes(rank.pid))
            time.sleep(POLL_S)
        if rank.returncode:
            raise SystemExit(f"the run without a model failed with exit code {rank.returncode}:\n{log.read_text()}")
    return most


def own_bytes(pid: int) -> int:
    """Return a process' bytes that are not backed by files."""
    try:
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:  # it has ended
        return 0
    return sum(1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def limit(config: Config) -> int:
    """Return the limit in MiB; the calculation goes to standard error."""
    if config.world_size == 1:
        raise SystemExit("WORLD_SIZE=1 has no other rank to share with: set 2 or more")
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in outline(config).layers]
    activation_bytes = activations(config)
    empty, dp, zero3 = (
        base(),
        dp_need(sum(layers), activation_bytes),
        zero3_need(layers, config.world_size, activation_bytes),
    )
    halfway = empty + (dp.nbytes + zero3.nbytes) / 2
    lines = [
        f"model      P = {sum(layers) / 1e6:.1f}M parameters, N = {config.world_size} ranks",
        f"no model   {mb(empty)}, measured: Python, torch and its buffers, on every rank",
        f"dp         {mb(empty)} + {mb(dp.nbytes)} = {mb(empty + dp.nbytes)}: {dp.formula}",
        f"zero3      {mb(empty)} + {mb(zero3.nbytes)} = {mb(empty + zero3.nbytes)}: {zero3.formula}",
        f"limit      {mb(halfway)}, halfway: LAB_MEMORY={round(halfway / MIB)}m",
    ]
    print("\n".join(lines), file=sys.stderr)
    return round(halfway / MIB)


def unmet(free: Path, dp: Path, fsdp: Path) -> list[str]:
    """Return the unmet expectations of three runs: dp without a limit, dp and fsdp within it."""
    lost = judge(read_run(dp))["lost"]
    killed = [entry["rank"] for entry in lost if "killed by the OOM killer" in entry["reason"]]
    print(f"dp         within the limit: ranks killed: {killed or 'none'}, ranks lost: {[e['rank'] for e in lost]}")
    verdict = judge(read_run(fsdp))["verdict"]
    print(f"fsdp       within the limit: {verdict}")
    dp_losses, fsdp_losses = losses(free, "bucketed"), losses(fsdp, "zero3")
    difference = max((abs(a - b) for a, b in zip(dp_losses, fsdp_losses, strict=False)), default=float("inf"))
    print(f"losses     dp without a limit {format_values(dp_losses)}")
    print(
        f"           fsdp within it     {format_values(fsdp_losses)}   difference {difference:.1e}, tolerance"
        f" {LOSS_TOLERANCE:.0e}"
    )
    expectations = {
        "dp was not killed by the OOM killer": bool(killed),
        "fsdp did not pass": verdict == "pass",
        "dp and fsdp did not train to the same losses": len(dp_losses) == len(fsdp_losses)
        and difference <= LOSS_TOLERANCE,
    }
    return [failure for failure, met in expectations.items() if not met]


def losses(run: Path, variant: str) -> list[float]:
    """Return the loss curve of a variant."""
    return next((each.numbers for _, each in select(read_run(run), Losses) if each.variant == variant), [])


def format_values(values: list[float]) -> str:
    return " ".join(f"{value:.5f}" for value in values)


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f} MB"


@prints_refusals
def main(arguments: Sequence[str]) -> int:
    """`limit` prints LAB_MEMORY's value, `judge FREE DP FSDP` (folders of runs) the verdict; returns the exit code."""
    if list(arguments) == ["limit"]:
        print(f"{limit(Config.read())}m")
        return 0
    if len(arguments) == 4 and arguments[0] == "judge":
        found = unmet(*map(Path, arguments[1:]))
        print(
            "".join(f"FAIL       {failure}\n" for failure in found) or "PASS       dp does not fit, and fsdp does\n",
            end="",
        )
        return int(bool(found))
    print("usage: distlab fit limit | judge FREE DP FSDP", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
