"""``penstock verify``: read and check all data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from ..loader.reading.checksum import READ_THREADS
from ..loader.tools.verify import VerifyResult, verify
from .common import SourceArguments, parse, print_json
from .screen import console, fact_table, format_bytes, format_count, format_seconds, shown, wrapped

_SHOWN = 50


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(SourceArguments):
    """Read and check every chunk of a data set, and list every bad shard.

    Compares sizes, ETags, sample counts and, if the manifest has them, checksums, and opens every chunk. Exits with 0
    if no flaw was found and with 1 otherwise.

    example:  penstock verify s3://bucket/train/
    """

    threads: int = READ_THREADS
    """Chunks read in parallel."""


def run(arguments: Sequence[str]) -> int:
    given = parse(VerifyArguments, "verify", arguments)
    result = verify(
        given.chosen_source(),
        split=given.chosen_split(),
        storage_options=given.options(),
        format=given.chosen_format(),
        threads=given.threads,
    )
    if given.json:
        print_json(dataclasses.asdict(result) | {"ok": result.ok, "bad_shards": result.bad_shards})
    else:
        _report(result)
    return 0 if result.ok else 1


def _report(result: VerifyResult) -> None:
    screen = console()
    rate = result.bytes / max(result.seconds, 1e-9)
    table = fact_table()
    table.add_row("data set", result.url)
    chunks, shards = format_count(result.chunks, "chunk"), format_count(result.shards, "shard")
    table.add_row("read", f"{format_count(result.samples, 'sample')} in {chunks} of {shards}")
    table.add_row("", f"{format_bytes(result.bytes)} in {format_seconds(result.seconds)}, {format_bytes(rate)}/s")
    table.add_row(
        "checksums",
        "compared" if result.checksums else "none; `penstock index` adds them",
    )
    if result.ok:
        table.add_row("result", Text("no flaws found", style="green"))
        screen.print(table)
        return
    flawed = f"{format_count(len(result.flaws), 'flaw')} in {format_count(len(result.bad_shards), 'shard')}"
    table.add_row("result", Text(flawed, style="red"))
    screen.print(table)
    for flaw in result.flaws[:_SHOWN]:
        screen.print()
        place = "" if flaw.offset is None else f", at byte {flaw.offset:,}"
        screen.print(Text.assemble((shown(flaw.shard), "cyan"), place), soft_wrap=True)
        for line in wrapped(flaw.problem, screen.width - 2):
            screen.print(f"  {line}")
    if len(result.flaws) > _SHOWN:
        screen.print(f"\n... and {len(result.flaws) - _SHOWN:,} more; --json lists all")
