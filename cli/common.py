"""Shared parts of the commands: argument parsing, storage options, and output through ``screen``."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json as json_text
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar, get_args, get_origin, get_type_hints

import tyro

from ..loader.errors import ConfigError
from ..loader.formats.detect import make_format
from ..loader.formats.shard import ShardFormat
from ..storage.ray_cluster import HERE
from ..storage.suggestions import did_you_mean, listed
from .screen import console as console
from .screen import fact_table as fact_table
from .screen import format_bytes as format_bytes
from .screen import format_count as format_count
from .screen import format_seconds as format_seconds
from .screen import name_classes as name_classes
from .words import describe, docstring, option_words, options_of

Arguments = TypeVar("Arguments")
FormatName = Literal["tar", "parquet", "arrow", "tokens", "token_documents", "mds", "jsonl"]
TokenType = Literal["uint8", "uint16", "int32", "uint32", "int64"]
# Options that need no default in their help: flags, and settings whose text says what happens without them.
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
OptionalNumber = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
SplitNames = Annotated[str | None, tyro.conf.arg(metavar="NAME,...", help_behavior_hint="")]
StorageOptions = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE", help_behavior_hint="")
]


def _choices(literal: Any) -> str:
    return "{" + ",".join(get_args(literal)) + "}"


_parsed: list[type] = []


def in_option_words(message: str) -> str:
    """An error's message with the arguments of the command that was parsed last as its options."""
    return option_words(message, options_of(_parsed[-1])) if _parsed else message


class _Printed(io.StringIO):
    """Keeps the help that tyro prints, in colour where it would be printed so."""

    def __init__(self, screen: TextIO) -> None:
        super().__init__()
        self._screen = screen

    @property
    def encoding(self) -> str | None:  # type: ignore[override]
        return self._screen.encoding

    def isatty(self) -> bool:
        return self._screen.isatty()


token_types = _choices(TokenType)


def parse(kind: type[Arguments], command: str, arguments: Sequence[str]) -> Arguments:
    """Parse arguments into a command's dataclass; ``--help`` exits with 0, wrong arguments exit with 2."""
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    _parsed.append(kind)
    _check_choices(kind, arguments)
    description = describe(docstring(kind), indent="  ")
    printed = _Printed(sys.stdout)
    try:
        with contextlib.redirect_stdout(printed):
            return tyro.cli(
                kind, prog=f"penstock {command}", args=list(arguments), config=style, description=description
            )
    finally:
        sys.stdout.write(re.sub(r"\n{3,}", "\n\n", printed.getvalue()))


