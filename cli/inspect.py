"""``penstock inspect``: show the format, fields and sizes of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ..loader.tools.inspect import Inspection, Spread, draw_bars, inspect_dataset
from .common import SourceArguments, console, fact_table, format_bytes, parse, print_json


@dataclass(frozen=True, kw_only=True)
class InspectArguments(SourceArguments):
    """Show the format, fields and sizes of a data set, and its first sample.

    example:  penstock inspect s3://bucket/train/
    """

    chunks: int = 16
    """Chunks to read for sample sizes, spread over the data set."""


def run(arguments: Sequence[str]) -> int:
    given = parse(InspectArguments, "inspect", arguments)
    seen = inspect_dataset(
        given.chosen_source(),
        split=given.chosen_split(),
        storage_options=given.options(),
        format=given.chosen_format(),
        chunks=given.chunks,
    )
    if given.json:
        print_json(seen)
    else:
        _report(seen)
    return 0


def _report(seen: Inspection) -> None:
    screen = console()
    facts = fact_table()
    config = ", ".join(f"{name}={value}" for name, value in seen.config.items())
    facts.add_row("data set", seen.url)
    facts.add_row("format", f"{seen.format}" + (f" ({config})" if config else ""))
    facts.add_row("samples", f"{seen.samples:,}")
    facts.add_row("bytes", f"{format_bytes(seen.bytes)} in {seen.shards:,} shards, read in {seen.chunks:,} chunks")
    facts.add_row("checksums", "yes" if seen.checksums else "no")
    facts.add_row("fingerprint", seen.fingerprint)
    screen.print(facts)

    spreads = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    spreads.add_column("", style="cyan")
    for name in ("smallest", "median", "mean", "largest"):
        spreads.add_column(name, justify="right")
    spreads.add_row("bytes per shard", *_sizes(seen.shard_sizes))
    spreads.add_row("bytes per chunk", *_sizes(seen.chunk_sizes))
    spreads.add_row("bytes per sample", *_sizes(seen.sample_sizes))
    counts = seen.shard_samples
    numbers = (counts.low, counts.median, counts.mean, counts.high)
    spreads.add_row("samples per shard", *(f"{number:,.0f}" for number in numbers))
    screen.print()
    screen.print(spreads)

    low, high = format_bytes(seen.sample_sizes.low), format_bytes(seen.sample_sizes.high)
    screen.print()
    if len(seen.histogram) == 1:
        screen.print(_heading("sample sizes"), f" all {seen.sizes_of:,} samples read have {low}")
    else:
        screen.print(_heading("sample sizes"), f" {seen.sizes_of:,} samples read; logarithmic scale")
        screen.print(f"  {low} │{draw_bars(seen.histogram)}│ {high}")

    fields = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    fields.add_column("field", style="cyan", no_wrap=True)
    fields.add_column("type", no_wrap=True)
    fields.add_column("value", overflow="fold", ratio=1)
    for field in seen.fields:
        fields.add_row(Text(field.name), Text(field.kind), Text(field.value))
    screen.print()
    screen.print(_heading("first sample"))
    screen.print(fields)


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _sizes(spread: Spread) -> tuple[str, ...]:
    return tuple(format_bytes(size) for size in (spread.low, spread.median, spread.mean, spread.high))
