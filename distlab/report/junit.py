"""A run as JUnit XML, which every CI can show: a test case a check and a comparison, one a rank that is gone."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from distlab.report.claims import Run
from distlab.report.reading import write_atomically
from distlab.report.sentences import claim_name, failure_sentence, lost_sentence
from distlab.report.units import allowed, difference, quantity

UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)  # XML 1.0, section 2.2: no words for these


def write_junit(path: Path, run: Run) -> None:
    """Write the run to `path`; raises OSError where that cannot be."""
    tree = junit(run)
    ET.indent(tree)
    write_atomically(path, [ET.tostring(tree, encoding="unicode", xml_declaration=False), "\n"])


def junit(run: Run) -> ET.Element:
    """<testsuites> with one suite: failed checks are failures, lost ranks errors, what is informational is skipped."""
    suite = ET.Element("testsuite", name=_clean(f"{run['run_mode']} {run['run_id']}"))
    for claim in run["checks"] + run["comparisons"]:
        case = _case(suite, run, claim["variant"], claim["name"])
        if not claim["passed"]:
            ET.SubElement(case, "failure", message=_clean(failure_sentence(claim)), type=claim["name"])
        elif not claim.get("decides", True):
            ET.SubElement(case, "skipped", message=_clean(f"informational: {_told(claim)}"))
        else:
            ET.SubElement(case, "system-out").text = _clean(_told(claim))
    for skip in run["skipped"]:
        ET.SubElement(_case(suite, run, skip["variant"], "variant"), "skipped", message=_clean(skip["reason"]))
    gone = [(lost["rank"], lost_sentence(lost)) for lost in run["lost"]]
    for rank, sentence in gone + [(error["rank"], error["error"]) for error in run["errors"]]:
        ET.SubElement(_case(suite, run, "", f"rank {rank}"), "error", message=_clean(sentence), type=run["verdict"])
    for kind, tag in (
        ("tests", "testcase"),
        ("failures", ".//failure"),
        ("errors", ".//error"),
        ("skipped", ".//skipped"),
    ):
        suite.set(kind, str(len(suite.findall(tag))))
    suites = ET.Element("testsuites")
    suites.append(suite)
    return suites


def _case(suite: ET.Element, run: Run, variant: str, name: str) -> ET.Element:
    place = ".".join(part for part in ("distlab", run["run_mode"], variant) if part)
    return ET.SubElement(suite, "testcase", classname=_clean(place), name=_clean(name))


def _told(claim: Run) -> str:
    if "max_abs_diff" in claim:
        return f"{claim_name(claim)} differs by {difference(claim['max_abs_diff'])}, {allowed(claim)} allowed"
    measured, predicted = (quantity(claim[kind], claim["unit"]) for kind in ("measured", "predicted"))
    return f"{claim_name(claim)} predicted {predicted}, measured {measured}"


def _clean(text: str) -> str:
    return UNPRINTABLE.sub("?", text)
