"""Combined parallelism: one model sliced, cut into stages and replicated, on one grid of ranks.

Each axis alone has a limit: replicas store everything, slices communicate in every layer, pipelines idle. Large models
use all of them, with ranks in a grid: those that differ only along one axis are a group. The techniques combine without
change, since each works on the result of the one before. Bugs arise where axes meet: a gradient summed over the wrong
group, too early or twice; a norm that counts an element t times or not at all.

  predicted   along each axis what it sends alone, for the part of the model on the rank: over dp 2(d-1)/d of its own
              weights, P/(t·p) of them; over tp 2(t-1)/t x b·s·h per sum in its own layers, for its own samples; over pp
              b·s·h per end of a stage, b·s·h/t with sequence parallelism (Narayanan et al. 2021, "Megatron-LM", section
              3.2); over cp 3(c-1)/c of K and V of its heads and samples per layer. A rank has s/c of s positions, and
              gradients are summed over dp and cp together. At rest P/(t·p) of everything, and less with ZeRO
  shapes      inputs [B/d, S/c] in m microbatches; between stages [b, S/c, D], or rows [b, S/(c·t), D]; weights of a
              rank [D/t, D] of L/p layers

LAB_MESH lists the axes from outermost to innermost, such as pp2,dp2,tp2; tp sends most, so its ranks are neighbours.
With cp, samples are folded over its ranks, and keys and values are passed around (zigzag of RUN_MODE=cp).

  1f1b             one stage per rank, like pp's 1f1b; buckets are launched during the last backward pass of the
                   pipeline
  sequence         1f1b with sequence parallelism: gradients of replicated parameters are summed over the rows' ranks
  zero1            sequence, and each replica stores and updates its part of the optimizer's state
  zero2            zero1, with sharded gradients, summed in each backward pass of the pipeline
  zero3            zero2, with sharded weights, gathered for each pass of each microbatch: a pipeline has many
  ulysses          1f1b whose ranks along cp exchange positions for heads around attention
  dtensor_fsdp2    PyTorch's own on two axes: parallelize_module, and fully_shard over its DTensors
  pipelining_fsdp2 PyTorch's own on the other two: torch.distributed.pipelining over fully_shard

LAB_DROPOUT draws masks per sample and position: equal along tp where activations are replicated, different along dp,
along cp and where rows are cut (distlab/lab/workload/model.py). 16-bit weights have float32 masters.
"""

from functools import partial

from distlab.contract import Mode, Strategy, Variant
from distlab.lab.checkpoint import bugs as checkpoints
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import Prediction
from distlab.lab.verify.counted import check_in_flight
from distlab.lab.verify.pipeline_checks import draw_on_paper, note_schedule
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.model import Model, build_model, dropping
from distlab.techniques.mesh.strategy import Stacked
from distlab.techniques.pipeline_parallel import schedules

from .bugs import mistake
from .checks import announce, check_order, check_overlap, claims, compare_axes
from .options import Options
from .placement import HOW, Rank, at, axes
from .predictions import cannot, predict, refuse
from .pytorch import dtensor_fsdp2, pipelining_fsdp2
from .stack import plain, stack


def trained(config: Config, seed: int) -> Model:
    """Return the model of LAB_MODEL, whose blocks drop LAB_DROPOUT of what they add."""
    return dropping(build_model(config, seed), config, config.own(Options).dropout)


# --- the run ---


def predicted(config: Config) -> list[Prediction]:
    sizes = axes(config)
    return predict(config, sizes, cannot(config, sizes))


def run(lab: Lab) -> None:
    config, sizes = lab.config, axes(lab.config)
    announce(lab, sizes)
    if sizes["pp"] > 1:
        note_schedule(lab, partial(schedule_of, sizes, config))
    measured = measure(lab, also=partial(check_most_in_flight, lab))
    draw_on_paper(lab, partial(schedule_of, sizes, config))
    lab.compare_predictions(predicted(config), measured)
    ranks = {name: Rank(config, sizes, lab.rank, HOW[name]) for name in measured if name in HOW}
    for name, rank in ranks.items():
        compare_axes(lab, name, rank, measured[name])
        check_order(lab, name, rank, measured[name])
        check_overlap(lab, name, measured[name])


def check_most_in_flight(lab: Lab, name: str, strategy: Strategy) -> None:
    """Check for variants by hand that no stage stores more microbatches than its schedule allows."""
    if name in HOW:
        assert isinstance(strategy, Stacked)
        check_in_flight(lab, name, strategy, "1f1b")


def schedule_of(sizes: dict[str, int], config: Config, variant: str) -> schedules.Schedule | None:
    if variant not in HOW:
        return None
    along = schedules.one_forward_one_backward(sizes["pp"], config.num_microbatches)
    return [along[at(rank, sizes)["pp"]] for rank in range(config.world_size)]


MODE = Mode(
    shards=True,
    variants=(
        *(
            Variant(name, partial(stack, name=name), sentence=how.sentence)
            for name, how in HOW.items()
            if not how.plain
        ),
        Variant("dtensor_fsdp2", dtensor_fsdp2, by_torch=True),
        Variant("pipelining_fsdp2", pipelining_fsdp2, by_torch=True),
        Variant("plain", plain, sentence=HOW["plain"].sentence, by_name=True),
    ),
    headline=("1f1b", "one slice of some layers for some of the samples: three sums, each in its own group"),
    run=run,
    claims=claims,
    model=trained,
    options=Options,
    axes=axes,
    predict=predicted,
    refuse=lambda config: refuse(config, config.own(Options).mesh),
    cannot=lambda config: cannot(config, axes(config)),
    mistakes=mistake | checkpoints.mistake,
    gone={
        "naive": "LAB_VARIANT=1f1b is the simplest one",
        "per_parameter": "LAB_VARIANT=1f1b has buckets; RUN_MODE=dp LAB_VARIANT=per_parameter sums each by itself",
        "gpipe": "LAB_VARIANT=1f1b; RUN_MODE=pp LAB_VARIANT=gpipe has that order",
        "1f1b_split": "LAB_VARIANT=1f1b; RUN_MODE=pp LAB_VARIANT=zb_h1 splits backward passes",
        "interleaved": "LAB_VARIANT=1f1b; RUN_MODE=pp LAB_VARIANT=interleaved has several stages per rank",
        "zb_h1": "LAB_VARIANT=1f1b; RUN_MODE=pp LAB_VARIANT=zb_h1 defers gradients of weights",
        "norm_by_stage": "LAB_BUG=norm_by_all fails the same check",
        "wrong_group": "LAB_BUG=scaled_by_cp fails the same check",
        "dropout_apart": "LAB_BUG=dropout_alike fails the same check",
        "dropout_by_own_rows": "LAB_BUG=dropout_alike fails the same check",
        "nothing_put_off": "no variant defers gradients of weights; RUN_MODE=pp LAB_BUG=gpipes_order breaks an order",
    },
    recomputes=True,
    reading=(
        "experiments/mesh/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/mesh/__init__.py: the variants, and what a run of them checks",
        "experiments/mesh/stack.py: the whole order of composition",
        "distlab/techniques/mesh/grid.py: one group for each axis",
        "distlab/techniques/mesh/strategy.py: the training step, replicated or sharded stages, and the one norm",
        "distlab/techniques/mesh/reducing_pipeline.py: gradients summed in the last backward pass of each stage",
    ),
)
