"""`distlab prove FILE`: whether N ranks compute what one process computes, for a training script as it stands, or for
one's own model and strategy in a file that holds them by name.

Exit codes: 0 they do; 1 they do not, or a finding of the doctor's; 2 refused; 3 a rank was lost.
"""

import ast
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from distlab.lab.config import Config
from distlab.tools.check.start.command import SHARED, CheckOptions, FileCommand, ProofOptions, leading_options, start

HELP = """usage: distlab prove [NAME=VALUE ...] [--reference N] [--vary "--tp=1,2"] [--double] FILE [ARGS ...]

Runs a training script unchanged on WORLD_SIZE ranks, and again on one that is given the samples which they read, and
says which step trains another model, and why. --reference N compares with N ranks, --vary runs one of the script's own
arguments with each value beside the first one on one rank, --double computes in float64.

A file without a process group of its own is no script: of that it trains what it holds, in float64, on WORLD_SIZE ranks
beside one process. In containers: ./run prove FILE. It has any of

  model(seed)                                        an nn.Module
  loss(model, inputs, targets)                       the sum over all loss terms
  batch(seed, step)                                  inputs and targets of the whole batch
  train_step(model, optimizer, microbatches, group)  one step of a rank; each microbatch is (inputs, targets, share)
  prepare(model, group)                              what is trained in its place: DDP(model), fully_shard(model), ...
  strategy(model, mesh, config)                      in the place of both, as in distlab.contract
  after_step(model)                                  what train_step ends with beside the update: one process does it
  mesh, clip, terms, even                            axes such as {{"dp": -1, "tp": 2}}; docs/prove.md

variables   WORLD_SIZE (4), LAB_MICROBATCHES (2), LAB_SEED, {own}; of the lab's own model LAB_WIDTH, LAB_DEPTH, ...
            and those of a run that say where: LAB_RUNS_DIR, LAB_RUN_ID, LAB_JOIN_TIMEOUT_S, LAB_LOST_AFTER_S, ...
exit codes  0 N ranks are one process, 1 they are not, or a finding of the doctor's, 2 refused, 3 a rank lost"""
USED = SHARED | {"model", "width", "depth", "heads", "seq", "tie", "text", "batch", "microbatches", "seed"}


# What a script has and a file of parts has not.
MAKERS = {"init_process_group", "init_device_mesh", "Accelerator", "PartialState", "Trainer", "__name__"}
PARTS = {"model", "loss", "batch", "terms", "train_step", "prepare", "strategy", "after_step", "mesh", "clip", "even"}


class Before(NamedTuple):
    """What stands before the file."""

    settings: list[str]
    reference: int = 1
    vary: str = ""
    double: bool = False
    words: tuple[str, ...] | None = None  # of the reference, where --vary gives it others
    fault: str = ""


def main(words: Sequence[str]) -> int:
    """Prove the file; returns the exit code."""
    before, rest = parsed(words)
    if before.fault:
        print(f"refused    {before.fault}", flush=True)
        return 2
    words = [*before.settings, *rest]
    by_name = rest[:1] == ["-m"]
    if not by_name and (not rest or not Path(rest[0]).is_file() or not is_script(Path(rest[0]).read_bytes())):
        return start(FileCommand("prove", HELP, "file", ProofOptions, USED, playing), words)
    if before.vary:
        return varied(before, rest)
    from distlab.tools.prove.script_reference import watch
    from distlab.tools.prove.script_rerun import Reruns, ScriptOptions

    options = ScriptOptions(before.reference, before.double, before.words)
    job = {"watch": watch, "reruns": partial(Reruns, options), "double": before.double}
    return start(FileCommand("prove", HELP, "script", CheckOptions, SHARED, job_fields=job), words)


def parsed(words: Sequence[str]) -> tuple[Before, list[str]]:
    """The words before the file, and the file with those behind it."""
    found, settings, rest, faults = leading_options(words, ("--reference", "--vary", "--words"), ("--double",))
    vary, reference = found.get("--vary", "-="), found.get("--reference", "1")
    if not (vary.startswith("-") and "=" in vary):
        faults.append(f"--vary is {vary!r}: expected an argument and values, as --tp=1,2")
    if not (reference.isdigit() and 1 <= int(reference) <= 8):
        faults.append(f"--reference is {reference!r}: expected a number of ranks, 1 to 8")
    if faults:
        return Before(settings, fault=faults[0]), rest
    its_words = tuple(shlex.split(found["--words"])) if "--words" in found else None
    return Before(settings, int(reference), found.get("--vary", ""), "--double" in found, its_words), rest


def is_script(source: bytes) -> bool:
    """Whether a file is a script, by what it names; one that cannot be read is none."""
    with suppress(SyntaxError, ValueError):
        tree = ast.parse(source)
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        bound = {
            alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        bound |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        bound |= {
            target.id for node in tree.body if isinstance(node, ast.Assign)
            for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        return bool(named & MAKERS) or not bound & PARTS
    return False


def varied(before: Before, rest: Sequence[str]) -> int:
    """A run for each value of an argument, all beside one reference, which has the first; the worst exit code."""
    name, _, values = before.vary.partition("=")
    choices = values.split(",")
    words = shlex.join([*rest[1:], f"{name}={choices[0]}"])
    told = ["--reference", str(before.reference), *(["--double"] if before.double else []), f"--words={words}"]
    codes = []
    for value in choices:
        command = [sys.executable, "-m", "distlab", "prove", *before.settings, *told, *rest, f"{name}={value}"]
        codes.append(subprocess.run(command, check=False).returncode)
    print(f"layout     {'exit code':<12}beside {name}={choices[0]} on {before.reference} of its ranks")
    for value, code in zip(choices, codes, strict=True):
        print(f"{name}={value:<10} {code:<12}{'the same model' if not code else 'another, or not compared'}")
    return max(codes)


def playing(config: Config) -> Any:
    """What a rank's process does with the file."""
    from distlab.tools.prove.proof import play  # torch comes in here

    return partial(play, config=config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
