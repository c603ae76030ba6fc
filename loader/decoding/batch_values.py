"""A field's values that are decoded together, once all rows of a part of a batch are known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np


class BatchValues(ABC):
    """The values of one field of n rows. Any thread may ``prepare`` a row; one thread then calls ``decode``."""

    @abstractmethod
    def prepare(self, row: int, data: memoryview, rng: np.random.Generator | None) -> None:
        """Look at a row's bytes, and draw its random numbers. Raises DecodeError where they are visibly damaged."""

    @abstractmethod
    def decode(self, is_stopped: Callable[[], bool]) -> list[tuple[int, Exception]]:
        """Decode all prepared rows; return those that failed, each with its error.

        Raises:
            CancelledError: ``is_stopped`` says that the values are no longer wanted.
            MemoryLimitError: memory ran out.
        """

    @abstractmethod
    def tensor(self) -> Any:
        """Get all values as one tensor of the decoder's shape, (n, ...)."""

    @abstractmethod
    def __getitem__(self, row: int) -> Any:
        """Get the value of a row."""

    @abstractmethod
    def __setitem__(self, row: int, value: Any) -> None:
        """Replace the value of a row by another's."""
