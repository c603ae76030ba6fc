"""Attributes that are computed when they are first asked for, in any thread, without waiting for one another."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from functools import cached_property as cached_property  # noqa: TID251 - what type checkers see
else:

    class cached_property(functools.cached_property):  # noqa: N801, TID251 - as everyone knows it
        """``functools.cached_property`` as it is from Python 3.12 on: without a lock.

        That of 3.11 is one for all objects of a class, held while a value is computed: loaders of one process would
        plan one after another, and a process that is forked meanwhile would wait for it forever. Where two threads ask
        an object at once, both compute, and get the same value.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.attrname, self.func(instance))
