"""Errors on their way between processes: with their cause, their notes, and the place in the code."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass

from ....storage.errors import PenstockError
from ...errors import DecodeError

_MOST_CAUSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error: pickled, None where it cannot be; described in words; and what caused it."""

    error: bytes | None
    text: str
    notes: tuple[str, ...]
    place: str
    cause: Failure | None
    context: Failure | None
    hides_context: bool


def describe_failure(error: BaseException, depth: int = 0) -> Failure:
    """Describe an error for another process."""
    data: bytes | None = None
    with suppress(Exception):  # the text is enough
        data = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)  # some can be pickled but not unpickled
    deeper = depth + 1
    cause, context = error.__cause__, error.__context__
    return Failure(
        error=data,
        text=f"{type(error).__name__}: {error}",
        notes=tuple(map(str, getattr(error, "__notes__", ()))),
        place="".join(traceback.format_tb(error.__traceback__)),
        cause=None if cause is None or depth >= _MOST_CAUSES else describe_failure(cause, deeper),
        context=None if context is None or depth >= _MOST_CAUSES else describe_failure(context, deeper),
        hides_context=error.__suppress_context__,
    )


def make_error(failure: Failure) -> BaseException:
    """Make the error again, of its own type where that can be sent, else a DecodeError with its text."""
    error: BaseException = DecodeError(failure.text)
    if failure.error is not None:
        with suppress(Exception):  # what it consists of may be unknown here
            error = pickle.loads(failure.error)
    with suppress(AttributeError):
        del error.__notes__
    for note in failure.notes:
        error.add_note(note)
    if failure.place and not isinstance(error, PenstockError):
        error.add_note(f"in the loader's process:\n{failure.place.rstrip()}")
    error.__cause__ = None if failure.cause is None else make_error(failure.cause)
    error.__context__ = None if failure.context is None else make_error(failure.context)
    error.__suppress_context__ = failure.hides_context
    return error
