"""What a pipeline cannot run: models of too few layers, and sizes that some of its schedules cannot take."""

from workers.config import Config
from workers.contract import untrainable
from workers.workload import own
from workers.workload.model import outline


def depth(config: Config) -> int:
    """Layers that are divided; gpt's embedding and head go with the first and the last one."""
    if own.is_own(config.model):
        return len(outline(config).layers)
    return 1 if config.model == "line" else config.depth


def refuse(config: Config) -> list[str]:
    """Fewer layers than stages; and what makes no batch for all of them."""
    broken = untrainable(config, 1)
    if own.is_own(config.model) and broken:
        return broken
    layers, ranks, small = depth(config), config.world_size, []
    if ranks > layers:
        named = f"the {layers} layers of LAB_MODEL={config.model!r}" if own.is_own(config.model) else ""
        what = "LAB_MODEL=line is one layer" if config.model == "line" else named or f"LAB_DEPTH={layers} layers"
        verb = ", less than" if config.model == "line" else " are fewer than"
        small = [f"{what}{verb} WORLD_SIZE={ranks}: every stage needs one, allowed: 1 to {layers} ranks"]
    return small + misshapen(config) + broken


def misshapen(config: Config) -> list[str]:
    """A sentence if layers of one's own give each other anything but LAB_SEQ rows of LAB_WIDTH numbers a sample."""
    if not own.is_own(config.model):
        return []
    shapes = own.passed_on(config.model, config.seed, config.seq)
    odd = [index for index, shape in enumerate(shapes) if shape != (config.seq, config.width)]
    if not odd:
        return []
    return [
        f"LAB_MODEL={config.model!r}: stages pass on [B, LAB_SEQ={config.seq}, LAB_WIDTH={config.width}], and layer"
        f" {odd[0]} gives [B, {', '.join(map(str, shapes[odd[0]]))}]: set them to what all layers give"
    ]


def cannot(config: Config, chunks: int) -> dict[str, str]:
    """The variants that cannot take these sizes, each with the reason; `chunks` is LAB_CHUNKS."""
    ranks, microbatches, batch = config.world_size, config.num_microbatches, config.batch
    reasons: dict[str, str] = {}
    for name in ("torch_gpipe", "torch_1f1b", "torch_interleaved_zb", "torch_zbv", "torch_dualpipev"):
        if batch % microbatches:
            reasons[name] = (
                f"torch wants equal microbatches, and LAB_BATCH={batch} is no multiple of "
                f"LAB_MICROBATCHES={microbatches}"
            )
        elif config.device == "cuda" and config.backend == "gloo":
            reasons[name] = "it hands gloo tensors that live on a GPU, which gloo does not send"
    for names, held, why in (
        (("interleaved", "torch_interleaved_zb"), chunks, f"LAB_CHUNKS={chunks}"),
        (("zbv", "dualpipev", "torch_zbv", "torch_dualpipev"), 2, "two stages a rank"),
    ):
        for name in names:
            if ranks * held > depth(config):
                reason = f"{why} on {ranks} ranks makes {ranks * held} stages, more than the {depth(config)} layers"
                reasons.setdefault(name, reason)
            elif config.backend == "nccl" and ranks > 1 and not name.startswith("torch"):
                reasons[name] = (
                    "NCCL runs messages in the order of their launch, and ranks with chunks would wait in a circle"
                )
    for name in ("dualpipev", "torch_dualpipev"):
        if microbatches < 2 * ranks:
            least = f"LAB_MICROBATCHES={microbatches} is fewer than 2p = {2 * ranks}, which fill both directions"
            reasons.setdefault(name, least)
    if microbatches < ranks:
        reasons.setdefault(
            "torch_1f1b", f"LAB_MICROBATCHES={microbatches} is fewer than its {ranks} stages, which torch refuses"
        )
    if microbatches % max(1, microbatches // ranks):
        rounds = max(1, microbatches // ranks)
        reasons.setdefault(
            "torch_interleaved_zb", f"LAB_MICROBATCHES={microbatches} is no multiple of its {rounds} rounds of {ranks}"
        )
    return reasons
