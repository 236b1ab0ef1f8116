"""The scripts of scripts/faults, each with one planted fault, and what has to be said about each of them.

In a script a trailing comment `# (a)`, `# (b)`, ... marks a line of interest: (a) is mostly the line that the ranks
which are right are in, (b) the line at which the wrong rank is instead. Other tests find the line numbers by them.
"""

import re
from dataclasses import dataclass

from tests.check.cases import SCRIPTS, Checked, line_of


@dataclass(frozen=True)
class Planted:
    """A faulty script, and what a diagnosis of it has to contain."""

    name: str  # scripts/faults/NAME.py
    world_size: int
    exit_code: int  # 0: nothing, or only a question, is to be said
    says: tuple[str, ...]  # lower-case words that have to occur
    lines: tuple[str, ...]  # letters of the markers whose file.py:line has to be named
    ranks: tuple[int, ...]  # the ranks at fault
    number: int | None = None  # of the collective in its group, from 0, where the ranks part or the others wait


PLANTED = (
    Planted("missing", 3, 1, ("all_reduce", "all_gather"), ("a", "b"), (1,), 1),
    Planted("extra", 3, 1, ("all_reduce",), ("a", "b"), (1,), 3),
    Planted("swapped", 3, 1, ("all_reduce", "broadcast"), ("a", "b"), (2,), 0),
    Planted("shape", 3, 1, ("all_reduce", "1000", "900"), ("a",), (1,), 0),
    Planted("dims", 2, 1, ("all_reduce", "(3, 2)", "(2, 3)"), ("a",), (1,), 0),
    Planted("dtype", 3, 1, ("all_reduce", "float32", "float64"), ("a",), (1,), 0),
    Planted("reduce_op", 3, 1, ("all_reduce", "sum", "max"), ("a", "b"), (2,), 0),
    Planted("root", 3, 1, ("broadcast",), ("a",), (2,), 0),
    Planted("other_group", 3, 1, ("all_reduce",), ("a", "b"), (1,), 1),
    Planted("some_make_group", 3, 1, ("new_group",), ("a", "b"), (2,)),
    Planted("group_order", 3, 1, ("all_reduce",), ("a", "b"), (0, 1), 0),
    Planted("send_send", 2, 1, ("send",), ("a",), (0, 1)),
    Planted("recv_no_send", 2, 1, ("recv", "barrier"), ("a", "b"), (1,)),
    Planted("wrong_peer", 3, 1, ("send", "recv"), ("a", "b"), (0,)),
    Planted("barrier_all_reduce", 3, 1, ("barrier", "all_reduce"), ("a", "b"), (1,), 1),
    Planted("if_rank_0", 3, 1, ("all_reduce",), ("a",), (0,), 3),
    Planted("in_except", 3, 1, ("barrier", "all_reduce"), ("a", "b"), (1,), 2),
    Planted("fewer_batches", 2, 1, ("barrier", "all_reduce"), ("a", "b"), (1,), 7),
    Planted("ddp_unused", 2, 1, ("find_unused_parameters",), ("a", "b"), (1,), 3),
    Planted("ddp_order", 2, 1, ("query", "key"), ("a",), (1,)),
    Planted("fsdp_some", 2, 1, ("all_gather", "barrier"), ("a", "b"), (0,), 2),
    Planted("save_rank_0", 2, 1, ("all_gather", "barrier"), ("a", "b"), (0,), 2),
    Planted("store_wait", 2, 1, ("data_ready", "barrier"), ("a", "b"), (1,), 2),
    Planted("sleeps", 2, 0, (), (), ()),
    Planted("raises", 3, 1, ("valueerror", "label 11 is out of range"), ("a", "b"), (1,), 2),
    Planted("os_exit", 3, 1, ("7", "all_reduce"), ("a",), (1,), 3),
    Planted("unwaited", 2, 1, ("all_reduce", "wait"), ("a",), (0, 1)),
    Planted("in_flight", 2, 1, ("all_reduce", "wait"), ("a",), (0, 1)),
    Planted("drifted", 3, 1, ("drifted apart", "parameter"), ("a",), (2,)),
    Planted("ddp_drifted", 3, 1, ("bias",), ("a",), (1,)),
    Planted("same_data", 2, 1, ("same",), ("a",), (0, 1)),
    Planted("divided_twice", 2, 0, ("divided",), (), ()),
    Planted("never_divided", 2, 0, ("divides",), ("a",), ()),
    Planted("dropout_seed", 2, 1, ("dropout",), ("a",), (0, 1)),
    Planted("sys_exit", 3, 1, ("3", "all_reduce"), ("a",), (1,), 1),
    Planted("thread", 2, 1, ("all_reduce", "barrier"), ("a", "b"), (1,), 1),
)


def missed(planted: Planted, checked: Checked) -> list[str]:
    """What was to be said and was not: words, lines, ranks, the number."""
    said = "\n".join([*checked.sentences, *(line for line in checked.said.splitlines() if "question" in line)])
    script = SCRIPTS / "faults" / f"{planted.name}.py"
    wanted = [*planted.says, *(line_of(script, marker) for marker in planted.lines)]
    wanted += [f"#{planted.number}"] if planted.number is not None else []
    left = [word for word in wanted if word.lower() not in said.lower()]
    return left + [f"rank {rank}" for rank in planted.ranks if not re.search(rf"ranks? [0-9, and]*\b{rank}\b", said)]
