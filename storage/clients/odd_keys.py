"""Odd keys, as ``train//a.tar``: no store here can read them, so listings leave them out and warn once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

from ..checks import is_key
from ..store import ObjectInfo
from ..suggestions import list_some

_LOG = logging.getLogger(__name__)
_NAMED = 3
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_warned: set[str] = set()  # the places whose odd keys this process has warned of


def has_name(key: str) -> bool:
    """Return whether obstore can read this name: it has no empty, '.' or '..' part, and no control character."""
    return is_key(key) and _CONTROL.search(key) is None


def leave_out_odd(
    url: str, found: Sequence[ObjectInfo], is_usual: Callable[[str], bool] = has_name
) -> list[ObjectInfo]:
    """The objects of a listing whose keys are usual; warns, once a place, of those that are not."""
    odd = [info.key for info in found if not is_usual(info.key)]
    if odd and url not in _warned:
        _warned.add(url)
        _LOG.warning(
            "%s: these keys cannot be read and are left out: %s; they have an empty, '.' or '..' part or a control "
            "character, so rename them if they are data",
            url,
            list_some([*map(repr, odd)], _NAMED),
        )
    return [info for info in found if is_usual(info.key)] if odd else list(found)
