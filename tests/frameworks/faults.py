"""Six classic faults per framework, each a change of its right script, and what a report of it must contain.

The report must name the line that ends with `# (a)`; `parts` are parts of the finding, or of the question.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"
TOP = Path(__file__).parents[2]
PACKAGES = {"accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning"}  # by script
SKIPS, EVALUATES, STOPS = "a rank skips a batch", "evaluation on rank 0 alone", "an early stop on one rank"
SAVES, UNEVEN, METRIC = "a save around a collective on one rank", "an uneven data set", "a metric on one rank"
APART = "each rank trains alone"


class Fault(NamedTuple):
    """A change of scripts/SCRIPT_right.py."""

    script: str
    fault: str
    changes: tuple[tuple[str, str], ...]  # pairs of old and new text
    parts: tuple[str, ...]  # the framework's call, the cause, the remedy
    is_question: bool = False  # reported as a question, not a finding

    def write(self, folder: Path) -> Path:
        """Write the faulty script; raises ValueError if a change does not fit."""
        text = (SCRIPTS / f"{self.script}_right.py").read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{old!r} is {text.count(old)} times in {self.script}_right.py")
            text = text.replace(old, new)
        script = folder / "train.py"
        script.write_text(text)
        return script


def before_main(text: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Return a change that puts a class before the main function, and the changes that use it."""
    return (("def main(folder):\n", f"{text.strip()}\n\n\ndef main(folder):\n"), *more)


