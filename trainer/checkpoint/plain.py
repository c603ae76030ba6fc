"""Encode values that JSON returns unchanged: all that a checkpoint may hold of a loader's state and of the counts."""

from __future__ import annotations

import json
from typing import Any

from ..errors import CheckpointError

_CURE = (
    "Use mappings with text as keys, lists, text, numbers, True, False and None, in a loader's state_dict too, and "
    "turn them back where the state is loaded; keep tensors in model or rank_state"
)


def encode_plain(extra: Any) -> str:
    """As JSON, if it can be read back as it is.

    Raises:
        CheckpointError: it cannot; names the place and what is there.
    """
    try:
        text = json.dumps(extra)
    except (TypeError, ValueError) as exc:
        place = None if isinstance(exc, ValueError) else _find_changed(extra, "extra")  # the other is of a circle
        raise CheckpointError(f"extra cannot be written as JSON: {place or exc}. {_CURE}") from exc
    changed = _find_changed(extra, "extra")
    if changed is not None:
        raise CheckpointError(f"extra cannot be written as JSON: {changed}. {_CURE}")
    return text


def _find_changed(value: Any, place: str) -> str | None:
    """The first place that would come back as something else, or not at all, in words."""
    if isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                return f"{place} has the key {key!r} ({type(key).__name__}), which would come back as text"
            if (found := _find_changed(one, f"{place}[{key!r}]")) is not None:
                return found
        return None
    if isinstance(value, list):
        changed = (_find_changed(one, f"{place}[{index}]") for index, one in enumerate(value))
        return next((found for found in changed if found is not None), None)
    if isinstance(value, tuple):
        return f"{place} is a tuple, which would come back as a list"
    return (
        None if value is None or isinstance(value, str | int | float) else f"{place} is of type {type(value).__name__}"
    )
