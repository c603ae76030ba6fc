"""The progress line."""

from __future__ import annotations

import io

import pytest

from penstock.trainer.report.console import ProgressLine, format_progress

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
        *("step 40/100", "epoch 1", "loss 2.5", "rate 0.0003", "5.12e+04 tokens/s"),
        *("data wait 1%", "MFU 42%", "ETA 0:01:00", "norm 0.725", "3.0 GiB"),
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
    assert [len(part) for part in terminal.getvalue().strip().split("\r")] == [39, 39]
