"""``penstock inspect``: show the format, fields and sizes of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table
from rich.text import Text

from ..loader.tools.inspect import Inspection, Spread, draw_bars, inspect_dataset
from .common import SourceArguments, console, fact_table, format_bytes, parse, print_json
from .sample import show_sample


@dataclass(frozen=True, kw_only=True)
class InspectArguments(SourceArguments):
    """Show the format, fields and sizes of a data set, and its first sample; or one sample, by id or key.

    A sample's id is its ordinal, as in batch["__id__"] and in errors; one chunk is read for it. By key, the data set is
    read from its beginning until the key is found.

    example:  penstock inspect s3://bucket/train/

    example:  penstock inspect s3://bucket/train/ --sample 1234567

    example:  penstock inspect clicks/ --key 4711 --field user
    """

    chunks: int = 16
    """Chunks to read for sample sizes, spread over the data set."""

    sample: Annotated[int | None, tyro.conf.arg(metavar="ID", help_behavior_hint="")] = None
    """Show the sample with this id; -1 is the last."""

    key: Annotated[str | None, tyro.conf.arg(metavar="KEY", help_behavior_hint="")] = None
    """Show the first sample with this key."""

    field: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Field in which to search for --key; for all formats but tar, whose samples have keys."""


def run(arguments: Sequence[str]) -> int:
    given = parse(InspectArguments, "inspect", arguments)
    if given.sample is not None or given.key is not None or given.field is not None:
        return show_sample(given, sample=given.sample, key=given.key, field=given.field)
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
