"""Translate foreign exceptions, damaged bytes or exhausted memory, into errors that name the shard."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from ...storage import PenstockError
from ..errors import FormatError, MemoryLimitError

# Exceptions that parsers and NumPy raise on numbers and structures that they do not expect.
_OF_BAD_BYTES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    pa.ArrowException,
    struct.error,
)


@contextmanager
def explain_failures(shard: str, doing: str, offset: int | None = None) -> Iterator[None]:
    """Raise FormatError for what damaged or hostile bytes cause, and MemoryLimitError for a failed allocation.

    ``doing`` completes "cannot be ...". A failed allocation says nothing about the bytes, whoever met it first.
    """
    try:
        yield
    except PenstockError as exc:
        if isinstance(exc.__cause__, MemoryError):
            raise _no_memory(shard, doing, exc.__cause__) from exc
        raise
    except MemoryError as exc:
        raise _no_memory(shard, doing, exc) from exc
    except _OF_BAD_BYTES as exc:
        problem = (
            f"cannot be {doing} ({type(exc).__name__}: {exc}); fetch or write it again, or index the data set again"
        )
        raise FormatError(shard, problem, offset=offset) from exc


def _no_memory(shard: str, doing: str, exc: BaseException) -> MemoryLimitError:
    return MemoryLimitError(
        f"{shard}: memory ran out while it was {doing} ({exc or type(exc).__name__}); give the process more memory, "
        "lower memory_limit= and the number of ranks on this machine, or write the data in smaller row groups or shards"
    )
