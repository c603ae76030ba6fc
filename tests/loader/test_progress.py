"""A bar is drawn on a terminal alone, after two seconds, around what is printed there."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest

from penstock.loader import progress
from penstock.loader.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def make_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Makes standard error one; called in the test, as pytest sets the stream anew before it."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)

    def make() -> Terminal:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        return terminal

    return make


@pytest.mark.parametrize(
    ("unit", "total", "shown"), [("samples", 1200, ["300/1200", "samples 25%"]), ("B", 1200, ["/1.2 KiB"])]
)
def test_a_bar_tells_what_is_done_and_is_wiped_out(
    make_terminal: Callable[[], Terminal], capsys: pytest.CaptureFixture[str], unit: str, total: int, shown: list[str]
) -> None:
    terminal = make_terminal()
    with show_progress("packing", total, unit=unit) as advance:
        advance(300)
        deadline_s = time.monotonic() + 60
        while not all(text in terminal.getvalue() for text in shown) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        print("a line of the user's")
    drawn = terminal.getvalue()
    assert all(text in drawn for text in shown), drawn
    assert drawn.endswith("\x1b[2K")
    assert capsys.readouterr().out == "a line of the user's\n"  # not a terminal's, and left alone


def test_short_work_draws_nothing(make_terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = make_terminal()
    monkeypatch.setattr(progress, "PATIENCE_S", 1000.0)
    with show_progress("packing", 10, unit="samples") as advance:
        advance(10)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_nothing_is_drawn_into_a_file_or_by_another_rank_of_the_node(
    monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(sys, "stderr", Terminal() if rank == "1" else io.StringIO())
    with show_progress("packing", 10, unit="samples") as advance:
        advance(10)
        time.sleep(0.05)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
