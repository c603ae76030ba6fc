"""The command lines of what is run as ``python -m devtools CASE``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from penstock.cli.words import describe, docstring

Config = TypeVar("Config")
# A file, or none: neither of them needs a default in the help.
OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


def parse_config(kind: type[Config], doc: str | None = None) -> Config:
    """Parse the process's arguments into a dataclass; ``doc`` describes the command if its docstring does not."""
    return tyro.cli(kind, prog=program(), description=describe(doc or docstring(kind), indent="  "))


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the text of a module."""
    return argparse.ArgumentParser(
        prog=program(),
        description=describe(doc or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def program() -> str:
    """Program as it was typed: ``python -m devtools`` and the case, or the file's name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__').replace('.', ' ', 1)}"
