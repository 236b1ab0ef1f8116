"""Faulty and right scripts for `distlab check`, and a function that runs one of them on local ranks.

Each of scripts/faults has one planted fault. A trailing comment `# (a)`, `# (b)`, ... marks a line of interest: mostly
(a) is the line of the ranks that are right, and (b) the line of the wrong rank.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distlab.tools.check.judge.coordinator import Coordinator
from tests.launched import clean
from tests.warm import Warm

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 100


class Checked(NamedTuple):
    """The result of a checked script."""

    code: int
    output: str
    run: dict[str, Any]
    seconds: float

    @property
    def sentences(self) -> list[str]:
        """The sentences of the findings."""
        return [finding["sentence"] for finding in self.run.get("findings", [])]

    @property
    def one_line(self) -> str:
        """The output as one line, without its wrapping."""
        return " ".join(self.output.replace("rank 0 |", "").split())

    @property
    def questions(self) -> list[str]:
        """The questions, without their wrapping."""
        log = "\n".join(line.removeprefix("rank 0 | ") for line in self.output.splitlines())
        return [
            " ".join(question.split()) for question in re.findall(r"^question +(.*(?:\n {11}.*)*)", log, re.MULTILINE)
        ]


def check(script: Path, world_size: int, folder: Path, *words: str, command: str = "check", **environ: str) -> Checked:
    """Run `distlab check script words`, or another command, on so many local ranks, with its runs in `folder`."""
    run_id = f"{script.stem}-{time.monotonic_ns()}"
    own = {
        "WORLD_SIZE": str(world_size),
        "LAB_RUNS_DIR": str(folder),
        "LAB_RUN_ID": run_id,
        "LAB_COLLECTIVE_TIMEOUT_S": "60",
        "PYTHONHASHSEED": "0",  # forked, as torch is there: an interpreter a rank takes 2 s more (test_fork_servers.py)
    }
    began = time.monotonic()
    started = Warm("tests.tools.check.undrawn", [command, str(script), *words], clean(**own | environ))
    started.stdin.close()
    try:
        output = started.stdout.read()
        code = started.wait(TIMEOUT_S)
    finally:
        started.kill()
        started.stdout.close()
    seconds = time.monotonic() - began
    written = folder / run_id / "run.json"
    return Checked(code, output, json.loads(written.read_text()) if written.exists() else {}, seconds)


def check_text(text: str, folder: Path, *words: str, world_size: int = 2, **environ: str) -> Checked:
    """The same with a script of this text, train.py in `folder`."""
    (folder / "train.py").write_text(text)
    return check(folder / "train.py", world_size, folder, *words, **environ)


def assert_ended(checked: Checked, code: int, *says: str) -> None:
    """The script ended with this exit code, and its output has all of these words, wrapped or not."""
    assert checked.code == code, checked.output
    assert [each for each in says if each not in checked.one_line] == [], checked.output


def lines_of(*reports: list[Any]) -> list[bytes]:
    """A rank's reports as the coordinator reads them."""
    return [json.dumps(line).encode() for line in reports]


def coordinator_of(*ranks: Sequence[list[Any]], hang_after_s: float = 3.0, **more: Any) -> Coordinator:
    """A coordinator without output that received these reports from each rank at 0 s."""
    coordinator = Coordinator(len(ranks), hang_after_s, 60.0, lambda _: None, **more)
    for rank, reports in enumerate(ranks):
        coordinator.receive(rank, lines_of(*reports), 0.0)
    coordinator.evaluate(0.0)
    return coordinator


def first_call(op: str, place: str, ranks: Sequence[int] = (0, 1), dtype: str = "float32") -> list[list[Any]]:
    """The reports of a rank that makes its first call, on thread 7."""
    return [
        ["main", 7], ["place", 1, place, "", ""], ["group", 1, list(ranks), "", 0],
        ["kind", 1, op, [], [dtype], "", -1, -1, 0, 4, []], ["call", 1, 1, 1, 1, 0, 7, 0.0],
    ]  # fmt: skip


def too_wide(output: str) -> list[str]:
    """The lines that a terminal of 80 columns breaks, except commands to repeat and longer paths."""
    texts = [line.removeprefix("rank 0 | ") for line in output.splitlines()]
    own = [text for text in texts if re.match(r"(?:[a-zA-Z]+ +|[ ]{11})(?=\S)", text) and text[10:11] == " "]
    cut = [text for text in own if len(f"rank 0 | {text}") > 80 and not text.startswith(("rerun ", "report "))]
    return [text for text in cut if max(map(len, text.split())) < 40]