FAULTS = (
    Fault(
        "accelerate", SKIPS,
        (
            ("        for inputs, targets in training:\n", "        for step, (inputs, targets) in enumerate(training):  # (a)\n"
             "            if step == 3 and accelerator.process_index == 1:\n                continue\n"),
        ),
        ("rank 1 skipped a batch", "called backward 3 times in it, and rank 0 4", "accelerator.backward(0 * loss)"),
        is_question=True,
    ),
    Fault(
        "accelerate", EVALUATES,
        (
            ("        accuracy = evaluate(accelerator, model, validation)\n", "        accuracy = 0.0\n"
             "        if accelerator.is_main_process:  # (a)\n"
             "            accuracy = evaluate(accelerator, model, validation)\n"),
        ),
        ("Accelerator.gather_for_metrics", "stands under `if accelerator.is_main_process`",
         "keep only the print or the write under accelerator.is_main_process"),
    ),
    Fault(
        "accelerate", STOPS,
        (
            ("                optimizer.zero_grad()\n", "                optimizer.zero_grad()\n"
             "            if accelerator.process_index == 1 and loss.item() < 0.69:\n                break\n"),
            ("        for inputs, targets in training:\n", "        for inputs, targets in training:  # (a)\n"),
        ),
        ("Accelerator.reduce", "which has more: a stop decided on one rank", "accelerator.set_trigger()"),
    ),
    Fault(
        "accelerate", SAVES,
        (
            ("    accelerator.wait_for_everyone()\n    if accelerator.is_main_process:\n",
             "    if accelerator.is_main_process:\n        accelerator.wait_for_everyone()  # (a)\n"),
        ),
        ("Accelerator.wait_for_everyone", "stands under `if accelerator.is_main_process`",
         "call accelerator.wait_for_everyone() before `if accelerator.is_main_process`"),
    ),
    Fault(
        "accelerate", UNEVEN,
        (
            ("DataLoader(samples(61), batch_size=4, shuffle=True)", "DataLoader(samples(33 - 8 * accelerator.process_index), batch_size=4)"),
            ("    model, optimizer, training, validation, scheduler = accelerator.prepare(\n"
             "        model, optimizer, training, validation, scheduler\n    )\n",
             "    model, optimizer, validation, scheduler = accelerator.prepare(model, optimizer, validation, scheduler)\n"),
            ("        for inputs, targets in training:\n", "        for inputs, targets in training:  # (a)\n"),
        ),
        ("Accelerator.backward", "has 7 batches on rank 1 and more on rank 0: uneven data", "give the loader to accelerator.prepare"),
    ),
    Fault(
        "accelerate", METRIC,
        (
            ('        mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()\n', "        mean_loss = 0.0\n"
             "        if accelerator.is_main_process:\n"
             '            mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()  # (a)\n'),
        ),
        ("let all ranks call Accelerator.reduce", "stands under `if accelerator.is_main_process`",
         "accelerator.reduce takes the part of each rank"),
    ),
    Fault(
        "trainer", SKIPS,
        before_main(
            """
class Mine(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step == 2 and self.args.process_index == 1:
            return torch.tensor(0.0)
        return super().training_step(model, inputs, num_items_in_batch)
""",
            ("= Trainer(", "= Mine("), ("trainer.train()\n", "trainer.train()  # (a)\n"),
        ),
        ("Trainer.training_step, called by Trainer.train", "rank 1 skipped a batch: when it came to batch 7", "compute_loss returns 0 * loss"),
    ),
    Fault(
        "trainer", EVALUATES,
        (
            ('    print(trainer.evaluate()["eval_accuracy"])\n', "    if trainer.is_world_process_zero():\n"
             '        print(trainer.evaluate()["eval_accuracy"])  # (a)\n'),
        ),
        ("let all ranks call Trainer.evaluate", "stands under `if trainer.is_world_process_zero()`",
         "keep only the print under trainer.is_world_process_zero()"),
    ),
    Fault(
        "trainer", STOPS,
        before_main(
            """
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and args.process_index == 1:
            control.should_training_stop = True
""",
            ("compute_metrics=accuracy,", "compute_metrics=accuracy, callbacks=[Stop()],"),
            ("Trainer, TrainingArguments", "Trainer, TrainerCallback, TrainingArguments"),
            ("trainer.train()\n", "trainer.train()  # (a)\n"),
        ),
        ("in Trainer.train rank 1 is after 3 optimizer steps", "a stop decided on one rank", "EarlyStoppingCallback"),
    ),
    Fault(
        "trainer", SAVES,
        (
            ('    trainer.save_model(f"{folder}/best")\n', "    if trainer.is_world_process_zero():\n"
             "        trainer.accelerator.wait_for_everyone()  # (a)\n"
             '        trainer.save_model(f"{folder}/best")\n'),
        ),
        ("let all ranks call Accelerator.wait_for_everyone", "stands under `if trainer.is_world_process_zero()`",
         "call accelerator.wait_for_everyone() before"),
    ),
    Fault(
        "trainer", UNEVEN,
        before_main(
            """
class Mine(Trainer):
    def get_train_dataloader(self):
        mine = Sentences(33 - 8 * self.args.process_index)
        return torch.utils.data.DataLoader(mine, batch_size=4, collate_fn=self.data_collator)
""",
            ("= Trainer(", "= Mine("), ("trainer.train()\n", "trainer.train()  # (a)\n"),
        ),
        ("in Trainer.train", "on rank 1 and more on rank 0: uneven data", "return self.accelerator.prepare(loader)"),
    ),
    Fault(
        "trainer", METRIC,
        before_main(
            """
class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        if self.is_world_process_zero():
            self.log({"mean_loss": self.accelerator.gather(loss).mean().item()})  # (a)
        return (loss, outputs) if return_outputs else loss
""",
            ("= Trainer(", "= Mine("),
        ),
        ("let all ranks call Accelerator.gather", "stands under `if self.is_world_process_zero()`",
         "accelerator.gather takes the part of each rank"),
    ),
    Fault(
        "lightning", SKIPS,
        (
            ("        inputs, targets = batch\n        loss =", "        if batch_idx == 3 and self.global_rank == 1:\n"
             "            return None\n        inputs, targets = batch\n        loss ="),
            ("trainer.fit(model, training, validation)\n", "trainer.fit(model, training, validation)  # (a)\n"),
        ),
        ("LightningModule.log, called by Trainer.fit",
         "rank 1 raised RuntimeError: Skipping the `training_step` by",
         "returning None in distributed training is not supported"),
    ),
    Fault(
        "lightning", EVALUATES,
        (
            ("    trainer.test(model, validation)\n", "    if trainer.is_global_zero:\n"
             "        trainer.test(model, validation)  # (a)\n"),
        ),
        ("let all ranks call Trainer.test", "stands under `if trainer.is_global_zero`",
         "keep only the print under trainer.is_global_zero"),
    ),
    Fault(
        "lightning", STOPS,
        (
            ("        return loss\n", "        if batch_idx == 3 and self.global_rank == 1:\n"
             "            self.trainer.should_stop = True\n        return loss\n"),
            ("max_epochs=2,", "max_epochs=2, min_epochs=0,"),
            ("trainer.fit(model, training, validation)\n", "trainer.fit(model, training, validation)  # (a)\n"),
        ),
        ("in Trainer.fit rank 1 is after 2 optimizer steps", "a stop decided on one rank",
         "self.trainer.strategy.reduce_boolean_decision(stop, all=False)"),
    ),
    Fault(
        "lightning", SAVES,
        (
            ('    trainer.save_checkpoint(f"{folder}/last.ckpt")\n', "    if trainer.is_global_zero:\n"
             '        trainer.save_checkpoint(f"{folder}/last.ckpt")  # (a)\n'),
        ),
        ("let all ranks call Trainer.save_checkpoint", "stands under `if trainer.is_global_zero`",
         "trainer.save_checkpoint() writes on rank 0 alone by itself"),
    ),
    Fault(
        "lightning", UNEVEN,
        (
            ("DataLoader(samples(61), batch_size=4, shuffle=True)", 'DataLoader(samples(33 - 8 * int(os.environ["RANK"])), batch_size=4)'),
            ("import sys\n", "import os\nimport sys\n"),
            ("max_epochs=2,", "max_epochs=2, use_distributed_sampler=False,"),
            ("trainer.fit(model, training, validation)\n", "trainer.fit(model, training, validation)  # (a)\n"),
        ),
        ("in Trainer.fit", "has 7 batches on rank 1 and more on rank 0: uneven data", "use_distributed_sampler=True"),
    ),
    Fault(
        "lightning", METRIC,
        (
            ('        self.log("train_loss", loss, sync_dist=True)\n', "        if self.global_rank == 0:\n"
             '            self.log("train_loss", loss, sync_dist=True)  # (a)\n'),
        ),
        ("let all ranks call LightningModule.log", "stands under `if self.global_rank == 0`",
         "self.log(..., rank_zero_only=True) without sync_dist=True"),
    ),
)  # fmt: skip

