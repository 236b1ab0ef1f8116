"""Compare the logs of all ranks of every mode: their numbers add up, and agree with each other.

The pages of docs/modes show the beginning of rank 1's log. What differs from run to run is compared only by its
position.

    WRITE_PAGE=1 python -m pytest tests/experiments/test_rank_logs.py -k page      writes them anew
"""

import io
import os
import re
from contextlib import redirect_stdout
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from distlab.cli import report
from distlab.experiments.train import by_hand
from distlab.lab.config.settings import modes
from distlab.lab.report import records
from distlab.lab.report.rank_log import MOST_LINES, MOST_WITH_CHART, WIDTH, RankLog
from distlab.lab.report.reading import write_atomically
from tests.docs.pages import README, TOP
from tests.labs import Ran, Runs
from tests.mistakes import PAGE_WORLD_SIZE as WORLD_SIZE
from tests.mistakes import page_settings

pytestmark = pytest.mark.timeout(110)
TRAINING = ("dp", "tp", "pp", "fsdp", "mesh", "cp", "moe", "compress", "precision", "server")
MODES = [*TRAINING, "comm", "elastic", "largebatch", "train"]
SUMMED = ("dp", "tp", "fsdp", "mesh", "cp", "moe", "compress", "precision")
WITH_CHART = ("pp", "mesh")
NUMBER = r"[-+]\d[\d.]*(?:e[-+]\d+)?"
EACH = rf"(?:rank \d+|me) {NUMBER}"
LINE = re.compile(rf"({EACH}(?:, {EACH})+)(?:: ({NUMBER}))?")
AT_THE_END = ("losses", "PASS")  # where a page's log ends; the rest is the same in every mode
CUT = "..."
EXPECTED = {  # texts that the log of rank 1 must contain
    "tp": ["block 1, attention: my", "of them cut"], "pp": ["on paper", "measured", "no samples: what the ranks"],
    "fsdp": ["gather unit 0 (embedding)", "were gathered at once"], "cp": ["positions", "to rank 2", "from rank 0"],
    "moe": ["my experts ", "rows to rank"], "compress": ["of it I send", "and keep for the next step"],
    "precision": ["that became 0: bf16"], "server": ["versions late on average"], "mesh": ["measured"],
    "elastic": ["from step", "my weights include"], "largebatch": ["k=1: 32 steps", "k=32: 1 step,"],
    "dp": ["begins: I go on", "my gradient of"], "comm": ["add 1", "copy 2"], "train": ["Local data:"],
}  # fmt: skip


def run_of(runs: Runs, mode: str) -> Ran:
    return runs(WORLD_SIZE, **page_settings(mode))


def lines_of(ran: Ran, rank: int) -> list[str]:
    log = RankLog()
    lines = [line for record in ran.records[rank] for line in log.lines(record)]
    return [line.text for line in [*lines, *log.verdict("pass", Path("runs/here"))]]


def text_of(ran: Ran, rank: int) -> str:
    """Return a rank's log as one line, without line breaks."""
    return " ".join(" ".join(lines_of(ran, rank)).split())


def number_lines(text: str, me: int) -> list[tuple[dict[int, str], str]]:
    """Return each line with one number per rank: the numbers by rank, and the printed sum."""
    found = []
    for match in LINE.finditer(text):
        values = dict(each.rsplit(" ", 1) for each in match[1].split(", "))
        ranks = {me if name == "me" else int(name.removeprefix("rank ")): value for name, value in values.items()}
        found.append((ranks, match[2] or ""))
    return found


def rounding_error(number: str) -> float:
    """Return the rounding error of a number with these digits."""
    digits, _, power = number.partition("e")
    return 0.5 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def test_every_mode_has_expected_lines() -> None:
    assert sorted(MODES) == sorted(EXPECTED) == sorted(modes())


