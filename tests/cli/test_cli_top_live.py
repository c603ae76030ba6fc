"""``penstock top`` on a terminal: it waits for a run, q ends it, and the terminal is left as it was found."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from written_statuses import write

PATIENCE_S = 120.0
pytestmark = pytest.mark.slow


class Shown:
    """A command on a terminal of its own."""

    def __init__(self, arguments: list[str], folder: Path, *, reads_keys: bool = True) -> None:
        self._own, self.terminal = pty.openpty()
        self.before = termios.tcgetattr(self.terminal)
        self.text = ""
        command = [sys.executable, "-m", "penstock.cli", *arguments]
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command] if reads_keys else command,
            cwd=folder,
            stdin=self.terminal if reads_keys else subprocess.DEVNULL,
            stdout=self.terminal,
            stderr=self.terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in self.text:
            assert time.monotonic() < deadline_s, self.text
            self._read(0.1)

    def press(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def end(self) -> int:
        """The exit code."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, self.text
            self._read(0.1)
        self._read(0.0)
        return int(self.process.returncode)

    def _read(self, seconds: float) -> None:
        while select.select([self._own], [], [], seconds)[0]:
            self.text += os.read(self._own, 1 << 16).decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._own)
        os.close(self.terminal)


@contextmanager
def shown(folder: Path, **options: Any) -> Iterator[Shown]:
    found = Shown(["top", "run"], folder, **options)
    try:
        yield found
    finally:
        found.close()


def is_as_before(view: Shown) -> bool:
    return termios.tcgetattr(view.terminal) == view.before and view.text.rindex("\x1b[?25h") > view.text.rindex(
        "\x1b[?25l"
    )


def test_top_waits_for_a_run_to_begin_and_shows_it_until_its_training_ends(tmp_path: Path) -> None:
    with shown(tmp_path) as view:
        view.wait_for("run: waiting for a run to begin there. q or Ctrl-C ends the wait.")
        (tmp_path / "run").mkdir()  # as data that is packed there makes it
        (tmp_path / "run" / "data").mkdir()
        write(tmp_path / "run", 0, 1)
        view.wait_for("step 120 of 500")
        view.wait_for("q or Ctrl-C ends this view, not the run.")
        write(tmp_path / "run", 0, 1, state="failed", error="ValueError: no label")
        view.wait_for("If it starts again, it is shown here.")
        write(tmp_path / "run", 0, 1, state="ended", step=500)
        assert view.end() == 0
        assert is_as_before(view)


@pytest.mark.parametrize(
    ("ending", "code"),
    [("q", 0), ("Q", 0), ("\x03", 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_keys_and_signals_end_top_and_leave_the_terminal_as_it_was(
    tmp_path: Path, ending: str | signal.Signals, code: int
) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", 0, 1)
    with shown(tmp_path) as view:
        view.wait_for("ends this view")
        assert termios.tcgetattr(view.terminal) != view.before  # keys come at once
        if isinstance(ending, str):
            view.press(ending)
        else:
            view.process.send_signal(ending)
        assert view.end() == code
        assert is_as_before(view)


def test_without_a_terminal_to_read_keys_from_top_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", 0, 1)
    with shown(tmp_path, reads_keys=False) as view:
        view.wait_for("step 120 of 500")
        assert termios.tcgetattr(view.terminal) == view.before
        write(tmp_path / "run", 0, 1, state="ended", step=500)
        assert view.end() == 0
