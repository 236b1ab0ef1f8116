"""Run each command of tests/coverage.toml on real ranks: its output must show what the row promises.

The words of a row are prose. This file lists for each command the text of rank 0's log and verdict that would be missing
if the row were wrong. A command without an entry fails, and so does an entry without a row. Commands for some variants
use the run of all variants, and commands with a bug the run of tests/mistakes.py, so that equal runs are made once.
"""

import re
import shlex
from typing import NamedTuple

import pytest

from distlab.lab.report.log import verdict_lines
from distlab.lab.report.table import INDENT
from tests.documents import coverage_rows, spans
from tests.labs import Runs, failed
from tests.mistakes import PAGE_WORLD_SIZE, WORLD_SIZE, bug_settings, correct_settings, page_settings


class Shown(NamedTuple):
    """Regular expressions that a command's output must match, and the checks or comparisons that fail; all others
    pass."""

    words: tuple[str, ...]
    fails: str = ""
    more: str = ""  # further settings for a short run: the needs of a bug, or fewer variants


PROVEN = r"proof +float64, against the reference +gradients +weights +losses"
EQUAL_MICROBATCHES = "WORLD_SIZE=3 LAB_SLEEP_MS=30 LAB_STEPS=3 LAB_VARIANT=gpipe,1f1b"  # of equal length, because on busy cores a short one is not drawn
EXPECTED = {
    "RUN_MODE=comm": Shown((r"\nall_to_all", r"A ring all_reduce", r"all_reduce")),
    "RUN_MODE=comm LAB_VARIANT=server": Shown((r"server: \(N-1\)",)),
    "RUN_MODE=comm LAB_VARIANT=ring": Shown((r"ring: 2\(N-1\)/N", r"add", r"copy")),
    "RUN_MODE=comm LAB_BUG=wrong_backward": Shown((r"WRONG",), "gradients"),
    "RUN_MODE=train": Shown((r"used twice, so that shards are equally long|no sample used twice", r"Local data")),
    "RUN_MODE=train LAB_BUG=no_set_epoch": Shown((), "reshuffled"),
    "RUN_MODE=train LAB_BUG=no_sampler": Shown((), "shards"),
    "RUN_MODE=dp": Shown((PROVEN, r"per_parameter +.*passed", r"ddp +.*passed")),
    "RUN_MODE=dp LAB_MODEL=line": Shown((PROVEN, r"per_parameter calls +predicted 2 calls")),
    "RUN_MODE=dp LAB_MODEL=line LAB_STEPS=201": Shown((r"timed losses", r"measured +201 steps"), more="LAB_VARIANT=flat"),
    "RUN_MODE=dp LAB_BUG=means_of_shards": Shown((), "gradients"),
    "RUN_MODE=dp LAB_BUG=no_broadcast": Shown((), "replicas"),
    "RUN_MODE=dp LAB_BUG=hook_race": Shown((), "gradients"),
    "RUN_MODE=dp LAB_BUG=stale_bucket": Shown((), "weights"),
    "RUN_MODE=dp LAB_BUG=unwrapped_forward": Shown((), "replicas"),
    "RUN_MODE=dp LAB_VARIANT=per_parameter,ddp": Shown((r"per_parameter +.*passed", r"ddp +1\.00|ddp +[\d.]+ +1\.00")),
    "RUN_MODE=dp LAB_VARIANT=per_parameter,flat,bucketed LAB_MICROBATCHES=2": Shown(
        (r"per_parameter +.*passed", r"2 microbatch|x 2 x"), more="LAB_VARIANT=per_parameter,flat,bucketed"
    ),
    "RUN_MODE=dp LAB_MICROBATCHES=4 LAB_CLIP=1": Shown((r"4 microbatch|x 4 x", r"clipped gradients"), more="LAB_VARIANT=flat"),
    "RUN_MODE=dp LAB_VARIANT=bucketed": Shown((r"bucketed launched early",)),
    "RUN_MODE=dp LAB_NET_RATE=100mbit": Shown((r"bucketed swaps whole buckets with the other rank", r"ms per step"), more="LAB_VARIANT=bucketed,ddp"),
    "RUN_MODE=tp": Shown((PROVEN, r"sequence calls", r"dtensor|gathered calls")),
    "RUN_MODE=tp LAB_VARIANT=gathered": Shown((PROVEN, r"gathered calls")),
    "RUN_MODE=tp LAB_VARIANT=gathered,megatron": Shown((r"gathered calls", r"megatron calls", r"heads")),
    "RUN_MODE=tp LAB_VARIANT=sequence": Shown((r"sequence calls",)),
    "RUN_MODE=tp LAB_BUG=packed_qkv": Shown((), "losses"),
    "RUN_MODE=tp LAB_BUG=bias_everywhere": Shown((), "losses"),
    "RUN_MODE=tp LAB_BUG=lost_f": Shown((), "replicas"),
    "RUN_MODE=tp LAB_BUG=double_reduce": Shown((), "gradients"),
    "RUN_MODE=pp": Shown((r"1f1b bubble", r"rank 0 \|[.-]*0")),
    "RUN_MODE=pp LAB_VARIANT=one_microbatch WORLD_SIZE=2": Shown((r"one_microbatch calls", r"one_microbatch bubble +predicted 0\.5 ")),
    "RUN_MODE=pp LAB_VARIANT=gpipe": Shown((r"gpipe: bubble", r"rank 0 \|[.-]*0[0.-]*1[1.-]*2[2.-]*3"), more=EQUAL_MICROBATCHES),
    "RUN_MODE=pp LAB_VARIANT=1f1b": Shown((r"1f1b in flight +0",)),
    "RUN_MODE=pp LAB_VARIANT=gpipe,1f1b LAB_SLEEP_MS=30": Shown((r"gpipe: bubble", r"1f1b: bubble"), more=EQUAL_MICROBATCHES),
    "RUN_MODE=pp LAB_SLEEP_MS=30": Shown((r"gpipe bubble +predicted 0\.3333",), more=EQUAL_MICROBATCHES),
    "RUN_MODE=pp LAB_BUG=undivided_loss": Shown((), "gradients"),
    "RUN_MODE=cp": Shown((PROVEN, r"zigzag activation bytes", r"zigzag +1\.000 +1\.0", r"skipped +context_parallel")),
    "RUN_MODE=cp LAB_VARIANT=ring,ulysses": Shown((r"ring calls", r"ulysses calls", r"ring +1\.500 +1\.4")),
    "RUN_MODE=moe": Shown((PROVEN, r"ep +.*passed", r"ep capacity")),
    "RUN_MODE=elastic": Shown((r"shrink samples +.*passed", r"join updates kept +.*passed")),
    "RUN_MODE=elastic LAB_VARIANT=join LAB_RESCALE=1": Shown((r"join: learning rate from step 0: \d+ samples at 0.0001, from",)),
    "RUN_MODE=elastic LAB_VARIANT=join LAB_RESCALE=1 LAB_BUG=rate_kept": Shown((), "learning rate"),
    "RUN_MODE=mesh": Shown((r"1f1b +.*passed", r"zero3 called bytes over dp", r"1f1b overlap")),
    "RUN_MODE=fsdp": Shown((r"zero3_blocking +.*passed", r"zero3 calls", r"16 bytes per parameter")),
    "RUN_MODE=fsdp LAB_RECOMPUTE=1": Shown((r"zero3 recomputed peak",), more="LAB_VARIANT=zero3"),
    "RUN_MODE=fsdp LAB_VARIANT=fsdp2": Shown((r"fsdp2 +.*passed",)),
    "RUN_MODE=fsdp LAB_VARIANT=zero1,zero2,zero3": Shown((r"zero1 calls", r"zero2 calls", r"zero3 calls")),
    "RUN_MODE=fsdp LAB_VARIANT=zero3,fsdp2": Shown((r"zero3 calls", r"fsdp2 +.*passed")),
    "RUN_MODE=fsdp LAB_BUG=save_without_barrier LAB_CHECKPOINT_EVERY=2": Shown((), "checkpoint"),
    "RUN_MODE=fsdp LAB_BUG=per_rank_norm": Shown((), "clipped gradients"),
    "RUN_MODE=compress": Shown((r"powersgd", r"ddp_fp16", r"sent \+ residual")),
    "RUN_MODE=compress LAB_VARIANT=powersgd": Shown((r"powersgd rank", r"powersgd formula")),
    "RUN_MODE=compress LAB_VARIANT=topk,randomk,int8": Shown((r"topk formula", r"int8 formula")),
    "RUN_MODE=compress LAB_VARIANT=topk,randomk,int8,powersgd": Shown((r"randomk formula", r"powersgd rank")),
    "RUN_MODE=compress LAB_BUG=no_error_feedback": Shown((), "sent + residual"),
    "RUN_MODE=compress LAB_BUG=unshared_seed": Shown((), "formula"),
    "RUN_MODE=compress LAB_BUG=int8_overflow": Shown((), "formula"),
    "RUN_MODE=compress LAB_BUG=per_rank_powersgd": Shown((), "rank"),
    "RUN_MODE=server": Shown((r"server / ring", r"The server's record", r"local_sgd")),
    "RUN_MODE=server LAB_VARIANT=sync": Shown((r"sync +.*passed",)),
    "RUN_MODE=server LAB_SLOW_RANK=2:0.5 LAB_STALENESS=4": Shown((r"slowed +rank 2 runs at 0\.5", r"downpour staleness"), more="LAB_VARIANT=downpour WORLD_SIZE=3"),
    "RUN_MODE=server LAB_VARIANT=sync,downpour": Shown((r"sync +.*passed", r"The server's record", r"downpour")),
    "RUN_MODE=server LAB_VARIANT=downpour": Shown((r"mean staleness", r"steps by worker")),
    "RUN_MODE=server LAB_VARIANT=downpour LAB_STALENESS=2": Shown((r"downpour staleness",)),
    "RUN_MODE=server LAB_VARIANT=local_sgd,diloco": Shown((r"local_sgd losses at H = 1", r"diloco weights at H = 4")),
    "RUN_MODE=largebatch": Shown((r"linear learning rate", r"lamb")),
    "RUN_MODE=largebatch LAB_VARIANT=unscaled,linear,warmup": Shown(
        (r"unscaled learning rate", r"warmup learning rate")
    ),
    "RUN_MODE=largebatch LAB_VARIANT=linear,warmup": Shown((r"warmup learning rate",)),
    "RUN_MODE=largebatch LAB_VARIANT=lars,lamb": Shown((r"lars +.*passed", r"lamb +.*passed")),
    "RUN_MODE=largebatch LAB_VARIANT=lars": Shown((r"lars +.*passed",)),
    "RUN_MODE=largebatch LAB_VARIANT=lamb": Shown((r"lamb +.*passed",)),
    "RUN_MODE=largebatch LAB_BUG=lr_unscaled": Shown((), "learning rate"),
    "RUN_MODE=precision": Shown((r"steps lost", r"bf16_master update")),
    "RUN_MODE=precision LAB_VARIANT=fp16,fp16_scaled": Shown((r"steps lost", r"fp16_scaled unscaled")),
    "RUN_MODE=precision LAB_VARIANT=fp16,fp16_scaled,bf16,bf16_master": Shown(
        (r"bf16_master update", r"fp16_scaled unscaled")
    ),
    "RUN_MODE=precision LAB_BUG=unscaled_clip": Shown((), "clipped gradients"),
}  # fmt: skip


