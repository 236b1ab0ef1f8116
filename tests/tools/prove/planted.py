"""The files with a bug, the number of ranks that shows it, and what the finding must name: parameter, cause and ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    """A faulty file, and what a proof must report of it."""

    name: str  # files/NAME.py
    world_size: int
    issue: str  # where it was found in public
    names: str  # the parameter or module that is named first
    parts: tuple[str, ...]  # of the finding's sentence
    ranks: tuple[int, ...]  # that are wrong


PLANTED = (
    Planted("unequal_tokens", 2, "transformers 34191", "layers.3.score.weight", ("mean of the microbatches' means", "18, 12"), (0, 1)),
    Planted("mean_of_ranks", 3, "transformers 34242", "layers.3.score.weight", ("mean of the ranks' means",), (0, 1, 2)),
    Planted("context_scale", 2, "Megatron-LM 906", "layers.3.score.weight", ("2.000 x", "cp"), (0, 1)),
    Planted("tied_before_zero", 4, "Megatron-LM 844", "layers.0.weight (tied to layers.3.score.weight)", ("on shard 1 not at all",), (0, 1, 2, 3)),
    Planted("tied_stages", 2, "Megatron-LM 656", "layers.0.weight (tied to layers.3.score.weight)", ("the use as layers.3.score.weight counts not at all",), (0, 1)),
    Planted("clip_by_stage", 2, "torchtitan 596", "layers.5.score.weight", ("the norm that clips them", "different on each rank", "that of this rank's own part alone"), (0, 1)),
    Planted("clip_by_shard", 3, "FSDP.clip_grad_norm_", "layers.3.score.weight", ("rows 0 to 3", "each rank's shard is clipped by its own norm", "sum the squares"), (0, 1, 2)),
    Planted("norm_counted_twice", 2, "NeMo-RL 3788", "layers.3.score.weight", ("the norm that clips them", "1.35 x one process's norm"), (0, 1)),
    Planted("experts_scaled", 2, "PyTorch 160285", "1.experts.3.down.bias", ("2.000 x", "never divided"), (0, 1)),
    Planted("norm_not_summed", 2, "Megatron-LM 1446", "layers.3.norm.weight", ("never summed over tp",), (0, 1)),
    Planted("row_bias", 2, "text-generation-inference 1036", "layers.1.down", ("one process's plus 1 x layers.1.down.bias",), (0, 1)),
    Planted("row_bias_divided", 3, "torchtitan 4332", "layers.2.down.bias", ("0.3333 x", "divided by the 3 ranks of tp"), (0, 1, 2)),
    Planted("module_forward", 2, "minimind 853", "layers.3.score.weight", ("own samples alone", "never summed"), (0, 1)),
    Planted("divided_twice", 3, "accelerate 3533", "layers.3.score.weight", ("0.5 x", "the 2 microbatches"), (0, 1, 2)),
    Planted("last_microbatch", 2, "Megatron-LM 1012", "layers.3.score.weight", ("without microbatch 1 of shard 1",), (0, 1)),
    Planted("dropout_alike", 2, "transformers 31412", "layers.1.drop", ("draw the same random numbers for different samples",), (0, 1)),
    Planted("dropout_apart", 2, "Megatron-DeepSpeed 276", "layers.1.drop", ("draw different random numbers for the same activations",), (0, 1)),
    Planted("optimizer_before", 2, "PyTorch 149205", "layers.3.score.weight", ("did not change",), (0, 1)),
    Planted("meta_buffers", 3, "SkyRL 1709", "buffer frequencies", ("begins with other values on ranks 1 and 2", "0, 0, 0, not 1, 0.1, 0.01"), (1, 2)),
)  # fmt: skip
RIGHT = ("by_hand", "ddp", "dtensor", "fsdp2", "gpipe", "model", "pp", "strategy", "tp")
