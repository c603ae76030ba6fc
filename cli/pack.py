"""``penstock pack``: write shards."""

from __future__ import annotations

import math
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..loader.errors import ConfigError
from ..loader.formats.shard import ShardFormat
from ..storage.options import ENCRYPTION_OPTION
from ..tools.pack import PackSummary, pack
from .common import (
    Flag,
    SplitNames,
    StorageOptions,
    TokenType,
    choose_cluster,
    console,
    fact_table,
    format_bytes,
    format_count,
    format_seconds,
    make_token_format,
    name_classes,
    parse,
    parse_options,
    parse_split,
    print_json,
    token_types,
)

SourceFormat = Literal["files", "csv", "tar", "parquet", "arrow", "tokens", "token_documents", "mds", "jsonl"]


@dataclass(frozen=True, kw_only=True)
class PackArguments:
    """Write a data set, a folder of files, a table or text as shards to any store.

    A source of shards (tar, parquet, arrow, jsonl, mds, tokens) is packed anew, sample by sample, in any format. Loose
    files of a folder are grouped into samples by their name up to the first dot, or to the last where the names show
    that dots are part of them. If every file lies in one of several subfolders, the subfolders are classes and each
    sample gets a `cls`, their number. Each row of a .csv or .tsv is a sample. The manifest is written last, with the
    names of the classes. A pack that was stopped goes on where it was when the same command is run again.

    example:  penstock pack photos/train s3://bucket/photos/train

    example:  penstock pack photos/val s3://bucket/photos/val --classes s3://bucket/photos/train

    example:  penstock pack clicks.csv clicks/ --format parquet

    example:  penstock pack s3://bucket/tars/ s3://bucket/small/ --map my.code:shrink --processes 8

    example:  penstock pack s3://bucket/tars/ s3://bucket/small/ --map my.code:shrink --ray --address 10.0.0.5:6379

    example:  penstock pack photos/ s3://bucket/secret/ --encrypt

    example:  penstock pack docs.jsonl s3://bucket/docs/ --format tokens --seq-len 2048 --tokenizer tokenizer.json
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="")]
    """URL or path of a folder or file, or a quoted pattern of shards."""

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET", help_behavior_hint="")]
    """URL or path of the folder to write the shards to."""

    format: Literal["tar", "parquet", "tokens", "mds", "jsonl", "arrow"] = "tar"
    """Format of the shards to write."""

    shard_mib: float = 64.0
    """Approximate size of a shard in MiB."""

    map: Annotated[str | None, tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="")] = None
    """Function from a sample (a dict) to a sample, a list of samples, or None to drop it."""

    processes: int = 0
    """Processes to run --map and --tokenizer in; what is written is the same."""

    source_format: Annotated[
        SourceFormat | None, tyro.conf.arg(metavar="{files,csv,tar,...}", help_behavior_hint="")
    ] = None
    """What to read where shards lie among other files: shards of a format, csv tables, or every file as a field."""

    split: SplitNames = None
    """Split to pack, such as train; several with commas between them, or all. A folder of several needs it."""

    source_seq_len: Annotated[int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Sequence length of a source of token files, which do not store one."""

    source_dtype: Annotated[TokenType | None, tyro.conf.arg(metavar=token_types, help_behavior_hint="")] = None
    """Data type of a token in a source of raw token files; uint16 if not given."""

    source_eos: Annotated[int | None, tyro.conf.arg(metavar="TOKEN", help_behavior_hint="")] = None
    """Token that ends each document of a source of token files; each document is then a sample."""

    extensions: Annotated[str | None, tyro.conf.arg(metavar="EXT,EXT", help_behavior_hint="")] = None
    """Endings of the loose files to take, such as jpg,seg.png: what is before them is the key. Others are left out."""

    delimiter: Annotated[str | None, tyro.conf.arg(metavar="CHARACTER|tab", help_behavior_hint="")] = None
    """What separates the values of CSV files; found in the header if not given."""

    decimal_point: Annotated[str | None, tyro.conf.arg(metavar=".|,", help_behavior_hint="")] = None
    """What is before the fraction of numbers in CSV files; a full stop if not given."""

    classes: Annotated[str | None, tyro.conf.arg(metavar="NAMES|FILE|URL", help_behavior_hint="")] = None
    """Classes in the order of their numbers: names with commas, a file of them, or the data set to number like."""

    follow_links: Flag = False
    """Pack what links out of the folder lead to, instead of refusing them."""

    seq_len: Annotated[int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Sequence length in tokens; required for --format tokens."""

    dtype: Literal["uint16", "uint32"] = "uint16"
    """Data type of a token, for --format tokens."""

    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE|URL|MODULE:NAME", help_behavior_hint="")] = None
    """A tokenizer.json or its folder (hf://OWNER/NAME on the Hugging Face Hub), or a function from text to a list of
    integers; for --format tokens."""

    field: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Field that holds the text or the integers, for --format tokens; found by name if not given."""

    no_checksums: Flag = False
    """Do not store checksums of chunks."""

    encrypt: Flag = False
    """Encrypt what is written, with the key in PENSTOCK_ENCRYPTION_KEY, or that of --storage-option encryption_key=."""

    overwrite: Flag = False
    """Replace the shards of a target that is not empty, and do not go on with an interrupted pack."""

    storage_option: StorageOptions = ()
    """Option of the target's store, such as endpoint=http://host:9000; repeatable."""

    source_storage_option: StorageOptions = ()
    """Option of the source's store; repeatable."""

    ray: Flag = False
    """Run --map and --tokenizer on a Ray cluster; the bytes are the same."""

    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT|auto", help_behavior_hint="")] = None
    """With --ray, the cluster; without it one is started on this machine."""

    json: Flag = False
    """Print the result as JSON."""


def run(arguments: Sequence[str]) -> int:
    given = parse(PackArguments, "pack", arguments)
    if not 1 <= given.shard_mib * (1 << 20) < math.inf:
        raise ConfigError(f"--shard-mib {given.shard_mib}: must be above 0, and a number of MiB")
    summary = pack(
        given.source,
        given.target,
        format=given.format,
        shard_bytes=int(given.shard_mib * (1 << 20)),
        map=None if given.map is None else import_function(given.map, "--map"),
        processes=given.processes,
        cluster=choose_cluster(given.ray, given.address),
        source_format=_source_format(given),
        split=parse_split(given.split),
        follow_links=given.follow_links,
        extensions=None if given.extensions is None else given.extensions.split(","),
        delimiter=given.delimiter,
        decimal_point=given.decimal_point,
        classes=_classes(given.classes),
        seq_len=given.seq_len,
        dtype=given.dtype,
        tokenizer=_tokenizer(given.tokenizer),
        field=given.field,
        checksums=not given.no_checksums,
        overwrite=given.overwrite,
        storage_options=_target_options(given) or None,
        source_storage_options=parse_options(given.source_storage_option, "--source-storage-option") or None,
    )
    if given.json:
        print_json(summary)
    else:
        _report(summary)
    return 0


def _classes(text: str | None) -> str | list[str] | None:
    """Names where there is a comma, and no file or folder is called so; else a place."""
    if text is None or "," not in text or "/" in text or Path(text).exists():
        return text
    return [name.strip() for name in text.split(",")]


def _tokenizer(text: str | None) -> Any:
    """Import a function given as module:name, also from the current folder; leave any other text to ``pack``."""
    if text is None or ":" not in text or "://" in text or Path(text).exists():
        return text
    return import_function(text, "--tokenizer")


def _target_options(given: PackArguments) -> dict[str, str]:
    options = parse_options(given.storage_option)
    if given.encrypt:
        options.setdefault(ENCRYPTION_OPTION, "env")
    return options


def _source_format(given: PackArguments) -> ShardFormat | str | None:
    name, seq_len, dtype, eos = given.source_format, given.source_seq_len, given.source_dtype, given.source_eos
    if seq_len is None and eos is None and name != "token_documents":
        if name == "tokens" or dtype is not None:
            raise ConfigError(
                "a source of token files needs --source-seq-len, as they do not store one, or for their documents "
                "--source-eos"
            )
        return name
    return make_token_format(name, seq_len=seq_len, dtype=dtype, eos=eos, prefix="source-")


def import_function(path: str, option: str) -> Callable[..., Any]:
    """Import the function ``module:name``; modules in the current folder are found, by processes started later too."""
    if ":" not in path:
        raise ConfigError(f"{option} {path}: write it as module:name")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"{option} {path}: {exc}") from exc
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
    if not callable(found):
        raise ConfigError(f"{option} {path}: a {type(found).__name__} is not callable")
    return found  # type: ignore[no-any-return]


def _report(summary: PackSummary) -> None:
    table = fact_table()
    table.add_row("data set", summary.url)
    table.add_row("samples", f"{summary.samples:,}")
    table.add_row(
        "shards", f"{format_count(summary.shards, f'{summary.format} shard')} of {format_bytes(summary.bytes)} in total"
    )
    if summary.classes:
        table.add_row("classes", name_classes(summary.classes))
    if summary.dropped:
        table.add_row("dropped", summary.dropped)
    for note in summary.notes:
        table.add_row("note", note)
    if summary.kept_shards:
        table.add_row("went on", f"{format_count(summary.kept_shards, 'shard')} of an interrupted pack kept")
    table.add_row("fingerprint", summary.fingerprint)
    rate = summary.bytes / max(summary.seconds, 1e-9)
    table.add_row("took", f"{format_seconds(summary.seconds)}, {format_bytes(rate)}/s")
    console().print(table)