OF_TWO_RANKS = {"comm", "cp"}  # the page's run has only two algorithms of comm, and uneven positions in cp


def commands() -> list[str]:
    """Return every command of the rows once."""
    return sorted({span for _, row in coverage_rows() for span in spans(" ".join(row)) if span.startswith("RUN_MODE=")})


def test_each_command_has_expected_output() -> None:
    assert sorted(EXPECTED) == commands()
    assert [command for command, shown in EXPECTED.items() if not shown.words and not shown.fails] == []


def settings(command: str) -> dict[str, str]:
    """Return the run for a row: that of docs/modes if the row only selects variants."""
    words = dict(word.split("=", 1) for word in shlex.split(command))
    mode, bug = words["RUN_MODE"], words.get("LAB_BUG", "")
    chosen = {name: value for name, value in words.items() if name not in ("LAB_VARIANT", "RUN_MODE")}
    more = dict(word.split("=", 1) for word in EXPECTED[command].more.split())
    if bug:
        return bug_settings(mode, bug)
    if chosen or more or mode in OF_TWO_RANKS:
        return correct_settings(mode) | chosen | more
    return {"WORLD_SIZE": str(PAGE_WORLD_SIZE)} | page_settings(mode)


@pytest.mark.parametrize("command", commands())
def test_the_output_matches_the_row(runs: Runs, command: str) -> None:
    expected, requested = EXPECTED[command], settings(command)
    ran = runs(int(requested.pop("WORLD_SIZE", WORLD_SIZE)), expected.fails, **requested)
    assert expected.fails in failed(ran.judged) if expected.fails else failed(ran.judged) == set()
    output = "\n".join([(ran.folder / "rank0.log").read_text(), *verdict_lines(ran.judged, ran.records, None)])
    unwrapped = re.sub(rf"\n {{{INDENT}}}(?=\S)", " ", output)  # numbers decide where a sentence is wrapped
    assert [words for words in expected.words if not re.search(words, output) and not re.search(words, unwrapped)] == []
