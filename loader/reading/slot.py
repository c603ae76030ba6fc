"""State of one chunk in a reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..columns import Block


@dataclass(slots=True)
class Slot:
    """A chunk that is needed. It holds ``reserved`` bytes of the budget while it is in flight or resident."""

    uses: int = 0
    is_taken: bool = False  # a span has asked for it
    queued: bool = False
    in_flight: bool = False
    reserved: int = 0
    block: Block | None = None
    error: BaseException | None = None
