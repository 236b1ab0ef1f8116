"""Test a mode of the lab: each rank runs it as in any run, with checkpoints and LAB_RESUME=auto.

The recorded steps are those that the lab times. The test compares the whole model and its optimizer state, as a
strategy gathers them on rank 0, and the samples that each rank trains on.
"""

import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

from distlab.contract import Strategy
from distlab.lab.checkpoint.manifest import TrainingPosition
from distlab.lab.cluster import oom_notice
from distlab.lab.cluster.launch import LauncherPipe
from distlab.lab.config import Config, ConfigError, user_code
from distlab.lab.config.settings import is_path, lesson_file
from distlab.lab.lab import Lab
from distlab.lab.rank.main import be_rank, import_for_ranks
from distlab.lab.rank.mode_loader import load_for, modes_that
from distlab.lab.verify import timed
from distlab.tools.check.start.script import Job, enter_script
from distlab.tools.check.watch.patches import Function, Patch, before, put
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.drill.recording import ReadBatch, contents, watch


def job_of(config: Config, hang_after_s: float) -> Job:
    """Return the job of each rank from this process's environment; raises ConfigError if no run could be resumed."""
    mode, name = load_for(config), config.mode_name
    set_by_drill = {"LAB_FAULTS": config.faults, "LAB_RESUME": config.resume, "LAB_RUN_ID": config.run_id}
    faults = [f"drill sets {name} itself: leave it out" for name, value in set_by_drill.items() if value is not None]
    if mode.unsaved:
        allowed = modes_that(lambda other: not other.unsaved)
        faults.append(f"RUN_MODE={name} {mode.unsaved}, so it cannot resume after a kill: allowed are {allowed}")
    if len(config.variant) > 1:
        faults.append(f"LAB_VARIANT={','.join(config.variant)} names several: expected one, such as {mode.headline[0]}")
    if faults:
        raise ConfigError(faults)
    oom_notice.PATH.unlink(missing_ok=True)  # a container's entry point prints those of a rank; this process is none
    import_for_ranks(config)
    file = lesson_file(config.run_mode).resolve()
    usual = {
        "LAB_VARIANT": mode.headline[0], "LAB_CHECKPOINT_EVERY": str(max(1, config.steps // 4)),
        "LAB_PROOF": "1" if config.bug else "0", "LAB_OPTIMIZER": "adamw",  # which has a state to lose
    }  # fmt: skip
    os.environ |= usual | os.environ | {
        "RUN_MODE": str(file) if is_path(config.run_mode) else name,
        "LAB_LOG": "quiet", "LAB_KEY": secrets.token_hex(16), "LAB_RUNS_DIR": "runs", "LAB_RUN_ID": "drill",
        "LAB_RESUME": "auto", "LAB_LOST_AFTER_S": "60",
    }  # fmt: skip
    run = ModeRun()
    return Job(file, name, (), hang_after_s, "drill", runner=run.play, watch=run.watch)


class ModeRun:
    """In each rank's process: record the mode's steps, and run as a rank of it."""

    def watch(self, recorder: Recorder, settings_json: str) -> None:
        """Record from the first timed step to the end of the last one."""
        self._facts, self._ended = watch(recorder, settings_json, by_optimizer=False), False
        put(Patch(timed.Stopwatch, "step", self._step), Patch(timed, "write_digests", before(self._end)))

    def _step(
        self, method: Function, watch: Any, name: str, strategy: Strategy, lab: Lab, course: TrainingPosition,
        step: int, *more: Any,
    ) -> None:  # fmt: skip
        steps, microbatches = self._facts.steps, lab.microbatches(course.batches, course.data_step(step))
        steps.parameters = dict(strategy.full("weights"))
        samples = [sample for each in microbatches for sample in contents([each.inputs, each.targets])]
        self._facts.samples.trained = [ReadBatch(course.position(step)[0], samples, [])]
        self._facts.step_begins([each for _, each in strategy.full("optimizer")], [lab.config.learning_rate])
        method(watch, name, strategy, lab, course, step, *more)
        steps.number = step - course.first + 1

    def _end(self, _: Lab, strategies: Mapping[str, Strategy]) -> None:
        for each in strategies.values():
            self._facts.steps.parameters = dict(each.full("weights"))
        self._facts.end()
        self._ended = True

    def play(self, job: Job, *_: Any) -> None:
        """Run the mode; raises SystemExit if it ends before its training does. The run's own checks do not count."""
        enter_script(job)
        with user_code.exits_raised():
            code = be_rank(Config.read(), time.time(), LauncherPipe())
        if code and not self._ended:
            raise SystemExit(code)
