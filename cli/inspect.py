"""``penstock inspect``: show the format, fields and sizes of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..loader.views.one_sample import SampleInspection, inspect_sample
from ..tools.inspect import Inspection, Spread, Thumbnail, draw_bars, inspect_dataset
from .common import SourceArguments, parse, print_json
from .screen import (
    Screen,
    console,
    fact_table,
    format_bytes,
    format_count,
    heading,
    name_classes,
    print_columns,
    shown,
    wrapped,
)

_PICTURES = 3


@dataclass(frozen=True, kw_only=True)
class InspectArguments(SourceArguments):
    """Show the format, fields and sizes of a data set, and its first samples; or one sample, by id or key.

    Sizes of samples are those of their values, as they are once a chunk is opened. "in a batch" is what a loader makes
    of a field by default, as the first chunk has it: a tensor with its type and shape, or a list. In a terminal with
    colours the first images are drawn.

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
        return _show_sample(given, sample=given.sample, key=given.key, field=given.field)
    screen = console()
    seen = inspect_dataset(
        given.chosen_source(),
        split=given.chosen_split(),
        storage_options=given.options(),
        format=given.chosen_format(),
        chunks=given.chunks,
        thumbnails=_PICTURES if not given.json and can_draw(screen) else 0,
    )
    if given.json:
        print_json(seen)
    else:
        _report(seen, screen)
    return 0


def _report(seen: Inspection, screen: Screen) -> None:
    facts = fact_table()
    config = ", ".join(f"{name}={value}" for name, value in seen.config.items())
    shards, chunks = format_count(seen.shards, "shard"), format_count(seen.chunks, "chunk")
    facts.add_row("data set", seen.url)
    facts.add_row("format", f"{seen.format}" + (f" ({config})" if config else ""))
    facts.add_row("samples", f"{seen.samples:,}")
    facts.add_row("bytes", f"{format_bytes(seen.bytes)} in {shards}, read in {chunks}")
    if seen.classes:
        facts.add_row("classes", name_classes(seen.classes))
    facts.add_row("checksums", "yes" if seen.checksums else "no")
    facts.add_row("fingerprint", seen.fingerprint)
    screen.print(facts)

    counts = seen.shard_samples
    numbers = (counts.low, counts.median, counts.mean, counts.high)
    columns = zip(
        ("smallest", "median", "mean", "largest"),
        _sizes(seen.shard_sizes),
        _sizes(seen.chunk_sizes),
        _sizes(seen.sample_sizes),
        (f"{number:,.0f}" for number in numbers),
        strict=True,
    )
    labels = ["", "bytes per shard", "bytes per chunk", "bytes per sample", "samples per shard"]
    screen.print()
    print_columns(screen, labels, [list(column) for column in columns])

    low, high = format_bytes(seen.sample_sizes.low), format_bytes(seen.sample_sizes.high)
    read = "all samples" if seen.sizes_of == seen.samples else f"{seen.sizes_of:,} of {seen.samples:,} samples"
    screen.print()
    if len(seen.histogram) == 1:
        screen.print(heading("sample sizes"), f" {low} each; {read} read")
    else:
        screen.print(heading("sample sizes"), f" {read} read; logarithmic scale")
        screen.print(f"  {low} │{draw_bars(seen.histogram)}│ {high}")

    screen.print()
    screen.print(heading("first sample"))
    _print_fields(screen, seen)
    if seen.thumbnails:
        screen.print()
        draw_thumbnails(screen, seen.thumbnails)


def _print_fields(screen: Screen, seen: Inspection) -> None:
    """Print name, types and value of each field; a long value wraps below itself if that is wide enough."""
    rows = [(shown(f.name), shown(f.kind), shown(f.in_batch), shown(f.value)) for f in seen.fields]
    heads = ("field", "type", "in a batch")
    widths = [max(map(len, column)) + 2 for column in list(zip((*heads, ""), *rows, strict=True))[:3]]
    start = sum(widths)
    narrow = start > screen.width // 2
    words = "".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))
    screen.print(heading(words.rstrip() if narrow else f"{words}value"))
    for name, kind, in_batch, value in rows:
        lines = wrapped(value, screen.width - (4 if narrow else start))
        rest = kind.ljust(widths[1]) + (in_batch if narrow else in_batch.ljust(widths[2]))
        first = Text.assemble((name.ljust(widths[0]), "cyan"), rest)
        if narrow:
            screen.print(first, soft_wrap=True)
        else:
            first.append(lines.pop(0))
            screen.print(first, soft_wrap=True)
        for line in lines:
            screen.print(Text(" " * (4 if narrow else start) + line), soft_wrap=True)


def _sizes(spread: Spread) -> tuple[str, ...]:
    return tuple(format_bytes(size) for size in (spread.low, spread.median, spread.mean, spread.high))


def can_draw(screen: Console) -> bool:
    """Return whether the output is a terminal with enough colours for pictures."""
    return screen.is_terminal and screen.color_system in ("truecolor", "256")


def draw_thumbnails(screen: Console, thumbnails: Sequence[Thumbnail]) -> None:
    """Pictures side by side, as many as fit; a character is two pixels, one above the other."""
    width = max(thumbnail.pixels.shape[1] for thumbnail in thumbnails) + 2
    fitting = thumbnails[: max(1, screen.width // width)]
    rows = max(-(-thumbnail.pixels.shape[0] // 2) for thumbnail in fitting)
    for row in range(rows):
        line = Text(no_wrap=True)
        for thumbnail in fitting:
            pixels = thumbnail.pixels[2 * row : 2 * row + 2]
            for column in range(pixels.shape[1] if len(pixels) else 0):
                upper = _colour(pixels[0, column].tolist())
                lower = f" on {_colour(pixels[1, column].tolist())}" if len(pixels) == 2 else ""
                line.append("▀", style=upper + lower)
            line.append(" " * (width - (pixels.shape[1] if len(pixels) else 0)))
        screen.print(line)
    names = "".join(shown(thumbnail.name)[: width - 2].ljust(width) for thumbnail in fitting)
    screen.print(Text(names.rstrip(), style="dim"))


def _colour(pixel: list[int]) -> str:
    red, green, blue = pixel
    return f"#{red:02x}{green:02x}{blue:02x}"


def _show_sample(given: SourceArguments, *, sample: int | None, key: str | None, field: str | None) -> int:
    """Find a sample by id or key, and print it; returns the exit code."""
    seen = inspect_sample(
        given.chosen_source(),
        sample=sample,
        key=key,
        field=field,
        split=given.chosen_split(),
        storage_options=given.options(),
        format=given.chosen_format(),
    )
    if given.json:
        print_json(seen)
    else:
        _report_sample(seen)
    return 0


def _report_sample(seen: SampleInspection) -> None:
    screen = console()
    facts = fact_table()
    facts.add_row("data set", seen.url)
    facts.add_row("sample", f"{seen.id:,} of {seen.samples:,}")
    facts.add_row("stored as", Text(f"number {seen.number:,} of {seen.shard}"))
    screen.print(facts)
    fields = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    fields.add_column("field", style="cyan", no_wrap=True)
    fields.add_column("type", no_wrap=True)
    fields.add_column("value", overflow="fold", ratio=1)
    for each in seen.fields:
        fields.add_row(Text(each.name), Text(each.kind), Text(each.value))
    screen.print()
    screen.print(fields)
