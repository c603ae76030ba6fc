"""Console output: the progress line, and the table of where the time went."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from .records import Value, Values

_GAP = "  "
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# Of these there is nothing to print: a note tells of the resume, and the error itself of a failure.
_UNTOLD = ("start", "resume", "failure")


class ProgressLine:
    """Progress line with the newest numbers, overwritten on a terminal, where it stays below other output.

    Elsewhere each is printed on a new line, less often.
    """

    def __init__(self, *, every_s: float, total_steps: int | None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._every_s = every_s if self._on_terminal else 20 * every_s
        self._total = total_steps
        self._next = 0.0
        self._newest: Sequence[str] = ()
        self._width = 0

    def record(self, kind: str, step: int, values: Values) -> None:
        if kind in _UNTOLD:
            return
        if kind == "train":
            self._newest = progress_parts(step, self._total, values) if self._on_terminal else ()
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + self._every_s
            if self._on_terminal:
                self._overwrite()
            else:
                self._stream.write(f"{format_progress(step, self._total, values)}\n")
        else:
            if kind == "end":
                self._newest = ()
            self._stream.write(f"{self._erased()}step {step}{_GAP}{format_event(kind, values)}\n")
            if self._newest:
                self._overwrite()
        self._stream.flush()

    def close(self) -> None:
        if self._width:
            self._stream.write("\n")
        self._stream.flush()

    def _overwrite(self) -> None:
        text = ""
        for part in self._newest:  # a line that wraps cannot be overwritten
            longer = f"{text}{_GAP}{part}" if text else part
            if len(longer) >= shutil.get_terminal_size().columns:
                break
            text = longer
        self._stream.write(f"\r{text.ljust(self._width)}")
        self._width = len(text)

    def _erased(self) -> str:
        """Characters that erase the progress line."""
        width, self._width = self._width, 0
        return f"\r{' ' * width}\r" if width else ""


def format_progress(step: int, total_steps: int | None, values: Values) -> str:
    """Format the progress line: step, epoch, loss, learning rate, speed, share of time waiting for data, time left.

    MFU, the gradients' norm and memory of the device follow where they are measured.
    """
    return _GAP.join(progress_parts(step, total_steps, values))


def progress_parts(step: int, total_steps: int | None, values: Values) -> list[str]:
    """The parts of that line, those first that are wanted most."""
    of = f"/{total_steps}" if total_steps else ""
    parts = [f"step {step}{of}", f"epoch {values.get('epoch')}", f"loss {_short(values.get('loss'))}"]
    tokens = values.get("tokens_per_s")
    is_of_samples = tokens is None
    speed = values.get("samples_per_s") if is_of_samples else tokens
    parts.append(f"{format_rate(speed)} {'samples' if is_of_samples else 'tokens'}/s")
    eta = values.get("eta_s")
    if isinstance(eta, (int, float)):
        parts.append(f"ETA {int(eta) // 3600}:{int(eta) // 60 % 60:02d}:{int(eta) % 60:02d}")
    for name, label in (("data_wait_share", "data wait"), ("mfu", "MFU")):
        share = values.get(name)
        if isinstance(share, (int, float)):
            parts.append(f"{label} {share:.0%}")
    parts.append(f"learning rate {_short(values.get('rate'), digits=3)}")
    norm, memory = values.get("gradient_norm"), values.get("device_memory_peak_bytes")
    if isinstance(norm, (int, float)):
        parts.append(f"gradient norm {norm:.3g}")
    if isinstance(memory, (int, float)):
        parts.append(f"device memory {memory / 2**30:.1f} GiB")
    return parts


def format_event(kind: str, values: Values) -> str:
    """Describe an event after a step in words."""
    seconds = values.get("seconds")
    took = f"{seconds:.3g} s" if isinstance(seconds, float) else ""
    if kind == "note":
        return str(values.get("note"))
    if kind == "evaluate":
        metrics = [f"{name} {_short(value)}" for name, value in values.items() if name != "seconds"]
        return _GAP.join([f"evaluated{f' in {took}' if took else ''}:", *metrics])
    if kind == "checkpoint":
        how = "saving in the background" if values.get("state") == "being written" else "saved"
        return f"{how}; training waited {took}" if took else how
    if kind == "rewind":
        return f"back to step {values.get('to_step')}: {values.get('why')}"
    if kind == "end":
        return _format_end(values, took)
    return _GAP.join([f"{kind}:", *(f"{name} {_short(value)}" for name, value in values.items())])


def _format_end(values: Values, took: str) -> str:
    stopped_by, resumes_at = values.get("stopped_by"), values.get("resumes_at")
    if stopped_by:
        if resumes_at is None:
            return f"stopped by {stopped_by}; nothing is saved, because checkpoint.every_steps=0"
        return f"stopped by {stopped_by}: a new start resumes at step {resumes_at}"
    return f"training ended{f' after {took}' if took else ''}: loss {_short(values.get('loss'))}"


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


def format_rate(value: Value) -> str:
    """Three digits and a unit, so that a number that is overwritten keeps its width: 930, 15.0k, 1.25M."""
    if not isinstance(value, (int, float)):
        return str(value)
    size, unit = next(((size, unit) for size, unit in _UNITS if abs(value) >= 0.9995 * size), (1.0, ""))
    return f"{value / size:#.3g}".rstrip(".") + unit


def _short(value: Value, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
