"""benchmarks/RESULTS.md has the targets and choices of this code, and docs/performance.md shows its figures."""

import re

from benchmarks import collectives, compress, cp, ledgers, link, pp, steps
from benchmarks.rounds import judge
from distlab.techniques.collectives.by_hand import pick
from tests.docs.pages import TOP, page
from tests.documents import tables

PAGE = (TOP / "benchmarks" / "RESULTS.md").read_text()

BENCHED = re.compile(
    r"^(?P<op>all_\w+|reduce_scatter) +(?P<size>\d+) (?P<unit>[KM])iB +(?P<picked>\w+) +[\d.]+ +(?P<target>[\d.]+)x +"
    r"(?P<met>yes|NO) +[\d.]+x +(?P<auto>[\d.]+)x",
    re.MULTILINE,
)


def test_the_table_of_speeds_has_todays_targets() -> None:
    rows = list(BENCHED.finditer(PAGE))
    assert len(rows) == len(collectives.TARGETS) * len(collectives.PLANS)
    for row in rows:
        nbytes = int(row["size"]) * {"K": collectives.KIB, "M": collectives.MIB}[row["unit"]]
        target = collectives.TARGETS[row["op"]].get(nbytes, collectives.FLOOR)
        assert float(row["target"]) == target
        assert row["picked"] == pick(row["op"], nbytes, 4)
        assert (row["met"] == "yes") == (float(row["auto"]) >= target)


CLAIMED = re.compile(r"^(?P<what>[\w': ]+?) +(?P<ratio>[\d.]+) +(?P<limit>[\d.]+) +(?P<met>yes|NO)$", re.MULTILINE)


def test_the_results_of_pipelines_have_todays_targets() -> None:
    rows = {row["what"]: row for row in CLAIMED.finditer(PAGE)}
    limits = [float(row["limit"]) for row in rows.values()]
    assert limits == [*pp.TIMES.values(), *[pp.BUBBLE_TARGET] * 5, pp.ACTIVATIONS_TARGET]
    assert all((row["met"] == "yes") == (float(row["ratio"]) <= float(row["limit"])) for row in rows.values())


STEPPED = re.compile(
    r"^(?P<mode>dp|fsdp|tp|mesh) +(?P<ranks>\d) +(?P<row>\w+) +[\d.]+ +(?P<wall>[\d.]+)x \(\S+\) +(?P<cpu>[\d.]+)x \(\S+\)"
    r" +(?P<limits>[\d.]+x(?: and [\d.]+x)?|-) +(?P<met>yes|NO|-)$",
    re.MULTILINE,
)


def test_the_results_of_steps_have_todays_targets() -> None:
    rows = {(row["mode"], int(row["ranks"]), row["row"]): row for row in STEPPED.finditer(PAGE)}
    compared = [each for name in ("dp", "fsdp", "tp", "mesh") for each in steps.COMPARISONS[name]]
    assert set(rows) == {(each.mode, num, row) for each in compared for num in each.ranks for row in each.variants}
    for each in compared:
        for num, row in ((num, row) for num in each.ranks for row in each.variants):
            found = rows[each.mode, num, row]
            ratios = float(found["wall"]), float(found["cpu"])
            assert [found["limits"], found["met"]] == judge(ratios, each.targets.get((num, row), ()))


LEDGERS = re.compile(
    r"^(?P<mode>fsdp|mesh) +\d +(?P<what>peak|wire) of (?P<one>\w+) over (?P<other>\w+) .* (?P<ratio>[\d.]+)x +(?P<limit>[\d.]+)x"
    r" +(?P<met>yes|NO)$",
    re.MULTILINE,
)


def test_the_results_of_bytes_have_todays_targets() -> None:
    rows = list(LEDGERS.finditer(PAGE))
    assert len(rows) == 2 * len(ledgers.TARGETS["fsdp"]) + len(ledgers.TARGETS["mesh"])
    limits = {
        (mode, what, one, other): limit
        for mode in ledgers.TARGETS
        for what, _, one, other, limit in ledgers.TARGETS[mode]
    }
    for row in rows:
        limit = limits[row["mode"], row["what"], row["one"], row["other"]]
        assert [row["limit"] + "x", row["met"]] == judge([float(row["ratio"])], [limit])


