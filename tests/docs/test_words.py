"""Refused words: the log, the report, the help, the lessons, README and docs use the terms of the field.

`REFUSED` has each word as a regex with its replacement; `KEPT` has names that the stable interface froze.
"""

import html
import importlib
import re
from pathlib import Path

import pytest

from distlab.cli.explain import mistake_lines
from distlab.lab.config import Config
from distlab.lab.config.commands import COMMANDS, help_lines
from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load
from distlab.lab.report.log import verdict_lines
from distlab.lab.report.page import page
from distlab.lab.report.reading import read_run
from distlab.lab.report.records import Ranks
from distlab.lab.report.verdict import judge
from tests.docs.pages import PAGES, TOP, page_id
from tests.lab.report.made_up import drilled_run, good_run, mistaken, pipeline_run

REFUSED = {
    r"\bheld\b": "passed, kept or compared with",
    r"\bonly shown\b|\bshown$": "informational",
    r"\bnothing to hold\b": "nothing to check",
    r"\boff, of what\b": "difference / tolerance",
    r"\brepeat [A-Z_]+=": "rerun",
    r"\bmistakes?\b": "injected bug",
    r"\bon purpose\b": "injected",
    r"\bmeant to see\b|\bseen by\b|\bcheck that sees\b": "caught by, catches",
    r"\bdrills?\b": "fault injection",
    r"\bas it should\b|\bshould be:": "as expected, expected",
    r"\bothers (go|went) on\b": "the remaining ranks continue",
    r"\bgiven up\b": "declared dead",
    r"\bcut off\b": "partitioned from the cluster",
    r"\bin vain\b": "timed out waiting for",
    r"\bwant of\b": "killed by the OOM killer",
    r"\blet in\b": "could join",
    r"\bhears?\b|\bheard\b": "receives, heartbeats",
    r"\bword on\b|\bsign of the\b": "to respond",
    r"\bfrom outside changed nothing\b": "rejected unauthenticated messages",
    r"\bbreaks? off\b": "ends early, truncated",
    r"\bst(ands?|ood) still\b": "paused",
    r"\bwhat was said\b": "notes",
    r"\bthe house\b|\brooms?\b|\bfloors?\b": "code layout, modules, layers",
    r"\bgoodbye\b": "shutdown handshake",
    r"\btold wrong\b": "false reports",
    r"\bmicrobatch\(es\)": "1 microbatch",
    r"\bmade the one before\b": "repeated the previous call",
    r"\bcannot show\b": "cannot be detected",
}
KEPT = (
    r"\bheld[ -]out\b",  # samples: machine learning's own word, and the name of a check
    r"\bmoments held\b",  # the name of a check
    r"\bdrill(?= failed|:|$)",  # the name of a check
    r"\bdrill(?= {7}|, puzzle| needs)|(?<=distlab )drill|(?<=option of )drill|\bdrill(?= starts)",  # the command
)


def refused_words(text: str) -> list[str]:
    """Return the refused words in a text, each with its line."""
    for kept in KEPT:
        text = re.sub(kept, "", text, flags=re.IGNORECASE | re.MULTILINE)
    return [
        f"{match[0]!r} in {line.strip()!r}, say: {instead}"
        for line in text.splitlines()
        for refused, instead in REFUSED.items()
        if (match := re.search(refused, line, re.IGNORECASE))
    ]


# Runs of an earlier version; their records contain its sentences, which a page quotes.
OLD: dict[str, Ranks] = {run.name: read_run(run) for run in sorted((TOP / "tests" / "data" / "runs").iterdir())}
RUNS: dict[str, Ranks] = {
    "good": good_run(),
    "drilled": drilled_run(),
    "mistaken": mistaken(good_run()),
    "pipeline": pipeline_run(),
}
OLD_WORDS = r"the others went on"


@pytest.mark.parametrize("name", [*OLD, *RUNS])
def test_the_log_has_no_refused_word(name: str) -> None:
    records = (OLD | RUNS)[name]
    lines = verdict_lines(judge(records), records, None)
    assert refused_words(re.sub(OLD_WORDS, "", "\n".join(lines))) == []


@pytest.mark.parametrize("name", RUNS)
def test_the_report_has_no_refused_word(name: str) -> None:
    made = page(judge(RUNS[name]), RUNS[name])
    made = re.sub(r"<(style|script)\b.*?</\1>", "", made, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", "\n", made))
    assert refused_words(text) == []


def test_the_help_has_no_refused_word() -> None:
    assert [fault for command in (None, *COMMANDS) for fault in refused_words("\n".join(help_lines(command)))] == []


def test_the_variables_have_no_refused_word() -> None:
    descriptions = [field.description or "" for field in Config.model_fields.values()]
    assert refused_words("\n".join(descriptions)) == []


@pytest.mark.parametrize("mode", modes())
def test_the_injected_bugs_have_no_refused_word(mode: str) -> None:
    assert refused_words("\n".join(mistake_lines(load(mode)))) == []


@pytest.mark.parametrize("mode", modes())
def test_the_mode_descriptions_have_no_refused_word(mode: str) -> None:
    assert refused_words(importlib.import_module(f"distlab.experiments.{mode}").__doc__ or "") == []


def outside_code(text: str) -> str:
    """Return a page without output of commands, code, comments and the targets of links."""
    return re.sub(
        r"<!-- output of:.*?<!-- end -->|<!--.*?-->|^ *```.*?^ *```$|`[^`\n]*`|\]\([^)]*\)",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_the_pages_have_no_refused_word(path: Path) -> None:
    assert refused_words(outside_code(path.read_text())) == []


def test_a_refused_word_is_found() -> None:
    assert refused_words("naive 1.1e-16 held") == ["'held' in 'naive 1.1e-16 held', say: passed, kept or compared with"]
    assert refused_words("loss on held-out samples; threshold; 1 of 9 checks failed: drill") == []
