"""What the README shows is what the commands print: every block is run again.

A block follows a comment `<!-- output of: COMMAND -->`. What differs from run to run (times, dates, small differences,
the bars of a timeline) is compared by its place alone; words, and with them every verdict, must be the same.

    python -m tests.test_readme        writes the blocks anew
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import collectives, compress, link, pp
from tests.documents import spans, tables
from workers.config import Config
from workers.config.values import modes
from workers.parallel.collectives import pick
from workers.plan import fit
from workers.workload.model import outline

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"<!-- output of: (?P<command>.*?) -->\n(?P<output>.*?)<!-- end -->\n", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")


def output_of(command: str) -> str:
    """What a README command prints, of several ranks only the lines of rank 0."""
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program = [sys.executable if word == "python" else word for word in words if not re.match(r"[A-Z_]+=", word)]
    clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE|RANK", name)}
    done = subprocess.run(
        program, cwd=README.parent, env=clean | settings, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return "".join(
        line + "\n"
        for line in done.stdout.splitlines()
        if not re.match(r"rank [1-9] \||rank 0 \| waiting|.*\d+ of \d+$", line)
    )


def shape(text: str) -> list[str]:
    """The text without its numbers, the widths of its columns, and what is drawn between two bars: who was when where."""
    plain = (NUMBER.sub("#", re.sub(r"\|[-+.0-9a-z]{32,}\|$", "|drawn|", line)) for line in text.splitlines())
    # Two figures that are equal are written as one: bytes at rest and at the peak.
    return [re.sub(r"# / #", "#", re.sub(r"\s+", " ", line)).strip() for line in plain]


def fenced(output: str) -> str:
    return output if output.startswith("|") else f"```text\n{output}```\n"


@pytest.mark.parametrize("block", list(BLOCK.finditer(README.read_text())), ids=lambda block: block["command"])
def test_a_block_is_what_its_command_prints(block: re.Match[str]) -> None:
    assert shape(block["output"]) == shape(fenced(output_of(block["command"])))


def test_a_changed_word_in_a_block_is_seen() -> None:
    assert shape("PASS  32 checks held") == shape("PASS 7 checks held")
    assert shape("PASS 32 checks held") != shape("FAIL 32 checks held")
    assert shape(f"rank 0 |{'01..' * 16}|") == shape(f"rank 0 |{'0a.-' * 16}|") != shape(f"rank 0 {'01..' * 16}")


def test_every_mode_stands_in_the_readme_with_its_variants() -> None:
    rows = {row[0].strip("`"): row for heading, row in tables(README.read_text()) if heading == "Modes"}
    assert sorted(rows) == modes()
    for mode, row in rows.items():
        named = [name for span in spans(row[2]) if "=" not in span for name in span.split(", ")]
        assert sorted(named) == sorted(getattr(importlib.import_module(f"experiments.{mode}"), "VARIANTS", ()))


BENCHED = re.compile(
    r"^(?P<op>all_\w+|reduce_scatter) +(?P<size>\d+) (?P<unit>[KM])iB +(?P<picked>\w+) +[\d.]+ +(?P<target>[\d.]+)x +"
    r"(?P<held>yes|NO) +[\d.]+x +(?P<auto>[\d.]+)x",
    re.MULTILINE,
)


def test_the_table_of_speeds_is_of_this_code() -> None:
    rows = list(BENCHED.finditer(README.read_text()))
    assert len(rows) == len(collectives.TARGETS) * len(collectives.PLANS)
    for row in rows:
        nbytes = int(row["size"]) * {"K": collectives.KIB, "M": collectives.MIB}[row["unit"]]
        target = collectives.TARGETS[row["op"]].get(nbytes, collectives.FLOOR)
        assert float(row["target"]) == target
        assert row["picked"] == pick(row["op"], nbytes, 4)
        assert (row["held"] == "yes") == (float(row["auto"]) >= target)


CLAIMED = re.compile(r"^(?P<what>[\w' ]+?) +(?P<seen>[\d.]+) +(?P<limit>[\d.]+) +(?P<held>yes|NO)$", re.MULTILINE)


def test_the_targets_of_a_pipeline_are_judged_as_they_stand() -> None:
    rows = {row["what"]: row for row in CLAIMED.finditer(README.read_text())}
    limits = [float(row["limit"]) for row in rows.values()]
    assert limits == [pp.WALL_TARGET, pp.CPU_TARGET, pp.BUBBLE_TARGET, pp.ACTIVATIONS_TARGET]
    assert all((row["held"] == "yes") == (float(row["seen"]) <= float(row["limit"])) for row in rows.values())


SHARDED = re.compile(
    r"^(?:\d +)?(?P<what>zero3|(?:peak|wire) of .*?)  +.*?(?P<seen>[\d.]+)x[^x]*?(?: [\d.]+x \S+)? +(?P<limit>[\d.]+)x +(?P<held>yes|NO)$",
    re.MULTILINE,
)


def test_the_targets_of_sharding_are_judged_as_they_stand() -> None:
    rows = list(SHARDED.finditer(README.read_text()))
    assert [row["what"] for row in rows].count("zero3") == 2
    assert len(rows) == 8
    # The wire's ratio is a formula's own, which gloo's headers may exceed by 1 %.
    slack = {"zero3": 0.0, "peak": 0.0, "wire": 0.01}
    for row in rows:
        most = float(row["limit"]) + slack[row["what"].split()[0]]
        assert (row["held"] == "yes") == (float(row["seen"]) <= most)


LINKED = re.compile(
    r"^(?P<asked>\d+[mg]bit) +[\d.]+ Mbit/s \((?P<off>[-+][\d.]+)%\) +within 6% +(?P<held>yes|NO) +\S+ Mbit/s \(\S+%\)$",
    re.MULTILINE,
)
COMPRESSED = re.compile(
    r"^(?P<name>\w+) +\d+ +(?P<ratio>[\d.]+)x +(?P<limit>[\d.]+x|-) +(?P<held>yes|NO|-) +(?P<off>[-+][\d.]+%|-) +(?:2%|-) +"
    r"(?P<wire>yes|NO|-)$",
    re.MULTILINE,
)
BUCKETS = re.compile(
    r"^bucketed with its best bucket, .*: (?P<ratio>[\d.]+)x, target (?P<limit>[\d.]+)x, held (?P<held>yes|NO);",
    re.MULTILINE,
)


def test_the_targets_of_slow_links_are_judged_as_they_stand() -> None:
    text = README.read_text()
    rates = list(LINKED.finditer(text))
    assert tuple(row["asked"] for row in rates) == link.RATES
    assert all((row["held"] == "yes") == (abs(float(row["off"])) <= 100 * link.RATE_TARGET) for row in rates)
    (buckets,) = BUCKETS.finditer(text)
    assert float(buckets["limit"]) == link.DP_TARGET
    assert (buckets["held"] == "yes") == (float(buckets["ratio"]) <= link.DP_TARGET)
    rows = {row["name"]: row for row in COMPRESSED.finditer(text)}
    assert tuple(rows) == compress.VARIANTS
    for name, row in rows.items():
        target = compress.TARGETS.get(name)
        assert row["limit"] == (f"{target:.2f}x" if target else "-")
        assert row["held"] == ("-" if target is None else "yes" if float(row["ratio"]) <= target else "NO")
        if row["off"] != "-":
            assert (row["wire"] == "yes") == (abs(float(row["off"][:-1])) <= 100 * compress.WIRE_TARGET)


def test_the_limit_of_make_fit_is_what_the_formulas_give() -> None:
    sizes = {
        "LAB_WIDTH": "512",
        "LAB_DEPTH": "12",
        "LAB_SEQ": "16",
        "LAB_BATCH": "4",
        "WORLD_SIZE": "4",
    }  # compose/fit.sh
    config = Config.read(sizes)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in outline(config).layers]
    held, block = fit.activations(config), README.read_text().partition("<!-- of: make fit -->")[2]
    dp, zero3 = fit.dp_need(sum(layers), held), fit.zero3_need(layers, 4, held)
    (base,) = re.findall(r"^no model +(\d+) MB", block, re.MULTILINE)
    for name, need in (("dp", dp), ("zero3", zero3)):
        assert re.search(
            rf"^{name} +{base} MB \+ {fit.mb(need.nbytes)} = .*: {re.escape(need.formula)}$", block, re.MULTILINE
        )
    limit = float(base) + (dp.nbytes + zero3.nbytes) / 2e6
    assert re.search(rf"^limit +{limit:.0f} MB", block, re.MULTILINE)


def write() -> None:
    """Run every block's command and put what it prints into the README."""
    text = BLOCK.sub(
        lambda block: f"<!-- output of: {block['command']} -->\n{fenced(output_of(block['command']))}<!-- end -->\n",
        README.read_text(),
    )
    README.write_text(text)


if __name__ == "__main__":
    write()
