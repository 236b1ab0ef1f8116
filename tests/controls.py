"""Every check must name an injected bug of its mode, or an existing test, that makes it fail."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from distlab.contract import Mode

TOP = Path(__file__).parent.parent


def uncontrolled(run: dict[str, Any], mode: Mode) -> list[str]:
    """Return the checks of a run without a valid control, and informational comparisons without a reason."""
    claims = run["checks"] + run["comparisons"]
    return sorted(
        {
            f"{claim['variant']} {claim['name']}: {claim['control'] or 'nothing'}"
            for claim in claims
            if not (control_exists(claim["control"], mode) if claim.get("decides", True) else claim["shown"])
        }
    )


def control_exists(control: str, mode: Mode) -> bool:
    """Return whether `LAB_BUG=<name>` is a bug of the mode, or `tests/<file>::<test>` an existing test."""
    if control.startswith("LAB_BUG="):
        return control.removeprefix("LAB_BUG=") in mode.mistakes
    return names_a_test(control)


@cache
def names_a_test(control: str) -> bool:
    path, _, test = control.partition("::")
    name, _, case = test.removesuffix("]").partition("[")
    source = (TOP / path).read_text() if (TOP / path).is_file() else ""
    return re.search(rf"^def {name}\(", source, re.MULTILINE) is not None and case in source
