"""The verdict on dumps with NCCL: which rank waits for which and why, what is unknown, and that a right job has no hang."""

import json
import os
from pathlib import Path

import pytest

from distlab.cli import check
from distlab.tools.check.dump import repro
from distlab.tools.check.dump.verdict import Verdict, judge
from distlab.tools.check.judge.rank_state import HANG, MATCH
from tests.tools.check.dump.synthetic import BEGAN_NS, dump, entry, numbered, write_dumps

WORLD = {"0": [0, 1, 2]}
STILL_S = 5.0


def verdict_of(folder: Path) -> Verdict:
    return judge([folder], STILL_S)


def sentence_of(folder: Path) -> str:
    verdict = verdict_of(folder)
    assert verdict.exit_code == 1
    (sentence,) = [*(finding.sentence for finding in verdict.findings), *filter(None, [verdict.waiting])]
    return sentence


def test_who_waits_for_whom_at_which_line(tmp_path: Path) -> None:
    """Rank 1 is in another group, whose other rank waits for it in the group of all."""
    groups = {"0": [0, 1, 2], "1": [1, 2]}
    first = entry("all_reduce", 0)
    dumps = {
        0: dump(numbered(first, entry("all_reduce", 1, 20, state="started")), WORLD),
        1: dump(numbered(first, entry("all_gather", 0, 30, group="1", state="started")), groups),
        2: dump(numbered(first, entry("all_reduce", 1, 20, state="started")), groups),
    }
    sentence = sentence_of(write_dumps(tmp_path, dumps))
    assert "ranks 0 and 2 wait in all_reduce #1 of all ranks at train.py:20 for rank 1" in sentence
    assert "rank 1 waits in all_gather #0 of group 1 (ranks 1 and 2) at train.py:30 for rank 2" in sentence
    assert "different orders (deadlock)" in sentence


def test_mismatched_calls_are_reported_with_their_tensors(tmp_path: Path) -> None:
    dumps = {rank: dump([entry("all_reduce", 0, state="started", size=4 + (rank == 1))], WORLD) for rank in range(3)}
    hang, match = verdict_of(write_dumps(tmp_path, dumps)).findings
    assert (hang.check, match.check) == (HANG, MATCH)
    assert "rank 1 calls all_reduce of (5,) float32 at train.py:12" in match.sentence
    assert "shape mismatch" in match.sentence


def test_a_rank_that_came_to_the_line_less_often_has_left_its_loop(tmp_path: Path) -> None:
    steps = [entry("all_reduce", seq) for seq in range(2)]
    dumps = {
        0: dump(numbered(*map(dict, steps), entry("all_reduce", 2, state="started")), {"0": [0, 1]}),
        1: dump(numbered(*map(dict, steps), entry("barrier", 2, 30, state="started")), {"0": [0, 1]}),
    }
    hang, match = verdict_of(write_dumps(tmp_path, dumps)).findings
    assert "rank 0 has made the all_reduce at train.py:12 3 times, and rank 1 2 times" in hang.sentence
    assert "rank 1 calls barrier at train.py:30" in match.sentence


def test_calls_queued_on_a_gpu_in_other_orders_hang(tmp_path: Path) -> None:
    """Both ranks have made both calls, and neither stream reaches its second one."""
    groups = {"0": [0, 1], "1": [0, 1]}
    outer, inner = (
        entry("all_reduce", 0, 20, state="scheduled"),
        entry("all_reduce", 0, 30, group="1", state="scheduled"),
    )
    dumps = {
        0: dump(numbered(dict(outer), dict(inner)), groups),
        1: dump(numbered(dict(inner), dict(outer)), groups),
    }
    sentence = sentence_of(write_dumps(tmp_path, dumps))
    assert "rank 0 waits in all_reduce #0 of all ranks at train.py:20 for rank 1" in sentence
    assert "different orders (deadlock)" in sentence


def test_a_call_that_all_made_and_that_never_ends_is_not_the_scripts_fault(tmp_path: Path) -> None:
    dumps = {rank: dump([entry("all_reduce", 0, state="started")], WORLD) for rank in range(3)}
    sentence = sentence_of(write_dumps(tmp_path, dumps))
    assert "all its ranks have made it" in sentence and "NCCL_DEBUG=INFO" in sentence


