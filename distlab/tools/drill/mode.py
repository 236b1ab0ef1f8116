"""A mode of the lab as what is drilled: each rank runs it as in any run, with checkpoints and LAB_RESUME=auto.

Its steps are those that the lab times. What is compared is the whole model and its optimizer on rank 0, as a strategy
gathers them, and the samples that each rank is dealt.
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
from distlab.tools.drill.recording import Read, contents, watch


def job_of(config: Config, hang_after_s: float) -> Job:
    """What each rank does, by this process's environment; raises ConfigError where no run could be resumed."""
    mode, name = load_for(config), config.mode_name
    given = {"LAB_FAULTS": config.faults, "LAB_RESUME": config.resume, "LAB_RUN_ID": config.run_id}
    wrong = [f"{name} is for drill to set: leave it out" for name, value in given.items() if value is not None]
    if mode.unsaved:
        allowed = modes_that(lambda other: not other.unsaved)
        wrong.append(f"RUN_MODE={name} {mode.unsaved}, so it cannot go on after a kill: allowed are {allowed}")
    if len(config.variant) > 1:
        wrong.append(f"LAB_VARIANT={','.join(config.variant)} are several: expected one, such as {mode.headline[0]}")
    if wrong:
        raise ConfigError(wrong)
    oom_notice.PATH.unlink(missing_ok=True)  # a container's entry point reads those of one rank, and the drill is none
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
    """In each rank's process: record the mode, and be a rank of its run."""

    def watch(self, recorder: Recorder, told: str) -> None:
        """From the first timed step to the last one's end."""
        self._facts, self._ended = watch(recorder, told, by_optimizer=False), False
        put(Patch(timed.Stopwatch, "step", self._step), Patch(timed, "write_digests", before(self._end)))

    def _step(
        self, method: Function, watch: Any, name: str, strategy: Strategy, lab: Lab, course: TrainingPosition,
        step: int, *more: Any,
    ) -> None:  # fmt: skip
        steps, dealt = self._facts.steps, lab.microbatches(course.batches, course.data_step(step))
        steps.parameters = dict(strategy.full("weights"))
        samples = [sample for each in dealt for sample in contents([each.inputs, each.targets])]
        self._facts.samples.trained = [Read(course.position(step)[0], samples, [])]
        self._facts.step_begins([each for _, each in strategy.full("optimizer")], [lab.config.learning_rate])
        method(watch, name, strategy, lab, course, step, *more)
        steps.number = step - course.first + 1

    def _end(self, _: Lab, strategies: Mapping[str, Strategy]) -> None:
        for each in strategies.values():
            self._facts.steps.parameters = dict(each.full("weights"))
        self._facts.end()
        self._ended = True

    def play(self, job: Job, *_: Any) -> None:
        """Raises SystemExit where the run ends before its training; what the run's own checks say decides nothing."""
        enter_script(job)
        with user_code.exits_raised():
            code = be_rank(Config.read(), time.time(), LauncherPipe())
        if code and not self._ended:
            raise SystemExit(code)