# Right scripts pass; changed so that each rank trains by itself they do not.
ALONE = (
    Fault(
        "lightning", APART, (('accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", ', ""),),
        ("no process group was made, and no rank called another",
         'make Trainer with accelerator="cpu", devices=the number of ranks and strategy="ddp"'),
    ),
    Fault(
        "accelerate", APART,
        (
            ("    model, optimizer, training, validation, scheduler = accelerator.prepare(\n"
             "        model, optimizer, training, validation, scheduler\n    )\n",
             "    optimizer, training, validation, scheduler = accelerator.prepare(optimizer, training, validation, scheduler)\n"),
        ),
        ("each of the 2 ranks trains alone", "give the model to accelerator.prepare"),
    ),
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the pinned version of each framework, by script."""
    group = tomllib.loads((TOP / "pyproject.toml").read_text())["dependency-groups"]["frameworks"]
    pinned = dict(re.fullmatch(r"([\w-]+)==([\d.]+)", each).groups() for each in group)  # type: ignore[union-attr, misc]
    return {script: f"{package} {pinned[package]}" for script, package in PACKAGES.items()}


def table() -> Iterator[str]:
    """Yield the lines of docs/check.md's table: per fault the remedy in each framework's terms, the last of `parts`."""
    remedies = {(each.fault, each.script): each.parts[-1] for each in (*FAULTS, *ALONE)}
    yield f"| fault | {' | '.join(versions().values())} |"
    yield f"|---|{'---|' * len(PACKAGES)}"
    for fault in dict.fromkeys(fault for fault, _ in remedies):
        yield f"| {fault} | {' | '.join(remedies.get((fault, script), '') for script in PACKAGES)} |"