def line_of(script: Path, marker: str) -> str:
    """`file.py:12` of the line that ends with this marker."""
    lines = script.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# ({marker})")]
    return f"{script.name}:{number}"


# Correct scripts, scripts/right/NAME.py, and the number of ranks that each is written for. elastic.py is not one of them:
# it needs a launcher that restarts it (test_faults.py).
RIGHT = dict.fromkeys([
    "alone_first", "buckets_async", "buffers_written", "by_hand", "coalescing", "compiled", "cuda_asked", "cuda_ddp", "dcp", "dcp_job", "dtensor_job", "ddp", "ddp_accumulation", "ddp_buffers", "ddp_hook", "ddp_join",
    "ddp_power_sgd", "ddp_sampler", "ddp_sparse", "ddp_static_graph", "ddp_two", "ddp_unfrozen", "ddp_unused", "evaluated_twice", "exits_0", "fsdp",
    "fsdp1", "fsdp1_synced", "fsdp_save", "functional", "local_sgd", "no_destroy", "own_buffers", "own_init", "pipe_1f1b", "pipe_gpipe",
    "pipe_interleaved", "pipeline_job", "process_ranks", "rank_0_saves", "restart", "scheduler", "spawned_ranks", "spawned_workers", "summed_parts",
    "tensor_parallel", "thread_without_frames", "threads", "tied_stages", "tp_by_hand", "zero_one_norm", "zero_redundancy",
], 2) | {
    "fsdp1_tensor_parallel": 4, "gossip": 4, "local_sgd_unfinished": 2, "hsdp": 4, "layouts": 2, "lost_results": 2, "local_sync_group": 3, "mesh_2d": 4, "objects": 3, "post_local_sgd": 4,
    "ring": 3, "samplers": 2, "send_recv": 4, "spawned_halves": 4,
    "sub_groups": 3, "uneven_all_to_all": 3, "uneven_work": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A faulty script, and what its diagnosis must contain."""

    name: str  # scripts/faults/NAME.py
    world_size: int
    exit_code: int  # 0: no finding, at most a question
    says: tuple[str, ...]  # lower-case words that must occur
    lines: tuple[str, ...]  # letters of the markers whose file.py:line must be named
    ranks: tuple[int, ...]  # the ranks at fault
    number: int | None = None  # of the collective in its group, from 0, at which the ranks diverge or the others wait


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
    Planted("hsdp_seed", 4, 1, ("axis replicate", "weight"), (), (0, 2)),
    Planted("tp_samples", 2, 1, ("axis tp", "declared replicate"), ("a",), (0, 1)),
    Planted("fsdp_same_data", 2, 1, ("same data",), ("a",), (0, 1)),
    Planted("by_hand_same_data", 2, 1, ("same data", "gradients"), ("a",), (0, 1)),
    Planted("fsdp1_own_norm", 2, 1, ("clip_grad_norm_", "own shard"), ("a",), (0, 1)),
    Planted("zero_own_norm", 2, 1, ("clip_grad_norm_", "own shard", "all_reduce the squares"), ("a",), (0, 1)),
    Planted("tp_own_norm", 2, 1, ("clip_grad_norm_", "own part", "all_reduce the squares"), ("a",), (0, 1)),
    Planted("tp_by_hand", 2, 1, ("tensor parallelism", "different samples"), ("b",), (0, 1)),
    Planted(
        "fsdp1_seeds", 2, 0, ("intended?", "different weights (0.weight and 3 more)", "sync_module_states"), ("a",), ()
    ),
    Planted("fully_shard_seeds", 2, 0, ("intended?", "different weights (0.weight and 3 more)"), ("a",), ()),
    Planted(
        "buffers_written", 2, 1, ("different buffers (buffer scale)", "broadcast_buffers", "since step 2"), ("a",), (1,)
    ),
    Planted("epoch_of_rank_0", 2, 1, ("epoch", "permutation"), ("a",), (1,)),
    Planted("split_by_rank", 2, 1, ("subset", "permutation"), ("a",), (1,)),
    Planted("temporary", 2, 0, ("is not used",), ("a",), ()),
    Planted("columns_scattered", 2, 1, ("scatter", "not contiguous"), ("a",), (0,), 0),
    Planted("transposed_on_one", 2, 1, ("reduce", "not contiguous"), ("a",), (1,), 0),
    Planted("numpy_in_flight", 2, 0, (), (), ()),  # these two write without a version counter
    Planted("sent_from_buffer", 2, 0, (), (), ()),
    Planted("drifted", 3, 1, ("drifted apart", "parameter"), ("a",), (2,)),
    Planted("ddp_drifted", 3, 1, ("bias",), ("a",), (1,)),
    Planted("ddp_bypassed", 2, 1, ("bypassed", ".module", "since step 1"), ("a", "b"), (1,)),
    Planted("ddp_late_layer", 2, 1, ("0.down.weight", "added after ddp"), ("a",), (1,)),
    Planted("ddp_unfrozen", 2, 1, ("0.weight", "frozen when ddp", "since step 3"), ("a",), (1,)),
    Planted("fsdp_late_head", 2, 1, ("3.weight", "fsdp does not shard"), ("a",), (1,)),
    Planted("scheduler_on_0", 2, 1, ("0.05 on rank 0, 0.1 on rank 1", "group 0 since step 3"), ("a",), (1,)),
    Planted("no_sync_last", 2, 1, ("no_sync", "step 1"), ("a", "b"), (1,)),
    Planted("state_on_0", 2, 1, ("state of the optimizer", "step 1"), ("a",), (1,)),
    Planted("own_init", 2, 1, ("0.weight", "from the beginning"), ("a", "b"), (0, 1)),
    Planted("mixed_up", 2, 1, ("0.weight on rank 0, 1.weight on rank 1",), ("a",), (0, 1), 8),
    Planted("buffer_order", 2, 1, ("'mean'", "'scale'", "buffer 0"), ("a",), (1,)),
    Planted("skipped_average", 2, 1, ("different gradients", "from step 3"), ("a", "b"), (1,)),
    Planted("own_heads", 2, 0, ("intended?", "weight"), ("a",), (1,)),
    Planted("same_data", 2, 1, ("same",), ("a",), (0, 1)),
    Planted("dropout_seed", 2, 1, ("dropout",), ("a",), (0, 1)),
    Planted("sys_exit", 3, 1, ("3", "all_reduce"), ("a",), (1,), 1),
    Planted("src_in_pair", 4, 1, ("ranks 2 and 3", "ranks of the world"), ("a", "b"), (2, 3)),
    Planted("objects_apart", 2, 1, ("all_gather_object", "broadcast_object_list"), ("a", "b"), (1,), 2),
    Planted("buffer_shape", 2, 1, ("buffer seen has shape (10,) on rank 0 and (11,) on rank 1",), ("a",), (1,)),
    Planted("same_data_later", 2, 1, ("same data",), ("a",), (0, 1)),
    Planted("buffers_on_one", 2, 1, ("rank 0's buffers", "model.module"), ("a", "b"), (0,)),
    Planted("timeout_passed", 2, 1, ("the timeout of 3 s", "still worked"), ("a",), (0, 1), 1),
    Planted("alone", 2, 1, ("no process group was created",), (), ()),
    Planted("ranks_by_name", 2, 1, ("no process group was created", "processes of its own"), ("a",), ()),
    Planted(
        "dcp_thread", 2, 1, ("torch.distributed.checkpoint.async_save", "share one process group"), ("a", "b"), (0, 1)
    ),
    Planted("thread", 2, 1, ("all_reduce", "barrier"), ("a", "b"), (1,), 1),
)


def missing(planted: Planted, checked: Checked) -> list[str]:
    """The expected words, lines, ranks and number that the diagnosis lacks."""
    text = "\n".join([*checked.sentences, *checked.questions])
    script = SCRIPTS / "faults" / f"{planted.name}.py"
    wanted = [*planted.says, *(line_of(script, marker) for marker in planted.lines)]
    wanted += [f"#{planted.number}"] if planted.number is not None else []
    left = [word for word in wanted if word.lower() not in text.lower()]
    return left + [f"rank {rank}" for rank in planted.ranks if not re.search(rf"ranks? [0-9, and]*\b{rank}\b", text)]
