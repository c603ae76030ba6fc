"""What the commands share: reading their arguments, storage options, numbers for people, tables."""

from __future__ import annotations

import dataclasses
import json as json_text
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import tyro
from rich.console import Console
from rich.table import Table

from ..loader.errors import ConfigError
from ..loader.formats.detect import make_format
from ..loader.formats.shard import ShardFormat

Arguments = TypeVar("Arguments")
FormatName = Literal["tar", "parquet", "arrow", "tokens", "mds", "jsonl"]
TokenType = Literal["uint8", "uint16", "int32", "uint32", "int64"]
StorageOptions = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE", help_behavior_hint="")
]


def _choices(literal: Any) -> str:
    return "{" + ",".join(get_args(literal)) + "}"


def parse(kind: type[Arguments], command: str, arguments: Sequence[str]) -> Arguments:
    """Fill the dataclass of a command; ``--help`` and wrong arguments end the process, with 0 and 2."""
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(kind, prog=f"penstock {command}", args=list(arguments), config=style)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceArguments:
    """What every command that reads a data set is told."""

    source: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="")]
    """URLs or paths: of a folder of shards, of shards, or a quoted pattern like "s3://b/x-{000..099}.tar"."""

    format: Annotated[FormatName | None, tyro.conf.arg(metavar=_choices(FormatName), help_behavior_hint="")] = None
    """Read the shards as this format instead of finding it out."""

    seq_len: Annotated[int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens in a sequence, for token files."""

    dtype: Annotated[TokenType | None, tyro.conf.arg(metavar=_choices(TokenType), help_behavior_hint="")] = None
    """Type of a token, for raw token files (uint16 if not given)."""

    storage_option: StorageOptions = ()
    """Setting of the store, such as endpoint=http://host:9000; may be repeated. Leave secrets to the environment."""

    json: bool = False
    """Print the result as JSON."""

    def chosen_source(self) -> str | list[str]:
        """A shell has expanded an unquoted ``{000..099}`` into words before we see it."""
        if not self.source:
            raise ConfigError("no source is given; name a URL or a path")
        return self.source[0] if len(self.source) == 1 else list(self.source)

    def chosen_format(self) -> ShardFormat | None:
        """The format that the arguments ask for; None where they leave it to the data."""
        if self.seq_len is None and self.dtype is None:
            return None if self.format is None else make_format(self.format)
        if self.format not in (None, "tokens"):
            raise ConfigError(f"--seq-len and --dtype are for token files, not for --format {self.format}")
        config: dict[str, Any] = {"seq_len": self.seq_len}
        if self.dtype is not None:
            config["dtype"] = self.dtype
        return make_format("tokens", config)

    def options(self) -> dict[str, str] | None:
        return parse_options(self.storage_option) or None


def parse_options(pairs: Sequence[str]) -> dict[str, str]:
    """``key=value`` words as a mapping. Raises ConfigError without echoing a value, which may be a secret."""
    options = {}
    for number, pair in enumerate(pairs, start=1):
        key, mark, value = pair.partition("=")
        if not mark or not key:
            raise ConfigError(f"--storage-option number {number} is not of the form key=value")
        options[key] = value
    return options


def print_json(value: Any) -> None:
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    json_text.dump(plain, sys.stdout, indent=2)
    print()


def console() -> Console:
    """The terminal. What is printed is data: brackets in it are no markup; styles are given as such."""
    return Console(highlight=False, markup=False)


def fact_table() -> Table:
    """Two columns: what, and how much."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s"