def _check_choices(kind: type, arguments: Sequence[str]) -> None:
    """Raise ConfigError for a value that is none of an option's choices: tyro lists these, and suggests none."""
    choices = {}
    for name, hint in get_type_hints(kind).items():
        literals = [one for one in (hint, *get_args(hint)) if get_origin(one) is Literal]
        if literals:
            choices["--" + name.replace("_", "-")] = [str(choice) for one in literals for choice in get_args(one)]
    for place, word in enumerate(arguments):
        option, mark, value = word.partition("=")
        option = option.replace("_", "-")
        if option not in choices or not (mark or place + 1 < len(arguments)):
            continue
        value = value if mark else arguments[place + 1]
        if not value.startswith("-") and value not in choices[option]:
            raise ConfigError(
                f"{option} {value}: must be {listed(choices[option])}{did_you_mean(value, choices[option])}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceArguments:
    """Arguments of every command that reads a data set."""

    source: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="")]
    """URLs or paths of folders of shards or of shards, or quoted patterns: "s3://b/x-{000..099}.tar", "s3://b/x-*"."""

    split: SplitNames = None
    """Split to read, such as train; several with commas between them, or all. A folder of several needs it."""

    format: Annotated[FormatName | None, tyro.conf.arg(metavar=_choices(FormatName), help_behavior_hint="")] = None
    """Format of the shards; detected if not given."""

    seq_len: Annotated[int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Sequence length in tokens, for token files."""

    dtype: Annotated[TokenType | None, tyro.conf.arg(metavar=_choices(TokenType), help_behavior_hint="")] = None
    """Data type of a token, for raw token files; uint16 if not given."""

    eos: Annotated[int | None, tyro.conf.arg(metavar="TOKEN", help_behavior_hint="")] = None
    """Token that ends each document: token files are read by their documents, as with --format token_documents."""

    storage_option: StorageOptions = ()
    """Option of the store, such as endpoint=http://host:9000; repeatable. Pass secrets in the environment instead."""

    json: Flag = False
    """Print the result as JSON."""

    def chosen_source(self) -> str | list[str]:
        """One URL, or several: the shell expands an unquoted ``{000..099}`` into words."""
        if not self.source:
            raise ConfigError("no source; give a URL or a path")
        return self.source[0] if len(self.source) == 1 else list(self.source)

    def chosen_split(self) -> str | list[str] | None:
        return parse_split(self.split)

    def chosen_format(self) -> ShardFormat | None:
        """The format that the arguments select; None to detect it."""
        if self.seq_len is None and self.dtype is None and self.eos is None:
            return None if self.format is None else make_format(self.format)
        return make_token_format(self.format, seq_len=self.seq_len, dtype=self.dtype, eos=self.eos)

    def options(self) -> dict[str, str] | None:
        return parse_options(self.storage_option) or None


def make_token_format(
    name: str | None, *, seq_len: int | None, dtype: str | None, eos: int | None, prefix: str = ""
) -> ShardFormat:
    """The format of token files that options select: by sequences, or by documents with ``eos`` or by that name.

    ``prefix`` is what the options' names begin with in the command. Raises ConfigError where the options contradict.
    """
    kind = "tokens" if eos is None and name != "token_documents" else "token_documents"
    if eos is not None and name not in (None, kind):
        raise ConfigError(f"--{prefix}eos applies to --{prefix}format token_documents, not to --{prefix}format {name}")
    if name not in (None, kind):
        raise ConfigError(f"--{prefix}seq-len and --{prefix}dtype apply to token files, not to --{prefix}format {name}")
    if seq_len is not None and kind == "token_documents":
        raise ConfigError(
            f"--{prefix}seq-len cuts token files into sequences; --{prefix}eos and --{prefix}format token_documents "
            "read their documents; give the one or the other"
        )
    settings = {"seq_len": seq_len, "dtype": dtype, "eos": eos}
    try:
        return make_format(kind, {setting: value for setting, value in settings.items() if value is not None})
    except ConfigError as exc:
        own = prefix.replace("-", "_")
        raise ConfigError(re.sub(r"\b(seq_len|dtype|eos)=", rf"{own}\1=", str(exc))) from exc


def parse_split(text: str | None) -> str | list[str] | None:
    """``train``, ``train,validation`` or ``all`` as the loader's ``split=``."""
    return [name.strip() for name in text.split(",")] if text is not None and "," in text else text


def parse_options(pairs: Sequence[str], option: str = "--storage-option") -> dict[str, str]:
    """``KEY=VALUE`` words of an option as a mapping. Raises ConfigError without a value, which may be a secret."""
    options = {}
    for number, pair in enumerate(pairs, start=1):
        key, mark, value = pair.partition("=")
        if not mark or not key:
            raise ConfigError(f"{option} number {number} is not of the form KEY=VALUE")
        options[key] = value
    return options


_URL = re.compile(r"([A-Za-z][\w+.-]+):/{1,2}[^/]")  # of two slashes a Path makes one


def local_path(given: str | Path, name: str) -> Path:
    """The path of a file or folder of this machine.

    Raises:
        ConfigError: it is a URL, of which the message has no more than the scheme: it may hold a password.
    """
    found = _URL.match(str(given))
    if found is not None and not Path(f"{found[1]}:").exists():
        raise ConfigError(f"{name} is a path on this machine, and a URL was given ({found[1]}://...); give a path")
    return Path(given)


def choose_cluster(ray: bool, address: str | None) -> str | None:
    """The cluster that --ray and --address mean: an address, this machine's own, or none.

    Raises:
        ConfigError: there is an address, and no --ray.
    """
    if address is not None and not ray:
        raise ConfigError("--address without --ray, which it is for; add that")
    return (address or HERE) if ray else None


def print_json(value: Any) -> None:
    print(to_json(value))


def to_json(value: Any) -> str:
    """A value, or a dataclass, as JSON that every reader takes."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    return json_text.dumps(_without_nan(plain), indent=2)


def _without_nan(value: Any) -> Any:
    """``value`` with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
