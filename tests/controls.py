"""Every claim that decides names what makes it fail: a mistake of its mode, or a test that there is."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from distlab.contract import Mode

TOP = Path(__file__).parent.parent


def uncontrolled(run: dict[str, Any], mode: Mode) -> list[str]:
    """The deciding claims of a run without such a thing, and those that are only shown without a reason."""
    claims = run["checks"] + run["comparisons"]
    return sorted(
        {
            f"{claim['variant']} {claim['name']}: {claim['control'] or 'nothing'}"
            for claim in claims
            if not (there(claim["control"], mode) if claim.get("decides", True) else claim["shown"])
        }
    )


def there(control: str, mode: Mode) -> bool:
    """Whether `LAB_BUG=<mistake>` is one of the mode's, or `tests/<file>::<test>` a test."""
    if control.startswith("LAB_BUG="):
        return control.removeprefix("LAB_BUG=") in mode.mistakes
    return test_of(control)


@cache
def test_of(control: str) -> bool:
    path, _, test = control.partition("::")
    name, _, case = test.removesuffix("]").partition("[")
    source = (TOP / path).read_text() if (TOP / path).is_file() else ""
    return re.search(rf"^def {name}\(", source, re.MULTILINE) is not None and case in source
