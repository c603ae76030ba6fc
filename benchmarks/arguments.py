"""The command lines of what is run as ``python -m penstock.benchmarks.NAME``, and the text above all options."""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

Config = TypeVar("Config")
# A file, or none: neither of them needs a default in the help.
OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]

_COMMANDS = ("python -m ", "torchrun ")  # paragraphs that begin so are kept as they are
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


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
    """What was typed: ``python -m`` and the module that runs, or the file's name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def docstring(kind: type) -> str:
    """What was written of a dataclass; nothing under -OO, where ``__doc__`` is a signature, made when the class was."""
    return kind.__doc__ or "" if sys.flags.optimize < 2 else ""


def describe(text: str, width: int = 80, *, indent: str = "") -> str:
    """A docstring for ``--help``: paragraphs of at most ``width`` columns, examples continued as a shell takes them.

    ``indent`` is that of the content of tyro's boxes, which would join lines that begin with a letter.
    """
    paragraphs = inspect.cleandoc(text).replace("``", "`").split("\n\n")
    return "\n\n".join(textwrap.indent(_wrapped(each, width - len(indent)), indent) for each in paragraphs)


def _wrapped(paragraph: str, width: int) -> str:
    if paragraph.startswith(_COMMANDS):
        return paragraph
    words = " ".join(paragraph.split())
    if not words.startswith("example:"):
        return textwrap.fill(words, width, **_WHOLE_WORDS)
    words = words.replace("example: ", "example:  ")
    return " \\\n".join(textwrap.wrap(words, width - 2, subsequent_indent=" " * 12, **_WHOLE_WORDS))
