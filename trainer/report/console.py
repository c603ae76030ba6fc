"""What a person sees in the terminal: the progress line, and the table of where the time went."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from .records import Values


class ProgressLine:
    """The newest numbers on one line, overwritten on a terminal; elsewhere each time on a new line."""

    def __init__(self, *, every_s: float, total_steps: int | None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._every_s = every_s if self._on_terminal else 20 * every_s
        self._total = total_steps
        self._next = 0.0
        self._width = 0

    def record(self, kind: str, step: int, values: Values) -> None:
        if kind in ("start", "resume"):
            return  # a note tells of the resume
        if kind == "train":
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + self._every_s
            self._write(format_progress(step, self._total, values), over=self._on_terminal)
        else:
            text = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
            self._write(f"step {step}  {kind}: {text}", over=False)

    def close(self) -> None:
        if self._width:
            self._stream.write("\n")
        self._stream.flush()

    def _write(self, text: str, *, over: bool) -> None:
        if over:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be overwritten
        padded = text.ljust(self._width)
        self._stream.write(f"\r{padded}" if over else f"{chr(13) if self._width else ''}{padded}\n")
        self._stream.flush()
        self._width = len(text) if over else 0


def format_progress(step: int, total_steps: int | None, values: Values) -> str:
    """The progress line: step, epoch, loss, rate, speed, the share of time spent waiting for data, time left; and
    what else is measured: MFU, the gradients' norm, memory of the device.
    """
    of = f"/{total_steps}" if total_steps else ""
    parts = [f"step {step}{of}", f"epoch {values.get('epoch')}", f"loss {_short(values.get('loss'))}"]
    parts.append(f"rate {_short(values.get('rate'))}")
    tokens = values.get("tokens_per_s")
    parts.append(f"{_short(values.get('samples_per_s'))} samples/s" if tokens is None else f"{_short(tokens)} tokens/s")
    for name, label in (("data_wait_share", "data wait"), ("mfu", "MFU")):
        share = values.get(name)
        if isinstance(share, (int, float)):
            parts.append(f"{label} {share:.0%}")
    eta = values.get("eta_s")
    if isinstance(eta, (int, float)):
        parts.append(f"ETA {int(eta) // 3600}:{int(eta) // 60 % 60:02d}:{int(eta) % 60:02d}")
    norm, memory = values.get("gradient_norm"), values.get("device_memory_peak_bytes")
    if isinstance(norm, (int, float)):
        parts.append(f"norm {norm:.3g}")
    if isinstance(memory, (int, float)):
        parts.append(f"{memory / 2**30:.1f} GiB")
    return "  ".join(parts)


def format_times(seconds: Mapping[str, float], total_s: float) -> str:
    """A table of phases, longest first; what no phase covers is "other"."""
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    rows.append(("other", max(0.0, total_s - sum(seconds.values()))))
    lines = ["where the time went (rank 0)", f"{'phase':<18}{'seconds':>10}{'share':>8}"]
    lines += [f"{name:<18}{spent:>10.2f}{spent / max(total_s, 1e-9):>8.1%}" for name, spent in rows]
    lines.append(f"{'all':<18}{total_s:>10.2f}{1:>8.1%}")
    return "\n".join(lines)


def print_times(seconds: Mapping[str, float], total_s: float) -> None:
    """Print that table, if there is room: a run that is done has not failed because its output cannot be written."""
    with suppress(OSError):
        print(format_times(seconds, total_s), flush=True)


def _short(value: float | int | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
