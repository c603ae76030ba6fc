"""``penstock inspect --sample`` and ``--key``: show one sample."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from ..loader.views.one_sample import SampleInspection, inspect_sample
from .common import SourceArguments, console, fact_table, print_json


def show_sample(given: SourceArguments, *, sample: int | None, key: str | None, field: str | None) -> int:
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
        _report(seen)
    return 0


def _report(seen: SampleInspection) -> None:
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