@pytest.mark.parametrize("mode", SUMMED)
def test_numbers_add_up_and_agree_between_logs(mode: str, runs: Runs) -> None:
    ran = run_of(runs, mode)
    logs = [number_lines(text_of(ran, rank), rank) for rank in range(WORLD_SIZE)]
    assert all(len(log) >= 1 for log in logs), [text_of(ran, rank) for rank in range(WORLD_SIZE)]
    sums = [(ranks, total) for log in logs for ranks, total in log if total]
    assert len(sums) >= WORLD_SIZE or mode == "mesh"
    for ranks, total in sums:
        bound = sum(map(rounding_error, [*ranks.values(), total]))
        rounded = 1e-2 * max(abs(float(value)) for value in ranks.values()) if mode == "precision" else 0.0
        assert abs(sum(map(float, ranks.values())) - float(total)) <= 1.01 * bound + rounded, (ranks, total)
    assert not any("but their sum is" in text_of(ran, rank) for rank in range(WORLD_SIZE))
    for of_one, of_other in ((one, other) for one in logs for other in logs):
        for (ranks, total), (others, sum_there) in zip(of_one, of_other, strict=False):
            if total == sum_there and set(ranks) == set(others):  # after a reduce_scatter each rank prints its own part
                assert ranks == others


def messages(text: str, ends: str) -> list[tuple[int, str]]:
    """Return the ranks "to" which a log sent, or "from" which it received, each with the first number."""
    single = re.findall(rf"\b{ends} rank (\d+)(?: after [\d.]+ ms)?(?:, \w+ \w+ \d+: \[[\d, ]+\])? ({NUMBER})", text)
    several = re.findall(rf"\brows {ends} ((?:rank \d+: \d+ {NUMBER}(?:, )?)+)", text)
    rows = [each for found in several for each in re.findall(rf"rank (\d+): \d+ ({NUMBER})", found)]
    return [(int(rank), number) for rank, number in [*single, *rows]]


@pytest.mark.parametrize("mode", ["pp", "cp", "moe"])
def test_sent_numbers_equal_the_received_ones(mode: str, runs: Runs) -> None:
    ran, pairs = run_of(runs, mode), 0
    texts = [text_of(ran, rank) for rank in range(WORLD_SIZE)]
    if mode != "pp":  # ranks may print different numbers of rounds
        texts = [text.partition("; now backward")[0] for text in texts]
    for sender in range(WORLD_SIZE):
        for receiver in {rank for rank, _ in messages(texts[sender], "to")}:
            sent = [number for rank, number in messages(texts[sender], "to") if rank == receiver]
            received = [number for rank, number in messages(texts[receiver], "from") if rank == sender]
            assert sent[: len(received)] == received[: len(sent)], (sender, receiver, texts[sender], texts[receiver])
            pairs += min(len(sent), len(received))
    assert pairs >= WORLD_SIZE


def test_ring_rounds_agree_between_neighbours(runs: Runs) -> None:
    ran = run_of(runs, "comm")
    rounds = [
        re.findall(r"I send (chunk \d+, \d+) · I receive (chunk \d+, \d+)", text_of(ran, r)) for r in range(WORLD_SIZE)
    ]
    for rank in range(WORLD_SIZE):
        sent = [own for own, _ in rounds[rank]]
        assert sent == [received for _, received in rounds[(rank + 1) % WORLD_SIZE]]
        assert len(sent) == 2 * (WORLD_SIZE - 1)
        added = re.findall(r"· (\d+) \+ my (\d+) = (\d+)", text_of(ran, rank))
        assert added
        assert all(int(one) + int(own) == int(total) for one, own, total in added)


def test_sent_and_kept_parts_add_up_to_the_gradient(runs: Runs) -> None:
    ran, all_sent = run_of(runs, "compress"), list[float]()
    for rank in range(WORLD_SIZE):
        three = " ".join([f"({NUMBER})"] * 3)
        found = re.search(
            rf"my gradient of \S+ {three} of it I send the largest numbers {three} and keep for the next step {three}",
            text_of(ran, rank),
        )
        assert found is not None, text_of(ran, rank)
        numbers = list(map(float, found.groups()))
        for place in range(3):
            whole, sent, kept = numbers[place::3]
            assert abs(sent + kept - whole) <= 2e-6
        all_sent += numbers[3:6]
    assert any(all_sent), "no rank sent the printed position"


def test_logged_samples_equal_the_samplers(runs: Runs) -> None:
    mine = by_hand(0, 1, WORLD_SIZE)[:4]
    log = text_of(run_of(runs, "train"), 1)
    assert str(mine) in log
    assert str([sample * 2 for sample in mine]) in log


