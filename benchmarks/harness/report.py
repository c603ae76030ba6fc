"""Results for people: a table of contenders."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..contenders import OURS
from .ratios import ratio_to


def format_duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _resume(summary: Mapping[str, Any]) -> str:
    if "resume_ratio" not in summary:
        return "–"
    return f"{format_duration(summary['resumed_first_batch_s'])} ({summary['resume_ratio']:.2f}x)"


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("samples/s", lambda s: f"{s['samples_per_s']:,.0f}"),
    ("MiB/s", lambda s: f"{s['mb_per_s'] * 1e6 / (1 << 20):,.1f}"),
    ("first batch", lambda s: format_duration(s["first_batch_s"])),
    ("first batch after a resume", _resume),
    ("wait per batch, p50", lambda s: format_duration(s["wait_p50_ms"] / 1000)),
    ("wait per batch, p99", lambda s: format_duration(s["wait_p99_ms"] / 1000)),
    ("time spent waiting", lambda s: f"{s['wait_share']:.0%}"),
    ("CPU per sample", lambda s: f"{s['cpu_us_per_sample']:,.1f} us"),
    ("peak memory", lambda s: f"{s['peak_bytes'] / 2**20:,.0f} MiB" if s["peak_bytes"] else "–"),
    ("bounded by", lambda s: s.get("bottleneck", "–")),
)


def print_result(result: Mapping[str, Any], screen: Console) -> None:
    """Print the data, the machine and a column for each contender; then which contenders were not measured, and why."""
    data, machine, summary = result["data"], result["machine"], result["summary"]
    fields = ", ".join(data["fields"])
    settings = result["settings"]
    shards, rounds = data["shards"], settings["rounds"]
    size = f"{data['bytes'] / (1 << 20):,.1f} MiB in {shards:,} {data['format']} {'shard' if shards == 1 else 'shards'}"
    screen.print(Text(data["url"], style="bold"), soft_wrap=True)
    _print_wrapped(screen, f"{data['samples']:,} samples, {size}; {fields}")
    _print_wrapped(
        screen,
        f"batches of {settings['batch_size']}, decode {settings['decode']}; {machine['cores']} cores of "
        f"{machine['cpu']}; " + ("one round" if rounds == 1 else f"medians of {rounds} rounds"),
    )
    rows = list(_ROWS)
    if len(summary) > 1:
        rows.append(("penstock is faster by", lambda each: _ratio(summary, each)))
        if rounds > 1:
            rows.append(("  by rounds", _spread))
    screen.print()
    columns = [(name, [show(each) for _, show in rows]) for name, each in summary.items()]
    _print_columns(screen, [label for label, _ in rows], columns)
    for name, reason in result["refused"].items():
        screen.print()
        _print_wrapped(screen, f"{name} was not measured: {reason}")


def _print_wrapped(screen: Console, text: str) -> None:
    for line in text.splitlines():
        for part in textwrap.wrap(line, max(40, screen.width), break_long_words=False, break_on_hyphens=False):
            screen.print(Text(part), soft_wrap=True)


def _print_columns(screen: Console, labels: list[str], columns: list[tuple[str, list[str]]]) -> None:
    """A column a contender; those that do not fit into the terminal follow below."""
    start = max(map(len, labels)) + 2
    while columns:
        used, count = start, 0
        for name, cells in columns:
            used += max(map(len, (name, *cells))) + 2
            count += used - 2 <= screen.width or count == 0
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("", style="cyan", no_wrap=True)
        for name, _ in columns[:count]:
            table.add_column(name, justify="right", no_wrap=True)
        for row, label in enumerate(labels):
            table.add_row(label, *(cells[row] for _, cells in columns[:count]))
        screen.print(table, crop=False)
        columns = columns[count:]
        if columns:
            screen.print()


def _ratio(summary: Mapping[str, Any], each: Mapping[str, Any]) -> str:
    name = next(name for name, other in summary.items() if other is each)
    return "" if name == OURS else f"{ratio_to(summary, name):.2f}x"


def _spread(summary: Mapping[str, Any]) -> str:
    return f"{min(summary['ratios']):.2f} to {max(summary['ratios']):.2f}x" if "ratios" in summary else ""