def test_messages_match_by_sender_and_receiver(tmp_path: Path) -> None:
    groups = {"0": [0, 1]}
    dumps = {
        0: dump(numbered(entry("send 0->1", 0), entry("send 0->1", 0, 20, state="started")), groups),
        1: dump(numbered(entry("recv 1<-0", 0), entry("send 1->0", 0, 30, state="started")), groups),
    }
    sentence = sentence_of(write_dumps(tmp_path, dumps))
    assert "rank 0 waits in send #1 to rank 1 at train.py:20" in sentence
    assert "Each sends first, and none receives" in sentence


def test_the_others_wait_for_a_rank_without_a_dump(tmp_path: Path) -> None:
    dumps = {rank: dump([entry("all_reduce", 0, state="started")], WORLD) for rank in (0, 2)}
    assert "for rank 1: rank 1 left no dump" in sentence_of(write_dumps(tmp_path, dumps))
    (tmp_path / "torchrun.log").write_text("  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 4)\n")
    assert "rank 1 was killed by SIGKILL" in sentence_of(tmp_path)
    (tmp_path / "rank1.log").write_text(
        'Traceback (most recent call last):\n  File "/home/me/job/train.py", line 7, in <module>\n    x[11]\n'
        "ValueError: label 11 is out of range\n"
    )
    sentence = sentence_of(tmp_path)
    assert "rank 1 raised ValueError: label 11 is out of range at train.py:7" in sentence
    assert "ranks 0 and 2 wait for it in all_reduce #0" in sentence


def test_a_rank_that_may_be_working_is_no_hang_until_it_is_late(tmp_path: Path) -> None:
    """Its last call has ended; only its stack shows where it is since."""
    ended, waits = entry("all_reduce", 0), entry("all_reduce", 1, 20, state="started", number=1)
    dumps = {0: dump([ended, waits], WORLD), 1: dump([ended], WORLD), 2: dump([ended, waits], WORLD)}
    write_dumps(tmp_path, dumps)
    for rank in dumps:
        os.utime(tmp_path / f"nccl_trace_rank_{rank}", ns=(BEGAN_NS, BEGAN_NS + 10**9))
    soon = verdict_of(tmp_path)
    assert (soon.findings, soon.exit_code) == (
        [],
        0,
    ) and "for rank 1, for 0.99 s when the dumps were written" in soon.waiting
    for rank in dumps:
        os.utime(tmp_path / f"nccl_trace_rank_{rank}", ns=(BEGAN_NS, BEGAN_NS + 60 * 10**9))
    assert "its last call there was all_reduce #0 at train.py:12" in sentence_of(tmp_path)
    assert "py-spy dump --pid PID > rank1.txt" in sentence_of(tmp_path)
    (tmp_path / "rank1.txt").write_text(
        'Process 7: python train.py\nPython v3.11\n\nThread 7 (idle): "MainThread"\n'
        "    get (queue.py:171)\n    <module> (/home/me/job/train.py:44)\n"
    )
    assert "rank 1 is at train.py:44" in sentence_of(tmp_path)
    assert "py-spy" not in sentence_of(tmp_path)
    assert not verdict_of(tmp_path).findings


def test_a_job_that_is_right_does_not_hang(tmp_path: Path) -> None:
    dumps = {rank: dump(numbered(*(entry("all_reduce", seq) for seq in range(9))), WORLD) for rank in range(3)}
    verdict = verdict_of(write_dumps(tmp_path, dumps))
    assert (verdict.findings, verdict.waiting, verdict.exit_code) == ([], "", 0)


def test_what_the_recorder_has_dropped_is_not_compared(tmp_path: Path) -> None:
    """The first call that all still have is the 5th; before it rank 2 has other calls."""
    same = [entry("all_reduce", seq, number=10 + seq) for seq in range(4, 9)]
    late = [entry("broadcast", seq, number=10 + seq) for seq in range(2, 4)]
    dumps = {0: dump(same, WORLD), 1: dump(same, WORLD), 2: dump([*late, *same], WORLD)}
    verdict = verdict_of(write_dumps(tmp_path, dumps))
    assert not verdict.findings
    assert any("TORCH_FR_BUFFER_SIZE" in each for each in verdict.unknown)


