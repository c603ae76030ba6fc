"""What a decoder raised, as an error of this package that names the field."""

from __future__ import annotations

from ..errors import ConfigError, DecodeError, MemoryLimitError


def field_error(field: str, data: memoryview | str, exc: Exception, *, is_own: bool = False) -> Exception:
    """The error for a value of ``field`` whose decoder raised ``exc``; ``is_own``: by a reader that its name chose."""
    if isinstance(exc, ConfigError):
        return exc
    if isinstance(exc, MemoryError):
        return MemoryLimitError(f"field {field!r}: memory ran out while its {len(data):,} bytes were decoded ({exc})")
    unit = "characters" if isinstance(data, str) else "bytes"
    cause = str(exc) if isinstance(exc, DecodeError) else f"{type(exc).__name__}: {exc} ({len(data)} {unit})"
    cure = f"; decode={{{field!r}: None}} leaves the field as bytes" if is_own else ""
    error = DecodeError(f"field {field!r}: {cause}{cure}")
    error.field = field
    return error
