"""The command line's words: errors that name ``--tokenizer`` in place of ``tokenizer=``, and texts of ``--help``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Collection
from typing import Any

_COMMANDS = ("python -m ", "torchrun ")  # paragraphs that begin so are kept as they are
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[\w.+-]+(?:\([^()]*\))?)"


def option_words(message: str, options: Collection[str]) -> str:
    """A message of the library with its arguments as options; ``options`` are the command's, named as fields are."""
    # What names both has the command line's word already.
    message = re.sub(rf"\b\w+={_VALUE}? \((--[\w-]+(?: [\w./-]+)?)\)", r"\1", message)
    message = re.sub(rf"\b\w+={_VALUE}, or (--[\w-]+(?: [\w./-]+)?) on the command line", r"\1", message)
    for word in ("source_storage_option", "storage_option"):
        if word in options:
            message = _storage_words(message, word)
    for name in options:
        word = "--" + name.replace("_", "-")
        message = re.sub(rf"(?<![\w.-]){name}=(?:True)?(?![\w'\"\[{{(.-])", word, message)
        message = re.sub(rf"(?<![\w.-]){name}=('?)([^\s;,:'\"]+)\1", rf"{word} \2", message)
        message = re.sub(rf"(?<![\w.-]){name}=(' *')", rf"{word} \1", message)
    return re.sub(r"(--[\w-]+ [\w.-]+) or '([\w.-]+)'", r"\1 or \2", message)


def _storage_words(message: str, option: str) -> str:
    """``storage_options={'region': ...}``, ``storage_options='region'`` and ``storage_options=`` as the option."""
    word = "--" + option.replace("_", "-")
    name = rf"(?<![\w.-]){option}s="
    message = re.sub(rf"{name}\{{'(\w+)': (True|False)\}}", lambda one: f"{word} {one[1]}={one[2].lower()}", message)
    message = re.sub(rf"{name}\{{'(\w+)': '?([^'{{}}]+)'?\}}(?: \({word} [^()]*\))?", rf"{word} \1=\2", message)
    return re.sub(rf"{name}(?:'(\w+)')?(?![\w{{])", lambda one: f"{word} {one[1]}" if one[1] else word, message)


def options_of(kind: type) -> list[str]:
    """The names of a command's options, the longest first."""
    names = [field.name for field in dataclasses.fields(kind)]
    return sorted(names, key=len, reverse=True)


def docstring(kind: type) -> str:
    """Docstring of a dataclass; empty under -OO, where ``__doc__`` is the generated signature."""
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
