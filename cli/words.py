"""Errors in the words of the command line: ``--tokenizer`` in place of ``tokenizer=``, and what was perhaps meant."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

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
