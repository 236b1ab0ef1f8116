"""Pipelines: the order of passes, what is held between forward and backward, and what a loss counts."""

from benchmarks.mutants import Mutant

RUN = "RUN_MODE=pp LAB_MODEL=mlp LAB_DEPTH=6 LAB_MICROBATCHES=6 LAB_VARIANT="
SCHEDULES, PIPELINE = "distlab/pipeline_parallel/schedules.py", "distlab/pipeline_parallel/pipeline.py"
BOUNDARIES = "distlab/pipeline_parallel/pipeline.py"
LATE, SPLIT = "distlab/pipeline_parallel/schedules.py", "distlab/pipeline_parallel/pipeline.py"

MUTANTS = [
    Mutant(SCHEDULES, "ahead=ranks - 1 - rank)", "ahead=ranks - rank)", RUN + "1f1b"),
    # With one less it is the same order: one forward, then the first backward.
    Mutant(SCHEDULES, "ahead=microbatches)", "ahead=microbatches - 2)", RUN + "gpipe"),
    Mutant(SCHEDULES, "+ 2 * (ranks - 1 - rank)", "+ 2 * (ranks - rank)", RUN + "interleaved"),
    Mutant(
        PIPELINE,
        "self._held.pop((action.stage, action.microbatch))",
        "self._held[action.stage, action.microbatch]",
        RUN + "1f1b",
    ),
    Mutant(
        PIPELINE,
        "                output = self._loss(microbatch, output)",
        "                output = self._loss(0, output)",
        RUN + "gpipe",
    ),
    Mutant(
        "distlab/pipeline_parallel/schedules.py",
        "min(microbatches, ranks - rank)",
        "min(microbatches, ranks)",
        RUN + "zb_h1",
    ),
    Mutant(LATE, "if number >= rank else []", "if number > rank else []", RUN + "zb_h1"),
    Mutant(SPLIT, "rows.mT @ inputs", "rows.mT @ (2 * inputs)", RUN + "1f1b_split"),
    Mutant(
        "distlab/pipeline_parallel/pipeline.py",
        "(self.gradient,) = gradients",
        "self.gradient = 2 * gradients[0]",
        RUN + "zb_h1",
    ),
    Mutant(
        "distlab/pipeline_parallel/strategy.py",
        "                total += copies[rank]",
        "                total = copies[rank]",
        "RUN_MODE=pp LAB_TIE=1 LAB_DEPTH=3 LAB_WIDTH=16 LAB_SEQ=8 LAB_VARIANT=1f1b",
    ),
    Mutant(BOUNDARIES, "AHEAD = 2\n", "AHEAD = 0\n", RUN + "1f1b"),
    Mutant(BOUNDARIES, "AHEAD = 2\n", "AHEAD = 1\n", RUN + "zb_h1"),
    Mutant(BOUNDARIES, "AHEAD = 2\n", "AHEAD = 99\n", RUN + "gpipe"),
    Mutant(BOUNDARIES, "        self._post_ahead()\n        with", "        with", RUN + "interleaved"),
    Mutant(BOUNDARIES, 'if action.kind != "forward" and answered in self._sent:', "if False:", RUN + "1f1b"),
    Mutant(BOUNDARIES, "self._handed.pop(action)", "self._handed[action]", RUN + "zbv"),
    Mutant(
        PIPELINE,
        "        del self._inputs, self._loss, self._losses  # the batch, which nobody needs between two steps\n",
        "",
        RUN + "1f1b",
    ),
    Mutant(PIPELINE, "finish(self._parts.pop((", "finish(self._parts.get((", RUN + "1f1b_split"),
    Mutant(
        "distlab/pipeline_parallel/strategy.py",
        "            parameter.grad = None\n",
        "            pass\n",
        RUN + "1f1b",
    ),
]
