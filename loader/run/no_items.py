"""Answers those who index a loader, as torch's ``DataLoader`` indexes a data set, with what to do instead."""

from __future__ import annotations

from typing import NoReturn


class NoItems:
    """A class's ``__getitem__`` whose use raises a TypeError that says ``text``.

    ``hasattr`` finds no ``__getitem__``, so that frameworks that prefer it over ``__iter__`` still iterate.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise _NoItemsError(self._text)


class _NoItemsError(TypeError, AttributeError):
    """The TypeError of indexing, which ``hasattr`` takes for an attribute that is not there."""
