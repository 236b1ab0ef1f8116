"""What a terminal shows: one line of progress that is rewritten, and colours; a pipe gets neither."""

import io

import pytest

from distlab.lab.report.terminal import CLEAR, GREEN, PLAIN, RED, Screen

LINES = [
    "rank 0 | working    ring (1 of 9 steps), 1 s",
    "rank 0 | working    ring (2 of 9 steps), 2 s",
    "rank 0 | PASS       9",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(screen: Screen, lines: list[str] = LINES) -> str:
    return "".join(map(screen.shown, lines))


def test_a_terminal_has_one_line_of_progress_and_the_verdict_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = f"{LINES[0]}{CLEAR}{LINES[1]}{CLEAR}rank 0 | {GREEN}PASS{PLAIN}       9\n"
    assert shown(Screen(Terminal(), {})) == output


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"NO_COLOR": "1", "TERM": "xterm"}])
def test_no_color_turns_colours_off(environ: dict[str, str]) -> None:
    output = shown(Screen(Terminal(), environ))
    assert output.count(CLEAR) == 2 and GREEN not in output and output.endswith("rank 0 | PASS       9\n")


@pytest.mark.parametrize(("stream", "environ"), [(io.StringIO(), {}), (Terminal(), {"TERM": "dumb"})])
def test_a_pipe_and_a_dumb_terminal_have_no_control_characters(stream: io.StringIO, environ: dict[str, str]) -> None:
    assert shown(Screen(stream, environ)) == "".join(f"{line}\n" for line in LINES)


def test_a_line_of_progress_is_never_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert len(Screen(Terminal(), {}).shown(LINES[0])) == 19


@pytest.mark.parametrize(
    ("text", "colour"),
    [
        ("naive  8.9e-16  passed", GREEN), ("naive  8.9e-16  FAILED", RED), ("FAIL       1 of 9", RED),
        ("error      rank 2 ended", RED), ("report     runs/x", ""), ("a word that passed by", ""),
    ],
)  # fmt: skip
def test_colours_are_for_what_judges(text: str, colour: str) -> None:
    output = Screen(Terminal(), {}).shown(text)
    assert (colour in output and PLAIN in output) if colour else output == f"{text}\n"
