"""Summarize a run's records, in sentences and as plain data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .run_log import RunLog

_ERROR_CHARACTERS = 400


def describe_state(run: RunLog, now_s: float, *, ago: str = "before this page") -> str:
    """Describe in a sentence or two whether the run ended, stopped, failed, runs or has not begun, and what comes next.

    ``ago`` says before what.
    """
    if not run.attempts:
        if run.error:
            return f"The run failed before its first record: {_in_a_sentence(run.error)}"
        return "The run has no records yet: nothing was trained, or the first report.every steps are not done."
    last = run.attempts[-1]
    total = last.start.get("total_steps")
    of = f" of {total:,}" if isinstance(total, int) else ""
    if last.stopped_by and last.end is not None:
        resumes_at = last.end.get("resumes_at", last.last_step)
        then = "nothing is saved" if resumes_at is None else f"resumes at step {resumes_at:,}"
        sentence = f"Stopped by {last.stopped_by} after step {last.last_step:,}{of}, at {clock(last.ended_s)}; {then}."
        return f"{sentence} {_after_the_end(run)}".rstrip()
    if last.end is not None:
        sentence = f"Training ended after step {last.last_step:,}{of}, at {clock(last.ended_s)}."
        return f"{sentence} {_after_the_end(run)}".rstrip()
    if run.error:
        saves = run.of("checkpoint")
        saved = f"The last save is of step {saves[-1]['step']:,}." if saves else "Nothing was saved."
        return f"The run failed after step {last.last_step:,}{of}: {_in_a_sentence(run.error)} {saved}"
    passed = duration(max(0.0, now_s - last.ended_s))
    return (
        f"At step {last.last_step:,}{of}. No end is recorded: the run is in progress, was killed, or failed. "
        f"The last record is from {clock(last.ended_s)}, {passed} {ago}."
    )


def _after_the_end(run: RunLog) -> str:
    return f"Then came an error: {_in_a_sentence(run.error)}" if run.error else ""


def _in_a_sentence(error: str) -> str:
    """An error's lines as one, as much of them as a sentence has room for, with a full stop."""
    line = " ".join(error.split())
    line = line if len(line) <= _ERROR_CHARACTERS else f"{line[: _ERROR_CHARACTERS - 1]}…"
    return line if line.endswith((".", "!", "?", "…")) else f"{line}."


def resume_marks(run: RunLog) -> list[tuple[int, str]]:
    """Places where a later attempt resumed or a rewind began, with the changes: (step, words)."""
    found = []
    for before, after in zip(run.attempts, run.attempts[1:], strict=False):
        if after.rewind is not None:
            label = "rewound"
        elif not after.start:
            label = "went back"
        elif before.world_size == after.world_size or before.world_size is None:
            label = "resumed"
        else:
            label = f"{before.world_size}→{after.world_size} ranks"
        found.append((after.first_step, label))
    return found


def describe_rewinds(run: RunLog) -> list[str]:
    """One sentence for each time that training went back."""
    return [
        f"step {one['step']:,}: back to step {_count(one, 'to_step')}, skipping {_count(one, 'skipped_batches')} more "
        f"batches; {one.get('why', '')}"
        for one in run.of("rewind")
    ]


def summarize(run: RunLog, now_s: float) -> Mapping[str, Any]:
    """Summarize the page as plain data for programs."""
    trained, evaluated = run.of("train"), run.of("evaluate")
    return {
        "state": describe_state(run, now_s),
        "ended": bool(run.attempts) and run.attempts[-1].end is not None,
        "stopped_by": (run.attempts[-1].stopped_by if run.attempts else "") or None,
        "error": run.error or None,
        "step": run.last_step,
        "attempts": [
            {
                "began_s": attempt.began_s,
                "ended_s": attempt.ended_s,
                "world_size": attempt.world_size,
                "first_step": attempt.first_step,
                "last_step": attempt.last_step,
                "ended": attempt.end is not None,
                "stopped_by": attempt.stopped_by or None,
                "error": attempt.error or None,
                "saves": len(attempt.of("checkpoint")),
                "rewound_from": None if attempt.rewind is None else attempt.rewind["step"],
            }
            for attempt in run.attempts
        ],
        "phase_seconds": run.phase_seconds(),
        "train": trained[-1] if trained else None,
        "evaluate": evaluated[-1] if evaluated else None,
        "notes": [record.get("note") for record in run.of("note")],
        "stalls": list(run.stalls),
        "damaged_lines": run.damaged_lines,
    }


def clock(seconds: float) -> str:
    """A time since 1970, in words."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def duration(seconds: Any) -> str:
    """Seconds in two units at most; a dash for what is no number."""
    if not isinstance(seconds, (int, float)):
        return "–"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _count(record: Mapping[str, Any], name: str) -> str:
    found = record.get(name)
    return f"{found:,}" if isinstance(found, int) else "?"
