"""Ctrl-C at a line that is counted, not at an instant: what a test finds it finds again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt once, before the nth line that this thread executes in some functions."""

    def __init__(self, functions: list[Callable[..., Any]], number: int) -> None:
        self._codes: set[CodeType] = {function.__code__ for function in functions}
        self._left = number
        self.was_raised = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code in self._codes else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self.was_raised:
            self._left -= 1
            if self._left < 0:
                self.was_raised = True
                raise KeyboardInterrupt
        return self._line
