"""What one opens to follow a variant: the count agrees with a reader's, and grows no further."""

from functools import partial
from statistics import median

from distlab.data_parallel.buckets import GradientBuckets
from tests.budget import TOP, reached, variants

OPENED = {(opened.mode, opened.variant): opened for opened in variants()}
MOST_FILES, MEDIAN_FILES, BUCKETED_LINES = 4, 3, 650

READ = {  # by a person, from each `def` on: the lesson's own folder and distlab/, without the lesson itself
    ("dp", "bucketed"): "data_parallel/buckets.py data_parallel/strategy.py",
    ("tp", "megatron"): "tp/user_plans.py tensor_parallel/layers.py tensor_parallel/strategy.py",
    ("pp", "1f1b"): ("pipeline_parallel/pipeline.py pipeline_parallel/schedules.py pipeline_parallel/strategy.py"),
    ("fsdp", "zero3"): "sharded/flat_parameter.py sharded/zero.py",
    ("comm", "ring"): "collectives/point_to_point.py collectives/ring.py",
    ("moe", "ep"): "moe/predictions.py expert_parallel/layer.py expert_parallel/strategy.py",
}


def test_the_count_is_what_a_reader_opens() -> None:
    for (mode, variant), expected in READ.items():
        lesson, *others = OPENED[mode, variant].files
        assert lesson == TOP / "experiments" / mode / "__init__.py"
        assert " ".join("/".join(path.parts[-2:]) for path in others) == expected


def test_a_variant_takes_no_more_files_than_today() -> None:
    num_files = {key: len(opened.files) for key, opened in OPENED.items()}
    assert max(num_files.values()) <= MOST_FILES
    assert median(num_files.values()) <= MEDIAN_FILES
    assert OPENED["dp", "bucketed"].num_lines <= BUCKETED_LINES


def test_closures_partials_and_classes_are_followed() -> None:
    buckets = TOP / "distlab/data_parallel/buckets.py"
    folders = ("distlab.data_parallel", __name__)

    def made(kind: type[GradientBuckets] = GradientBuckets) -> object:
        return kind

    def closing() -> object:
        return made

    class Derived(GradientBuckets):
        """A class of another file, by its base alone."""

    for start in (made, closing, partial(made), partial(print, kind=GradientBuckets), [{"a": Derived}]):
        assert buckets in reached([start], folders)
    assert reached([GradientBuckets], ("distlab.elsewhere",)) == set()
