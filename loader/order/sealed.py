"""The checksum in a state: numbers that were changed by hand, or damaged in a copy, are refused instead of believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..errors import StateMismatchError

CHECKSUM = "checksum"
_DIGITS = 16


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the checksum of all that is in it, which is JSON-able."""
    # Positions may be numpy's numbers.
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), default=int)
    return {**state, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}


def unseal(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the checksum, to be changed."""
    return {name: value for name, value in state.items() if name != CHECKSUM}


def check_seal(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Compare the checksum of a state, if it has one, with that of what was read from it, as ``seal`` returned it.

    Raises:
        StateMismatchError: they differ.
    """
    if CHECKSUM in state and state[CHECKSUM] != loaded[CHECKSUM]:
        raise StateMismatchError(
            f"a damaged loader state: its checksum is {str(state[CHECKSUM])[:40]!r}, and its numbers have "
            f"{loaded[CHECKSUM]!r}: one of them was changed after state_dict() returned it. Load the state as it was "
            f"saved; to move one, use `penstock state skip`. A state without {CHECKSUM!r} is loaded as it is"
        )
