"""The lesson without the run: the idea, the shapes, and the prediction for the settings given.

make explain RUN_MODE=dp WORLD_SIZE=3            the mode's docstring and its predictions, formula and number
make explain RUN_MODE=dp LAB_BUG=no_sampler      and what that mistake breaks, and which check sees it
"""

import importlib
import inspect
import sys
from typing import Any

from workers.config import Config, ConfigError
from workers.measure.formulas import Prediction
from workers.report.text import aligned
from workers.report.units import human_bytes


def explain(config: Config, experiment: Any) -> list[str]:
    """The lines of the lesson; `experiment` is the module of config.run_mode."""
    lines = [inspect.cleandoc(experiment.__doc__), ""]
    lines += [f"With {', '.join(f'{name}={value}' for name, value in settings(config).items())}:", ""]
    lines += prediction_lines(experiment.predict(config))
    if config.bug is not None:
        bug = experiment.BUGS[config.bug]
        return [*lines, "", f"LAB_BUG={config.bug}: {bug.what}. The check that sees it: {bug.check}."]
    return [*lines, "", "Mistakes to make on purpose (LAB_BUG), and the check that sees each:", *bug_lines(experiment)]


def settings(config: Config) -> dict[str, str]:
    return {"RUN_MODE": config.run_mode, "WORLD_SIZE": str(config.world_size)} | config.environ()


def prediction_lines(predictions: list[Prediction]) -> list[str]:
    """A row a prediction; where ranks differ, the least and the most."""
    rows = []
    for prediction in predictions:
        shown = [
            human_bytes(value) if prediction.unit == "B" else f"{value:g} {prediction.unit}"
            for value in sorted(prediction.value)
        ]
        value = shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"
        rows.append([prediction.variant, prediction.name, prediction.formula, value, prediction.calls or ""])
    return aligned(["variant", "predicted a rank and step", "formula", "value", "calls"], rows)


def bug_lines(experiment: Any) -> list[str]:
    return aligned(
        ["bug", "what breaks", "check"], [[name, bug.what, bug.check] for name, bug in experiment.BUGS.items()]
    )


def main() -> int:
    """Print the lesson of RUN_MODE; exit code 2 if the settings are refused."""
    from workers.rank.start import refuse

    try:
        config = Config.read()
        experiment = importlib.import_module(f"experiments.{config.run_mode}")
        refuse(config, experiment)
    except ConfigError as error:
        print("\n".join(f"refused    {fault}" for fault in error.faults))
        return 2
    print("\n".join(explain(config, experiment)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
