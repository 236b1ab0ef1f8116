"""The user's line and the framework's call: with a stand-in for a library whose loop the user does not see."""

from pathlib import Path

import pytest

from distlab.tools.check.judge.deadlock import Blocked, circle
from distlab.tools.check.judge.rank_state import Call, CallPlace, GroupKey, Kind, RankState, Wait
from tests.frameworks.faults import table
from tests.tools.check.cases import Checked, assert_ended, check_text

LIBRARY = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


class Trainer:
    def __init__(self, batches, patience, module=None):
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.model = torch.nn.parallel.DistributedDataParallel(module or torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches, self.patience = batches, patience
        torch.manual_seed(1 + dist.get_rank())

    def train(self):
        for number in DataLoader(range(self.batches)):
            if number == self.patience:
                break
            self._step()
        self.after()

    def _step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).mean().backward()
        self.optimizer.step()

    def after(self):
        pass

    def log(self, value):
        dist.all_reduce(value)
"""
SCRIPT = """
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
import torch
import torch.distributed as dist
from trainlib import Trainer


class Mine(Trainer):
    def after(self):
        self.log(torch.ones(1))


class Net(torch.nn.Linear):
    def forward(self, given):
        if dist.get_rank() == 0:
            dist.all_reduce(given)
        return super().forward(given)


def main():
    rank = int(os.environ["RANK"])
    {body}


main()
"""


ALONE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
"""


def test_the_page_has_the_table_of_what_make_frameworks_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "check.md").read_text()
    assert "\n".join(["<!-- table of: tests/frameworks/faults.py -->", *table(), "<!-- end -->"]) in page


def check_library(folder: Path, body: str) -> Checked:
    package = folder / "site-packages" / "trainlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    return check_text(SCRIPT.format(body=body.replace("\n", "\n    ")), folder, LAB_HANG_AFTER_S="2")


CASES = {
    "a loop that ended earlier is reported by steps": (
        "Trainer(5 - rank, 99).train()\ndist.barrier()",
        "rank 1's loop in Trainer.train ended after 4 optimizer steps / 4 batches of its DataLoader",
        "rank 0 is at 4 optimizer steps / 5 batches of its DataLoader",
        "has 4 batches on rank 1 and more on rank 0: uneven data", "give all ranks the same number of batches",
    ),
    "ranks that diverge inside of one call are reported by steps": (
        "Mine(5, 2 if rank == 1 else 99).train()",
        "in Trainer.train rank 1 is after 2 optimizer steps / 3 batches of its DataLoader and rank 0 after 2",
        "train.py:13 in Trainer.log, called by Trainer.train at train.py:25",
    ),
    "the call of the script is in the remedy": (
        "trainer = Trainer(3, 99)\ntrainer.train()\nif rank == 0:\n    trainer.log(torch.ones(1))",
        "rank 0 waits in all_reduce",
        "let all ranks call Trainer.log at train.py:28, or none; it is under `if rank == 0`",
    ),
    "a user's line in a forward pass, below DDP's, is reported with the call above it": (
        "Trainer(3, 99, Net(4, 1)).train()", "train.py:19, called by Trainer.train at train.py:25",
        "let all ranks make the all_reduce at train.py:19, or none; it is under `if dist.get_rank() == 0`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_reported_with_the_users_line_and_the_frameworks_call(name: str, tmp_path: Path) -> None:
    body, *says = CASES[name]
    checked = check_library(tmp_path, body)
    assert_ended(checked, 1, *says)
    assert "one shape" not in checked.one_line


def test_ranks_that_train_alone_are_no_pass(tmp_path: Path) -> None:
    alone = "each of the 2 ranks trains alone: in its 2 steps it sent neither gradients nor weights to"
    assert_ended(check_text(ALONE, tmp_path), 1, alone, "DistributedDataParallel")


def test_a_run_without_calls_is_a_question(tmp_path: Path) -> None:
    script = "import torch.distributed as dist\n\ndist.init_process_group('gloo')\nprint(dist.get_rank())\n"
    question = "question ranks created a process group but made no call in it, so nothing was compared"
    assert_ended(check_text(script, tmp_path), 0, question)


def test_a_right_one_passes(tmp_path: Path) -> None:
    assert_ended(check_library(tmp_path, "trainer = Mine(3, 99)\ntrainer.train()\ntrainer.log(torch.ones(1))"), 0)


@pytest.mark.parametrize(("needs", "named"), [([1, 0], True), ([2, 2], False)], ids=["each other", "one that ended"])
def test_each_sends_first_where_nobody_has_ended(needs: list[int], named: bool) -> None:
    stuck = {}
    for rank, peer in enumerate(needs):
        call = Call(rank, CallPlace("ring.py:3"), GroupKey((0, 1, 2)), Kind("send", peer=peer), 0, 1, 0.0)
        stuck[rank] = Blocked(Wait(call, "send", call.place, 0.0), frozenset({peer}), any_of=False)
    assert ("Each sends first" in circle(stuck[0], stuck)) == named


def test_a_helper_is_reported_with_its_callers() -> None:
    state = RankState(0, 2)
    state.receive(["place", 0, "utils.py:5", "", "utils.py", "", "", "train.py:30 from train.py:44"], 0.0)
    assert str(state.place(0)) == "utils.py:5"
    assert state.place(0).callers == "train.py:30 from train.py:44"
