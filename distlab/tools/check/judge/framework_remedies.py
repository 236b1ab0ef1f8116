"""Remedies in the terms of the training framework: accelerate, transformers, Lightning.

`CALLS` are calls for all ranks that scripts make on one, with the framework's alternative. `CAUSES` are the reasons why
ranks diverge in a loop.
"""

UNEVEN, STOPPED, SKIPPED, ALONE = "uneven", "stopped", "skipped", "alone"
AS_MANY = "give all ranks the same number of batches, and let them stop, evaluate and save at the same steps"
ON_MAIN = "keep only the print or the write under accelerator.is_main_process"

CALLS = {
    "Accelerator.gather_for_metrics": f"accelerator.gather_for_metrics needs the part of each rank; {ON_MAIN}",
    "Accelerator.gather": f"accelerator.gather needs the part of each rank; {ON_MAIN}",
    "Accelerator.reduce": f"accelerator.reduce needs the part of each rank; {ON_MAIN}",
    "Accelerator.wait_for_everyone": "call accelerator.wait_for_everyone() before `if accelerator.is_main_process`",
    "Accelerator.save_state": "accelerator.save_state() decides itself which rank writes what",
    "Accelerator.get_state_dict": f"accelerator.get_state_dict(model) may gather the parts of all ranks; {ON_MAIN}",
    "Trainer.evaluate": "trainer.evaluate() gives each rank its part of the data; keep only the print under"
    " trainer.is_world_process_zero()",
    "Trainer.predict": "trainer.predict() gives each rank its part of the data; keep only the write on one",
    "Trainer.training_step": "compute each batch: for one that does not count compute_loss returns 0 * loss",
    "Trainer.save_model": "trainer.save_model() writes on one rank by itself",
    "Trainer.save_checkpoint": "trainer.save_checkpoint() writes on rank 0 alone by itself",
    "Trainer.test": "trainer.test() gives each rank its part of the data; keep only the print under"
    " trainer.is_global_zero",
    "Trainer.validate": "trainer.validate() gives each rank its part of the data; keep only the print under"
    " trainer.is_global_zero",
    "LightningModule.log": "log a value of one rank by self.log(..., rank_zero_only=True) without sync_dist=True",
    "LightningModule.log_dict": "log values of one rank by self.log_dict(..., rank_zero_only=True) without"
    " sync_dist=True",
    "LightningModule.all_gather": "self.all_gather needs the part of each rank; keep only what follows under"
    " self.trainer.is_global_zero",
    "Metric.compute": "compute() of a torchmetrics Metric gathers from all ranks, unless it is made with"
    " sync_on_compute=False",
}  # by the function that the user called

CAUSES = {
    "accelerate": {
        UNEVEN: "give the loader to accelerator.prepare, which gives each rank the same number of batches, or train"
        " under accelerator.join_uneven_inputs([model])",
        STOPPED: "stop on all ranks: call accelerator.set_trigger() on the one that wants to stop, and `if"
        " accelerator.check_trigger(): break` on all ranks at each step",
        SKIPPED: "call accelerator.backward on all ranks for each batch: accelerator.backward(0 * loss) for one that"
        " does not count",
        ALONE: "give the model to accelerator.prepare, which makes it a DistributedDataParallel",
    },
    "transformers": {
        UNEVEN: "give Trainer the data (train_dataset=...), or return self.accelerator.prepare(loader) from"
        " get_train_dataloader",
        STOPPED: "set control.should_training_stop by a value that is equal on all ranks: metrics in"
        " on_evaluate (EarlyStoppingCallback), or the result of accelerator.gather",
        SKIPPED: "let training_step compute on all ranks for each batch: compute_loss returns 0 * loss for one that"
        " does not count",
    },
    "lightning": {
        UNEVEN: "let Trainer make the samplers (use_distributed_sampler=True), or give all ranks the same number"
        " of batches (limit_train_batches=N)",
        STOPPED: "stop by EarlyStopping on a metric of self.log(..., sync_dist=True), or by"
        " self.trainer.strategy.reduce_boolean_decision(stop, all=False)",
        SKIPPED: "return 0 * loss for a batch that does not count",
        ALONE: 'make Trainer with accelerator="cpu", devices=the number of ranks and strategy="ddp": by'
        " default it takes one process on a machine without a GPU",
    },
}  # by package
CAUSES["pytorch_lightning"] = CAUSES["lightning"]


def call_remedy(function: str) -> str:
    """Return a remark for a call that only one rank makes; empty if there is none."""
    return CALLS.get(function, "")


def cause_remedy(package: str, cause: str) -> str:
    """Return the remedy if ranks diverge for this reason."""
    return CAUSES.get(package, {}).get(cause, "")
