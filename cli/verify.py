"""``penstock verify``: read and check all data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.text import Text

from ..loader.reading.checksum import READ_THREADS
from ..tools.recheck import RecheckResult, recheck
from ..tools.verify import VerifyResult, verify
from .common import SourceArguments, local_path, parse, print_json
from .screen import console, fact_table, format_bytes, format_count, format_seconds, shown, wrapped

_SHOWN = 50


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(SourceArguments):
    """Read and check every chunk of a data set, and list every bad shard.

    Compares sizes, ETags, sample counts and, if the manifest has them, checksums, and opens every chunk. Exits with 0
    if no flaw was found and with 1 otherwise.

    example:  penstock verify s3://bucket/train/

    example:  penstock verify s3://bucket/train/ --quarantine runs/7/bad
    """

    threads: int = READ_THREADS
    """Chunks read in parallel."""

    quarantine: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A quarantine file, or a folder of them: check only what it names. Exits with 1 if any of it is still bad."""


def run(arguments: Sequence[str]) -> int:
    given = parse(VerifyArguments, "verify", arguments)
    if given.quarantine is not None:
        return _recheck(given, given.quarantine)
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


def _recheck(given: VerifyArguments, quarantine: str) -> int:
    result = recheck(
        given.chosen_source(),
        local_path(quarantine, "--quarantine"),
        split=given.chosen_split(),
        storage_options=given.options(),
        format=given.chosen_format(),
    )
    if given.json:
        print_json(dataclasses.asdict(result) | {"ok": result.ok})
    else:
        _report_recheck(result)
    return 0 if result.ok else 1


def _report_recheck(result: RecheckResult) -> None:
    screen = console()
    bad = [found for found in result.entries if found.problem is not None]
    gone = sum(found.is_gone for found in result.entries)
    decoded = sum(found.is_decoded for found in result.entries)
    table = fact_table()
    table.add_row("data set", result.url)
    table.add_row("quarantined", f"{len(result.entries):,} samples and chunks")
    table.add_row("good now", f"{len(result.entries) - len(bad) - gone:,}")
    if decoded:
        table.add_row("", f"of which {decoded:,} failed in transform=, which is not known here; they decode")
    if gone:
        table.add_row("gone", f"{gone:,}, no longer in the data set")
    table.add_row("still bad", Text(f"{len(bad):,}", style="red" if bad else "green"))
    screen.print(table)
    for found in bad[:_SHOWN]:
        entry = found.entry
        where = f"sample {entry.number:,}" if entry.number is not None else f"chunk at byte {entry.offset:,}"
        key = f", key {entry.key}" if entry.key is not None else ""
        screen.print()
        screen.print(Text.assemble((shown(entry.shard), "cyan"), f", {where}{shown(key)}"), soft_wrap=True)
        for line in wrapped(found.problem or "", screen.width - 2):
            screen.print(f"  {line}")
    if len(bad) > _SHOWN:
        screen.print(f"\n... and {len(bad) - _SHOWN:,} more; --json lists all")


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
