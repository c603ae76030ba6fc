"""``penstock index``: build a manifest and store it beside the data."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from ..loader.dataset.build import INDEX_THREADS, StaleManifestWarning
from ..loader.dataset.index import find_manifest, read_saved_manifest
from ..loader.dataset.manifest import MANIFEST_NAME, Manifest
from ..loader.dataset.source import absolute_urls, resolve_split
from ..loader.dataset.splits import ALL, find_split_folders
from ..loader.errors import ConfigError
from ..loader.order.costs.costs import CostValues
from ..loader.reading.checksum import READ_THREADS, sum_chunks
from ..loader.reading.spread_sums import sum_in_cluster
from ..storage import PenstockError, open_store
from ..tools.index_costs import CostExpression, index_costs, write_costs
from .common import (
    Flag,
    SourceArguments,
    choose_cluster,
    console,
    fact_table,
    format_bytes,
    format_seconds,
    parse,
    print_json,
)


@dataclass(frozen=True, kw_only=True)
class IndexArguments(SourceArguments):
    """Find the samples of a data set and store the index, the manifest, beside the data.

    A loader indexes a data set that has no manifest at its first use, on each machine; with a manifest it starts at
    once. If a data set has changed, only new and changed shards are read.

    Costs (--cost) are for loaders that balance by cost, bucket by length or batch by tokens: a number of each sample,
    read once. FIELD is the value of a column, len:FIELD the length of a list, text or bytes, "bytes" the bytes of all
    fields; *FACTOR after it makes whole numbers, as seconds*1000, and NAME= before it is what loaders call it.

    example:  penstock index s3://bucket/train/

    example:  penstock index s3://bucket/chats/ --cost tokens=len:input_ids
    """

    no_write: Flag = False
    """Do not write the manifest (penstock-manifest.arrow), only report."""

    no_checksums: Flag = False
    """Do not read all data to store checksums of it, which loaders compare; damage may then go unnoticed."""

    rebuild: Flag = False
    """Index every shard again, ignoring the existing manifest."""

    cost: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="[NAME=]WHAT", help_behavior_hint="")
    ] = ()
    """Index what each sample costs, beside the manifest: FIELD (a number), len:FIELD or bytes; repeatable."""

    threads: int = INDEX_THREADS
    """Shards indexed in parallel."""

    ray: Flag = False
    """Read the data for checksums on a Ray cluster. If it is stopped, the same command goes on where it was."""

    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT|auto", help_behavior_hint="")] = None
    """With --ray, the cluster; without it one is started on this machine."""


def run(arguments: Sequence[str]) -> int:
    given = parse(IndexArguments, "index", arguments)
    source, split, options = given.chosen_source(), given.chosen_split(), given.options()
    wanted = [CostExpression.parse(text) for text in given.cost]
    cluster = choose_cluster(given.ray, given.address)
    if cluster is not None and given.no_checksums:
        raise ConfigError("--ray spreads the reading of all data for checksums, which --no-checksums leaves out")
    started = time.monotonic()
    with warnings.catch_warnings(), ExitStack() as lingering:
        warnings.simplefilter("ignore", StaleManifestWarning)  # this command repairs it
        manifest = find_manifest(
            source,
            lingering,
            split=split,
            storage_options=options,
            format=given.chosen_format(),
            threads=given.threads,
            rebuild=given.rebuild,
            trusts_copies=False,
        )
    if given.rebuild:
        manifest = _with_old_names(manifest, options)
    if given.no_checksums:
        manifest = replace(manifest, checksums=None, parts=None)
    elif not manifest.checks_all:
        # Summing holds whole chunks in memory, where indexing holds headers.
        saved = None if given.rebuild else _read_saved(manifest.url, options)
        if cluster is not None:
            manifest = sum_in_cluster(manifest, cluster, storage_options=options, saved=saved)
        else:
            threads = min(given.threads, READ_THREADS)
            manifest = sum_chunks(manifest, storage_options=options, threads=threads, saved=saved)
    costs = {each: index_costs(manifest, each, storage_options=options) for each in wanted}
    written = None
    if not given.no_write:
        urls = absolute_urls(resolve_split(source, split, options))
        if len(urls) != 1 or urls[0].removesuffix("**").rstrip("/") != manifest.url.rstrip("/"):
            raise ConfigError(
                "a manifest describes a whole folder of shards, and these are only some of them; index the folder, "
                f"{manifest.url}, with --split all if it holds several splits, or give --no-write to only report"
            )
        written = _write(manifest, options)
        for each, values in costs.items():
            write_costs(manifest, each, values, storage_options=options)
    _report(given, manifest, costs, written, time.monotonic() - started)
    return 0


def _read_saved(url: str, options: dict[str, str] | None) -> Manifest | None:
    """The manifest that will be replaced; the checksums of what did not change are taken from it."""
    try:
        return read_saved_manifest(url + MANIFEST_NAME, options)
    except PenstockError:
        return None


def _with_old_names(manifest: Manifest, options: dict[str, str] | None) -> Manifest:
    """The manifest with the names of classes that the one beside the data has: the shards do not tell them."""
    old = _read_saved(manifest.url, options)
    if manifest.classes is not None or old is None:
        return manifest
    shards = {(shard.key, shard.size) for shard in old.shards}
    is_known = any((shard.key, shard.size) in shards for shard in manifest.shards)
    return replace(manifest, classes=old.classes) if is_known else manifest


def _write(manifest: Manifest, options: dict[str, str] | None) -> str:
    store = open_store(manifest.url, storage_options=options)
    try:
        store.put(MANIFEST_NAME, manifest.to_bytes())
        return f"{store.url}/{MANIFEST_NAME}"
    finally:
        store.close()


def _report(
    given: IndexArguments,
    manifest: Manifest,
    costs: Mapping[CostExpression, CostValues],
    written: str | None,
    seconds: float,
) -> None:
    size = sum(shard.size for shard in manifest.shards)
    if given.json:
        print_json(
            {
                "url": manifest.url,
                "format": manifest.format,
                "config": dict(manifest.config),
                "shards": len(manifest.shards),
                "chunks": manifest.num_chunks,
                "samples": manifest.num_samples,
                "bytes": size,
                "checksums": manifest.checksums is not None,
                "fingerprint": manifest.fingerprint,
                "costs": {
                    each.name: {
                        "of": each.text,
                        "least": int(values.min()),
                        "mean": float(values.mean()),
                        "largest": int(values.max()),
                        "total": int(values.sum(dtype="int64")),
                    }
                    for each, values in costs.items()
                },
                "written": written,
                "seconds": seconds,
            }
        )
        return
    table = fact_table()
    table.add_row("data set", manifest.url)
    table.add_row("format", manifest.format)
    table.add_row("samples", f"{manifest.num_samples:,}")
    table.add_row("shards", f"{len(manifest.shards):,}, {format_bytes(size)} in total")
    table.add_row("chunks", f"{manifest.num_chunks:,}, {format_bytes(size / manifest.num_chunks)} on average")
    table.add_row("checksums", "yes" if manifest.checksums is not None else "no")
    table.add_row("fingerprint", manifest.fingerprint)
    for each, values in costs.items():
        numbers = f"{values.min():,} to {values.max():,}, {values.mean():,.1f} on average"
        table.add_row("costs", f"{each.name}{'' if each.name == each.text else f' = {each.text}'}: {numbers}")
    table.add_row("manifest", written or "not written")
    table.add_row("took", format_seconds(seconds))
    separate = find_split_folders(shard.key for shard in manifest.shards) if written and given.split == ALL else []
    if separate:
        table.add_row("note", f"loaders of one split read that folder's own index; make it with --split {separate[0]}")
    console().print(table)