ATTENDED = re.compile(
    r"^(?P<name>zigzag|ulysses) .*?x \(\S+\) +(?P<cpu>[\d.]+)x \(\S+\) +(?P<limit>[\d.]+)x CPU +(?P<met>yes|NO)$",
    re.MULTILINE,
)


def test_the_results_of_long_sequences_have_todays_targets() -> None:
    rows = {row["name"]: row for row in ATTENDED.finditer(PAGE)}
    assert {name: float(row["limit"]) for name, row in rows.items()} == {
        name: limit for name, (limit,) in cp.CPU_TARGETS.items()
    }
    assert all((row["met"] == "yes") == (float(row["cpu"]) <= float(row["limit"])) for row in rows.values())


LINKED = re.compile(
    r"^(?P<rate>\d+[mg]bit) +[\d.]+ Mbit/s \((?P<off>[-+][\d.]+)%\) +within 6% +(?P<met>yes|NO)$", re.MULTILINE
)
COMPRESSED = re.compile(
    r"^(?P<name>\w+) +\d+ +(?P<ratio>[\d.]+)x +(?P<limit>[\d.]+x|-) +(?P<met>yes|NO|-) +(?P<off>[-+][\d.]+%)"
    r" +2% +(?P<wire>yes|NO)$",
    re.MULTILINE,
)
BUCKETS = re.compile(
    r"^bucketed with its best bucket, .*: (?P<ratio>[\d.]+)x, target (?P<limit>[\d.]+)x, held (?P<met>yes|NO);",
    re.MULTILINE,
)


def test_the_results_of_slow_links_have_todays_targets() -> None:
    rates = list(LINKED.finditer(PAGE))
    assert tuple(row["rate"] for row in rates) == link.RATES
    assert all((row["met"] == "yes") == (abs(float(row["off"])) <= 100 * link.RATE_TARGET) for row in rates)
    (buckets,) = BUCKETS.finditer(PAGE)
    assert float(buckets["limit"]) == link.DP_TARGET
    assert (buckets["met"] == "yes") == (float(buckets["ratio"]) <= link.DP_TARGET)
    rows = {row["name"]: row for row in COMPRESSED.finditer(PAGE)}
    assert tuple(rows) == compress.VARIANTS
    for name, row in rows.items():
        assert [row["limit"], row["met"]] == judge([float(row["ratio"])], compress.TARGETS.get(name, ()))
        assert (row["wire"] == "yes") == (abs(float(row["off"][:-1])) <= 100 * compress.WIRE_TARGET)


SHOWN = {
    suffix: [row for heading, row in tables(page("performance")) if heading == wanted]
    for suffix, wanted in (("", "Speed"), (" over tcp", "What does a small message cost?"))
}


def printed(mode: str, ranks: str, variant: str, time: str, target: str = "") -> bool:
    """Return whether the results have this time and target for a variant."""
    line = rf"^{mode} +{ranks} +{variant} +[\d.]+ +{re.escape(time)} \(\S+\) +\S+(?: \(\S+\))? +{re.escape(target)}"
    return bool(re.search(line, PAGE, re.MULTILINE))


def test_the_page_shows_the_printed_results() -> None:
    assert [len(rows) for rows in SHOWN.values()] == [9, 7]
    for suffix, rows in SHOWN.items():
        for mode, ranks, variant, _, time, target, last in rows:
            assert printed(mode, ranks, variant + suffix, time, target), (mode, ranks, variant)
            assert not suffix or printed(mode, ranks, f"{variant} over gloo", last), (mode, ranks, variant)
    assert not printed("dp", "2", "bucketed", "0.92x", "1.00x")
    assert not printed("dp", "2", "bucketed", "0.93x", "0.90x")
