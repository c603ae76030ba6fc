"""Errors of ours on their way over a network: plain values in place of a reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import errors
from ..errors import ServerError, TrainerError

_KINDS: dict[str, type[TrainerError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TrainerError)
}


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An error of ours, by the name of its class, in place of a reply."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Refused:
        """Describe an error."""
        return cls(kind=type(error).__name__, text=str(error))


def raise_refused(found: Any) -> Any:
    """Return a reply that is none of these.

    Raises:
        TrainerError: the error that it is.
    """
    if isinstance(found, Refused):
        raise _KINDS.get(found.kind, ServerError)(found.text)
    return found
