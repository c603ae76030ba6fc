"""The progress line."""

from __future__ import annotations

import io

import pytest

from penstock.trainer.report.console import ProgressLine, format_progress, format_rate
from penstock.trainer.report.records import Values

VALUES = {
    "epoch": 1,
    "loss": 2.5,
    "rate": 3e-4,
    "samples_per_s": 100.0,
    "tokens_per_s": 51200.0,
    "data_wait_share": 0.01,
    "mfu": 0.415,
    "gradient_norm": 0.7251,
    "device_memory_peak_bytes": 3 * 2**30,
    "eta_s": 60.0,
}


def test_what_is_measured_is_in_the_progress_line() -> None:
    assert format_progress(40, 100, VALUES).split("  ") == [
        *("step 40/100", "epoch 1", "loss 2.5", "51.2k tokens/s", "ETA 0:01:00", "data wait 1%", "MFU 42%"),
        *("learning rate 0.0003", "gradient norm 0.725", "device memory 3.0 GiB"),
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_never_wraps_on_a_terminal_where_it_could_not_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    line = ProgressLine(every_s=0.0, total_steps=100, stream=terminal)
    line.record("train", 40, VALUES)
    line.record("train", 41, VALUES)
    line.close()
    shown = "epoch 1  loss 2.5"  # what is wanted most, and no part of a word
    assert terminal.getvalue().strip().split("\r") == [f"step 40/100  {shown}", f"step 41/100  {shown}"]


def screen_of(written: str) -> list[str]:
    """The lines that a terminal shows of it."""
    lines = []
    for text in written.split("\n"):
        line = ""
        for piece in text.split("\r"):
            line = piece + line[len(piece) :]
        lines.append(line.rstrip())
    return lines


def test_the_progress_line_is_back_at_once_after_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    line = ProgressLine(every_s=60.0, total_steps=100, stream=terminal)
    line.record("train", 40, VALUES)
    line.record("checkpoint", 40, {"state": "being written", "seconds": 0.01593})
    line.record("train", 50, VALUES)  # too soon to be drawn by itself
    line.record("note", 50, {"note": "stopping after this step: SIGINT"})
    lines = screen_of(terminal.getvalue())
    assert lines[0] == "step 40  saving in the background; training waited 0.0159 s"
    assert lines[1] == "step 50  stopping after this step: SIGINT"
    assert lines[2].startswith("step 50/100  epoch 1  loss 2.5  51.2k tokens/s")
    line.record("end", 50, {"loss": 2.5, "seconds": 9.0, "stopped_by": "SIGINT", "resumes_at": 50})
    line.close()
    assert screen_of(terminal.getvalue())[2:] == ["step 50  stopped by SIGINT: a new start resumes at step 50", ""]


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("evaluate", {"accuracy": 0.75, "seconds": 0.25}, "evaluated in 0.25 s:  accuracy 0.75"),
        ("checkpoint", {"state": "written", "seconds": 1.5}, "saved; training waited 1.5 s"),
        ("rewind", {"to_step": 6, "why": "step 8: the loss 9 is above 4"}, "back to step 6: step 8: the loss 9 is ab"),
        ("end", {"loss": 0.5, "seconds": 19.125}, "training ended after 19.1 s: loss 0.5"),
        ("end", {"loss": 0.5, "stopped_by": "SIGTERM", "resumes_at": None}, "stopped by SIGTERM; nothing is saved"),
    ],
)
def test_events_are_told_in_words(kind: str, values: Values, text: str) -> None:
    stream = io.StringIO()
    line = ProgressLine(every_s=0.0, total_steps=100, stream=stream)
    line.record(kind, 8, values)
    assert stream.getvalue().startswith(f"step 8  {text}")


@pytest.mark.parametrize(
    ("value", "text"),
    [(930.4, "930"), (14970.0, "15.0k"), (999.7, "1.00k"), (1.25e6, "1.25M"), (0.0321, "0.0321"), (None, "None")],
)
def test_rates_have_three_digits_and_a_unit(value: float | None, text: str) -> None:
    assert format_rate(value) == text
