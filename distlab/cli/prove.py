"""`distlab prove FILE`: whether N ranks compute what one process computes, for one's own model and strategy.

Exit codes: 0 they do; 1 they do not, or a finding of the doctor's; 2 refused; 3 a rank was lost.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from distlab.lab.config import Config
from distlab.tools.check.start.command import SHARED, Errand, ProofOptions, start

HELP = """usage: distlab prove [NAME=VALUE ...] FILE

Trains what FILE holds on WORLD_SIZE ranks beside one process, in float64, and says which tensor of which rank parts
from it first, and why. In containers: ./run prove FILE. FILE has any of

  model(seed)                                        an nn.Module
  loss(model, inputs, targets)                       the sum over all loss terms
  batch(seed, step)                                  inputs and targets of the whole batch
  train_step(model, optimizer, microbatches, group)  one step of a rank; each microbatch is (inputs, targets, share)
  prepare(model, group)                              what is trained in its place: DDP(model), fully_shard(model), ...
  strategy(model, mesh, config)                      in the place of both, as in distlab.contract
  after_step(model)                                  what train_step ends with beside the update: one process does it
  mesh, clip, terms, even                            axes such as {{"dp": -1, "tp": 2}}; docs/your-own.md

variables   WORLD_SIZE (4), LAB_MICROBATCHES (2), LAB_SEED, {own}; of the lab's own model LAB_WIDTH, LAB_DEPTH, ...
            and those of a run that say where: LAB_RUNS_DIR, LAB_RUN_ID, LAB_JOIN_TIMEOUT_S, LAB_LOST_AFTER_S, ...
exit codes  0 N ranks are one process, 1 they are not, or a finding of the doctor's, 2 refused, 3 a rank lost"""
USED = SHARED | {"model", "width", "depth", "heads", "seq", "tie", "text", "batch", "microbatches", "seed"}


def main(words: Sequence[str]) -> int:
    """Prove the file; returns the exit code."""
    return start(Errand("prove", HELP, "file", ProofOptions, USED, playing), words)


def playing(config: Config) -> Any:
    """What a rank's process does with the file."""
    from distlab.tools.prove.proof import play  # torch comes in here

    return partial(play, config=config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
