"""Dumps of real gloo runs: the verdict names what a live check names for each planted hang, and right scripts have none."""

import re
from pathlib import Path

import pytest

from distlab.tools.check.dump import repro
from distlab.tools.check.dump.verdict import Verdict, judge
from distlab.tools.check.judge.rank_state import HANG
from tests.tools.check.cases import PLANTED, RIGHT, SCRIPTS, Checked, check, missing
from tests.tools.check.dump.dumping_ranks import leave_dumps

LATE_AFTER_S = 0.5
HANGS = (
    "missing", "swapped", "root", "other_group", "some_make_group", "group_order", "send_send", "recv_no_send",
    "wrong_peer", "barrier_all_reduce", "if_rank_0", "in_except", "fewer_batches", "ddp_unused", "fsdp_some",
    "save_rank_0", "store_wait", "raises", "os_exit", "sys_exit", "src_in_pair", "objects_apart", "buffers_on_one",
    "dcp_thread", "thread", "extra",
)  # fmt: skip
# What a live check names and no dump has: the line of a rank that ended well, of a new_group that ranks have left (in
# some_make_group by which ranks met under one name, a race), and where a thread was started.
UNSEEN = {
    "extra": {"a", "b"},
    "some_make_group": {"a", "b"},
    "dcp_thread": {"a", "torch.distributed.checkpoint.async_save"},
}
RIGHT_ONES = (
    "alone_first", "buckets_async", "by_hand", "coalescing", "ddp", "ddp_accumulation", "ddp_join", "ddp_two",
    "ddp_unused", "fsdp", "fsdp_save", "functional", "local_sgd", "rank_0_saves", "scheduler", "tensor_parallel",
    "threads", "hsdp", "objects", "ring", "sub_groups", "uneven_all_to_all", "uneven_work",
)  # fmt: skip


def verdict_of(name: str, kind: str, world_size: int, folder: Path) -> Verdict:
    """The verdict on the files that this script left."""
    leave_dumps(SCRIPTS / kind / f"{name}.py", world_size, folder)
    return judge([folder / "pickle", *folder.glob("rank*.*"), *folder.glob("*.log")], LATE_AFTER_S)


def sentences(verdict: Verdict) -> list[str]:
    return [*(finding.sentence for finding in verdict.findings), *filter(None, [verdict.waiting])]


@pytest.mark.parametrize("name", HANGS)
def test_a_dump_names_what_a_live_check_names(name: str, tmp_path: Path) -> None:
    (planted,) = [each for each in PLANTED if each.name == name]
    verdict = verdict_of(name, "faults", planted.world_size, tmp_path)
    found = sentences(verdict)
    assert verdict.exit_code == 1
    unseen = UNSEEN.get(name, set())
    seen = tuple(each for each in planted.says if each not in unseen)
    wanted = planted.__class__(
        name, planted.world_size, 1, seen, tuple(each for each in planted.lines if each not in unseen), planted.ranks,
        planted.number,
    )  # fmt: skip
    assert not missing(wanted, Checked(1, "", {"findings": [{"sentence": each} for each in found]}, 0.0)), found


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_the_dumps_of_a_right_script_show_no_hang(name: str, tmp_path: Path) -> None:
    verdict = verdict_of(name, "right", RIGHT[name], tmp_path)
    assert (sentences(verdict), verdict.exit_code) == ([], 0)
    assert set(verdict.job.groups_of) == set(range(RIGHT[name])) and not verdict.job.malformed


def test_a_rank_that_sleeps_is_a_wait_and_no_hang(tmp_path: Path) -> None:
    verdict = verdict_of("sleeps", "faults", 2, tmp_path)
    assert not verdict.findings
    assert "rank 1 is at sleeps.py:" in verdict.waiting and "whether it computes, sleeps" in verdict.waiting


@pytest.mark.parametrize("name", ["group_order", "missing", "recv_no_send"])
def test_the_script_of_a_dump_hangs_in_the_same_way(name: str, tmp_path: Path) -> None:
    """The sentence is the same, except for the number of a message, which a stack does not have, for what a
    dump adds (how often each made the call), and for what the source adds (what to change)."""
    world_size = next(each.world_size for each in PLANTED if each.name == name)
    verdict = verdict_of(name, "faults", world_size, tmp_path / "left")
    script = tmp_path / "repro.py"
    script.write_text(repro.script_of(verdict, script.name))
    checked = check(script, len(repro.relevant_ranks(verdict)), tmp_path, LAB_HANG_AFTER_S="2")
    (live,) = [each["sentence"] for each in checked.run["findings"] if each["check"] == HANG]
    (dumped,) = [finding.sentence for finding in verdict.findings if finding.check == HANG]
    one, other = (re.sub(r"(send|recv) #\d+", r"\1", re.split("; (?:let|rank)", each)[0]) for each in (live, dumped))
    assert one == other, script.read_text()