def test_a_name_of_two_groups_is_a_new_group_that_not_all_made(tmp_path: Path) -> None:
    waits = entry("all_reduce", 0, 20, group="1", state="started")
    dumps = {
        0: dump([waits], WORLD | {"1": [0, 1]}), 1: dump([waits], WORLD | {"1": [0, 1]}),
        2: dump([], WORLD | {"1": [1, 2]}),
    }  # fmt: skip
    sentences = [finding.sentence for finding in verdict_of(write_dumps(tmp_path, dumps)).findings]
    assert any(
        "group 1 has ranks 0 and 1 on ranks 0 and 1 (used in all_reduce at train.py:20) and ranks 1 and 2 on rank 2:"
        in each
        for each in sentences
    )


@pytest.mark.parametrize("version", ["2.4", "2.10"])
def test_json_has_all_but_lines(version: str, tmp_path: Path) -> None:
    dumps = {rank: dump([entry("all_reduce", 0, state="started")], WORLD, version) for rank in (0, 2)}
    verdict = verdict_of(write_dumps(tmp_path, dumps, as_json=True))
    assert "ranks 0 and 2 wait in all_reduce #0 of all ranks at ? for rank 1" in verdict.findings[0].sentence
    assert any("dumps as JSON have none" in each for each in verdict.unknown)
    assert verdict.faults == []


def test_the_command_prints_a_verdict_and_writes_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dumps(tmp_path / "dumps", {rank: dump([entry("all_reduce", 0, state="started")], WORLD) for rank in (0, 2)})
    assert check.main(["--dump", "dumps"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED     ranks hang: ranks 0 and 2 wait in all_reduce #0 of all" in printed
    assert "WORLD_SIZE=3 distlab check repro.py" in printed
    assert check.main(["--dump", "dumps", "--json"]) == 1
    parsed = json.loads(capsys.readouterr().out)
    assert [parsed[name] for name in ("hangs", "ranks", "ranks_with_a_dump", "repro")] == [True, 3, [0, 2], "repro.py"]
    (tmp_path / "repro.py").write_text("mine = 1\n")
    assert check.main(["--dump", "dumps"]) == 1
    assert "repro.py is your own file" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "repro.py").read_text() == "mine = 1\n"


def test_no_dump_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.txt").write_text("hello\n")
    assert check.main(["--dump", str(tmp_path)]) == 2
    assert "none of the files is a dump" in " ".join(capsys.readouterr().out.split())
    assert check.main(["--dump", str(tmp_path / "away")]) == 2
    assert "away: No such file" in " ".join(capsys.readouterr().out.split())


def test_a_large_job_is_reduced_to_the_relevant_ranks(tmp_path: Path) -> None:
    """Of 64 ranks 63 wait in one call for rank 5, which waits in a group of its node: two places, two ranks and one of
    its node."""
    world, node = {"0": list(range(64))}, {"0": list(range(64)), "1": list(range(8))}
    before = [entry("all_reduce", seq) for seq in range(30)]
    dumps = {
        rank: dump(
            numbered(*map(dict, before), entry("all_reduce", 30, 20, state="started")), node if rank < 8 else world
        )
        for rank in range(64)
    }
    dumps[5] = dump(numbered(*map(dict, before), entry("broadcast", 0, 40, group="1", state="started")), node)
    verdict = verdict_of(write_dumps(tmp_path, dumps))
    assert "and 47 more wait in all_reduce #30 of all ranks at train.py:20 for rank 5" in verdict.findings[0].sentence
    ranks = repro.relevant_ranks(verdict)
    assert len(ranks) <= repro.MOST_RANKS and {0, 5} <= set(ranks)
    text = repro.script_of(verdict, "repro.py")
    assert "('train.py', 40, 'dist.broadcast(T[0], R[0], group=G)'" in text
    assert "for _ in range(26): dist.all_reduce" in text
    compile(text, "repro.py", "exec")