@pytest.mark.parametrize("mode", MODES)
def test_a_log_is_short_and_shows_its_modes_mechanism(mode: str, runs: Runs) -> None:
    ran = run_of(runs, mode)
    for rank in range(WORLD_SIZE):
        lines = lines_of(ran, rank)
        assert max(map(len, lines)) <= WIDTH == 96
        words = [re.sub(r"[-+.0-9A-Za-z]{25,}", "drawn", line) for line in lines]
        assert not any("..." in line or "…" in line for line in words)
        most = MOST_WITH_CHART if mode in WITH_CHART else MOST_LINES
        assert 5 <= len(lines) <= most, "\n".join(lines)
        assert re.fullmatch(r"PASS +\d+ of \d+ checks of mine passed · report .*", lines[-1]), lines[-1]
        if mode in TRAINING:
            sections = [line.split("  ")[0] for line in lines if not line.startswith(" ")]
            order = [
                word
                for word in ("I hold", "I get", "STEP 0 of", "I sent", "losses")
                if any(each.startswith(word) for each in sections)
            ]
            assert len(order) == 5, sections
            assert [next(n for n, each in enumerate(sections) if each.startswith(word)) for word in order] == sorted(
                next(n for n, each in enumerate(sections) if each.startswith(word)) for word in order
            )
            times = [float(line[:7]) for line in lines if re.match(r" +\d+\.\d  ", line)]
            assert all(one <= other for one, other in pairwise(times)), "not in the order of time"
    log = text_of(ran, 1)
    assert [text for text in EXPECTED[mode] if text not in log] == [], log


@pytest.mark.parametrize("mode", ["dp", "pp", "elastic"])
def test_a_log_is_printed_again_from_the_records(mode: str, runs: Runs) -> None:
    ran = run_of(runs, mode)
    with redirect_stdout(io.StringIO()) as printed:
        assert report.main([str(ran.folder), "--log", "1"]) == 0
    *lines, verdict = printed.getvalue().splitlines()
    assert lines == (ran.folder / "rank1.log").read_text().splitlines() == lines_of(ran, 1)[:-1]
    assert verdict.startswith("PASS ")


def test_a_full_log_contains_the_step(runs: Runs) -> None:
    ran = run_of(runs, "dp")
    with redirect_stdout(io.StringIO()) as printed:
        report.main([str(ran.folder), "--rank", "1", "--log", "full"])
    assert "machine" in printed.getvalue()
    assert "STEP 0 of `bucketed`" in printed.getvalue()


def test_a_missing_rank_is_refused(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(run_of(runs, "train").folder), "--log", "3"]) == 2
    assert "--rank 3 has no records here, allowed: 0, 1, 2" in capsys.readouterr().err


def test_every_rank_records_the_loss_curve(runs: Runs) -> None:
    ran = run_of(runs, "dp")
    curves = [
        [each.numbers for each in ran.records[rank] if isinstance(each, records.Losses) and each.variant == "bucketed"]
        for rank in range(WORLD_SIZE)
    ]
    assert curves[0] == curves[1] == curves[2] != []


def shape(lines: list[str]) -> list[str]:
    """Return the sections of a log, and its first lines without numbers: the printed calls of a step, and the rank that
    was waited for, differ from run to run."""
    first = [re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", line) for line in lines[:2]]
    return [*first, *(line.split("  ")[0] for line in lines if not line.startswith(" "))]


@pytest.mark.parametrize(
    ("page", "mode"), [*((TOP / "docs" / "modes" / f"{mode}.md", mode) for mode in MODES), (README, "tp")]
)
def test_a_page_shows_the_log_of_rank_1(page: Path, mode: str, runs: Runs) -> None:
    text = page.read_text()
    block = re.compile(rf"(<!-- log of: {mode} 1 -->\n\n?```text\n)(.*?)(```\n)", re.DOTALL)
    lines = lines_of(run_of(runs, mode), 1)
    if page != README:
        lines = [*takewhile(lambda line: not line.startswith(AT_THE_END), lines), CUT]
    if os.environ.get("WRITE_PAGE") and (old := block.search(text)):
        text = text[: old.start(2)] + "\n".join(lines) + "\n" + text[old.end(2) :]
        write_atomically(page, [text])
    found = block.search(text)
    assert found is not None, f"{page} has no log of {mode} 1"
    assert shape(found[2].splitlines()) == shape(lines)
