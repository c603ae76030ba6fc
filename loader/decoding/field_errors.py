"""Errors of decoders, as errors of this package that name the field."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, DecodeError, MemoryLimitError


def field_error(field: str, data: Any, exc: Exception, *, is_own: bool = False) -> Exception:
    """Make the error for a value of ``field`` whose decoder raised ``exc``; ``is_own``: a reader chosen by its name."""
    if isinstance(exc, ConfigError):
        return exc
    size = f"{len(data):,} bytes" if isinstance(data, bytes | memoryview) else f"a {type(data).__name__}"
    if isinstance(data, str):
        size = f"{len(data):,} characters"
    if isinstance(exc, MemoryError):
        return MemoryLimitError(f"field {field!r}: memory ran out while its {size} were decoded ({exc})")
    cause = str(exc) if isinstance(exc, DecodeError) else f"{type(exc).__name__}: {exc} ({size})"
    raw = "as bytes" if isinstance(data, bytes | memoryview) else "as it is"
    cure = f"; decode={{{field!r}: None}} leaves the field {raw}" if is_own else ""
    error = DecodeError(f"field {field!r}: {cause}{cure}")
    error.field = field
    return error
