"""Errors about what ``pack`` reads, in the words of its arguments: ``source_format=``, not a loader's ``format=``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ...storage.errors import PenstockError

# A loader's arguments, and the command line's, that are called otherwise here, as what is written has its own.
_ARGUMENT = re.compile(r"(?<![\w.(])(format|storage_options)(?==)")
_OPTION = re.compile(r"(?<![\w-])--(format|seq-len|dtype|eos|storage-option)(?![\w-])")
_COMMAND = re.compile(r"(`[^`]*`)")


@contextmanager
def named_source() -> Iterator[None]:
    """Errors from inside name the arguments of the source."""
    try:
        yield
    except PenstockError as exc:
        exc.args = tuple(_of_source(each) if isinstance(each, str) else each for each in exc.args)
        raise


def _of_source(message: str) -> str:
    parts = _COMMAND.split(message)  # what is another command, which has options of its own, stays as it is
    parts[::2] = [_OPTION.sub(r"--source-\1", _ARGUMENT.sub(r"source_\1", part)) for part in parts[::2]]
    return "".join(parts)
