"""Keys that come again in an archive, not one after another: parts of a sample, or an older one beside a newer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...errors import FormatError
from .blocks import show_name
from .census import Census, find_keys

if TYPE_CHECKING:
    from ..windows import Windows

_LOOKED_AT = 16  # pairs


def doubt_keys(windows: Windows, shard: str, census: Census) -> str:
    """Say what is doubtful about a census of which samples seem to share keys; "" where their keys are others.

    A sample whose fields stand apart would come in parts. One with a field that an earlier one has may be repeated on
    purpose, and both are read.

    Raises:
        FormatError: samples are in parts.
    """
    parts = census.again[census.apart][:_LOOKED_AT]
    repeats = census.again[~census.apart]
    found = find_keys(windows, shard, census, np.concatenate([parts, repeats[:_LOOKED_AT]]).ravel())
    for one, other in parts.tolist():
        (key, first, _), (again, second, offset) = found[one], found[other]
        if key == again:
            raise FormatError(
                shard,
                f"member '{second}' is of the sample '{show_name(key)}', which began with '{first}', but other samples "
                "lie between: it would come in parts. Write the shard with the members of each sample one after "
                "another, as `tar --sort=name` or `penstock pack` does",
                offset=offset,
            )
    for one, other in repeats[:_LOOKED_AT].tolist():
        (key, first, _), (again, second, offset) = found[one], found[other]
        if key == again:
            return (
                f"the key '{show_name(key)}' comes again at byte {offset} ('{second}' after '{first}'; {len(repeats)} "
                "such pairs): where a newer sample was appended, as by `tar -r` or `tar -u`, the older one is read, too"
            )
    return ""
