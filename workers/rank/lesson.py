"""The lesson of a mode as the report tells it: its idea, a sentence a variant, the predictions with their numbers."""

import inspect

from workers.config import Config
from workers.contract import Mode
from workers.measure.formulas import Prediction
from workers.report import records
from workers.report.units import human_bytes

PREDICTED = ["variant", "predicted a rank and step", "formula", "value", "calls"]


def lesson(config: Config, mode: Mode) -> records.Lesson:
    """What a reader of the report should know before its numbers."""
    sentences = {each.name: inspect.getdoc(each.build) or "" for each in mode.variants if each.build is not None}
    variants = {name: first_sentence(told) for name, told in sentences.items() if told}
    return records.Lesson(paragraphs(mode.idea), variants, prediction_rows(mode.predict(config)))


def paragraphs(idea: str) -> list[str]:
    """The text of a docstring without its tables, which are indented."""
    found = [" ".join(part.split()) for part in idea.split("\n\n") if not part.startswith("  ")]
    return [part for part in found if not part.endswith(":")]  # which announces a table


def first_sentence(told: str) -> str:
    """Of a docstring the first line, or two where a sentence is that long."""
    return " ".join(told.split("\n\n")[0].split())


def prediction_rows(predictions: list[Prediction]) -> list[list[str]]:
    """A row a prediction, as PREDICTED names its columns; where ranks differ, the least and the most."""
    rows = []
    for prediction in predictions:
        shown = [
            human_bytes(value) if prediction.unit == "B" else f"{value:g} {prediction.unit}"
            for value in sorted(prediction.value)
        ]
        value = shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"
        rows.append([prediction.variant, prediction.name, prediction.formula, value, str(prediction.calls or "")])
    return rows
