"""The command lines of what is run as ``python -m penstock.benchmarks.NAME``: called so, and wrapped to 80 columns."""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

Config = TypeVar("Config")
# A file, or none: neither of them needs a default in the help.
OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]

_WIDTH = 80
_COMMANDS = ("python -m ", "torchrun ")  # paragraphs that begin so are kept as they are


def parse_config(kind: type[Config], doc: str | None = None) -> Config:
    """Parse the process's arguments into a dataclass; ``doc`` describes the command if its docstring does not."""
    # Indented as the boxes' content is; tyro would join lines that begin with a letter.
    described = textwrap.indent(describe(doc or kind.__doc__ or "", _WIDTH - 2), "  ")
    return tyro.cli(kind, prog=program(), description=described)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the text of a module."""
    return argparse.ArgumentParser(
        prog=program(),
        description=describe(doc or "", _WIDTH),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def program() -> str:
    """What was typed: ``python -m`` and the module that runs, or the file's name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def describe(text: str, width: int) -> str:
    """A docstring as paragraphs of at most ``width`` columns; commands keep their lines."""
    paragraphs = inspect.cleandoc(text).replace("``", "`").split("\n\n")
    return "\n\n".join(
        paragraph
        if paragraph.startswith(_COMMANDS)
        else textwrap.fill(" ".join(paragraph.split()), width, break_long_words=False, break_on_hyphens=False)
        for paragraph in paragraphs
    )
