"""The loader's arguments, checked before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from operator import index
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast, get_args

import numpy as np

from ...storage.suggestions import did_you_mean, unknown_choice
from ..columns import KEY_COLUMN
from ..decoding.decode import DecodeChoice, check_choice
from ..errors import ConfigError, PartitionError
from ..formats.schema import refuse_missing
from ..limits import parse_bytes
from ..order.plan import Share
from ..order.selecting import Selection, Subset, Weights
from ..ranks.detect import find_rank, find_rank_in_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..dataset.manifest import Manifest

LastBatch = Literal["drop", "pad", "partial"]
"""Fate of the samples that do not fill a global batch: left out, filled up with repeats, or a smaller batch."""

PlaceChoice = Literal["auto", "threads", "process"]
"""Place of all that makes batches: threads of the training process, or a process of its own beside it."""

SampleWeights = Sequence[float] | np.ndarray[Any, Any] | Mapping[str, float]

_WITH_KEYS = {"tar"}  # formats whose samples have a key beside their fields
# Types of columns, as formats write them into a manifest, whose values are numbers, times, or arrays of these.
_NUMBERS = re.compile(r"(bool|u?int\d*|float\d*|(timestamp|date|time|duration)\d*\[.*\]|ndarray:.+:.+)(\[[\d, ]+\])*")


def make_share(
    rank: int | None,
    world_size: int | None,
    batch_size: int | None,
    global_batch_size: int | None,
    *,
    pad: bool,
    mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] | None = None,
) -> Share:
    """Make this rank's share of every global batch; in a mesh, that of the group that the process belongs to.

    Raises:
        ConfigError, PartitionError: there is no such share; says what would work.
    """
    if mesh is None and data_dims is not None:
        raise ConfigError(f"data_dims={data_dims!r} without a mesh; give mesh= too")
    if mesh is not None and (rank is not None or world_size is not None):
        raise ConfigError(f"rank={rank}, world_size={world_size} and a mesh: give the one or the other")
    rank, world_size = find_rank(rank, world_size) if mesh is None else find_rank_in_mesh(mesh, data_dims)
    if (batch_size is None) == (global_batch_size is None):
        raise ConfigError(
            f"batch_size={batch_size}, global_batch_size={global_batch_size}: give one of them "
            "(batch_size is per rank, global_batch_size for all ranks together)"
        )
    if batch_size is not None:
        return Share(rank, world_size, check_at_least("batch_size", batch_size, 1) * world_size, pad=pad)
    assert global_batch_size is not None
    global_batch_size = check_at_least("global_batch_size", global_batch_size, 1)
    if global_batch_size % world_size:
        nearest = -(-global_batch_size // world_size) * world_size
        raise PartitionError(
            f"world_size={world_size} does not divide global_batch_size={global_batch_size}; "
            f"use {nearest}, or give batch_size= per rank"
        )
    return Share(rank, world_size, global_batch_size, pad=pad)


def fields_of(manifest: Manifest) -> list[str]:
    """List the fields of the data set's samples, with their key where they have one."""
    return [*manifest.fields, *([KEY_COLUMN] if manifest.format in _WITH_KEYS else [])]


def check_names(manifest: Manifest, columns: Sequence[str] | None, decode: DecodeChoice) -> list[str] | None:
    """Return the ``columns``. Refuse unknown fields, and decoders that would never be called.

    Raises:
        ConfigError: names the unknown fields, and the known ones.
        FormatError: not all shards have one of the columns; names it and a shard.
    """
    fields = fields_of(manifest)
    if columns is not None and (isinstance(columns, str | bytes) or not isinstance(columns, Iterable)):
        raise ConfigError(f"columns={columns!r}: give a list of names, of {sorted(fields)}")
    names = None if columns is None else list(columns)
    if names is not None:
        unknown = [name for name in names if name not in fields]
        if KEY_COLUMN in unknown:
            raise ConfigError(
                f"columns={names}: only samples of tar shards have a {KEY_COLUMN!r}, and this data set is "
                f"{manifest.format}; leave it out (with_ids=True adds sample ids). Its columns are {sorted(fields)}"
            )
        if not names:
            raise ConfigError(
                f"columns={names} reads nothing; leave columns= out to read all fields, or name some of "
                f"{sorted(manifest.fields)}"
            )
        if unknown:
            raise ConfigError(
                f"columns={names}: {unknown} is not among {sorted(manifest.fields)}{did_you_mean(unknown, fields)}"
            )
    refuse_missing(manifest.schema, names)
    check_choice(decode, fields, [name for name in fields if _is_value(manifest, name)])
    return names


def _is_value(manifest: Manifest, name: str) -> bool:
    """Return whether a field comes as numbers or arrays of whole columns, which no decoder is called with."""
    column = manifest.schema.get("columns", {}).get(name)
    return column is not None and _NUMBERS.fullmatch(str(column["type"])) is not None


def make_selection(manifest: Manifest, subset: object, weights: SampleWeights | None) -> Selection | None:
    """Select the samples of an epoch; None for all of them, each once. O(samples) time.

    Raises:
        ConfigError, PartitionError: an argument is of another type, does not fit the data set, or leaves nothing.
    """
    if subset is not None and not isinstance(subset, Subset):
        hint = f"one of the parts, such as split[{next(iter(subset))!r}]" if isinstance(subset, dict) and subset else ""
        raise ConfigError(f"subset={subset!r}: give {hint or 'a Subset, such as Subset.share(0, 0.1)'}")
    if weights is None:
        read = None
    elif isinstance(weights, Mapping):
        read = Weights.read(_shard_weights(manifest, weights)[manifest.shard_index], by_chunk=True)
    else:
        read = Weights.read(weights)
    return None if subset is None and read is None else Selection(manifest.samples, subset, read)


def _shard_weights(manifest: Manifest, weights: Mapping[str, float]) -> np.ndarray[Any, Any]:
    """Compute (shards,): each shard's weight, by the first pattern that its name fits."""
    keys = [shard.key for shard in manifest.shards]
    fits = [next((pattern for pattern in weights if fnmatchcase(key, pattern)), None) for key in keys]
    if None in fits:
        others = fits.count(None) - 1
        raise ConfigError(
            f"weights: no pattern of {list(weights)} fits the shard {keys[fits.index(None)]!r}"
            f"{f' and {others:,} others' if others else ''}; add '*' last for all others"
        )
    idle = [pattern for pattern in weights if pattern not in fits]
    if idle:
        raise ConfigError(f"weights: no shard has its weight from {idle}; shards are named like {keys[0]!r}")
    bad = [f"{pattern!r}: {weight!r}" for pattern, weight in weights.items() if not _is_weight(weight)]
    if bad:
        raise ConfigError(f"weights: {', '.join(bad)}: weights are positive, finite numbers")
    return np.array([weights[str(pattern)] for pattern in fits], np.float64)


def _is_weight(weight: object) -> bool:
    return isinstance(weight, int | float | np.number) and bool(0 < weight < float("inf"))


def check_selection(*, shuffle: bool, is_weighted: bool, is_audited: bool) -> None:
    """Raise ConfigError where weights conflict with other arguments."""
    if is_weighted and not shuffle:
        raise ConfigError("weights= with shuffle=False: drawing by weights is random; leave out one of the two")
    if is_weighted and is_audited:
        raise ConfigError(
            "weights= with audit_dir=: an audit proves that each sample comes once, and weights repeat some; leave out "
            "one of the two"
        )


def check_place(place: object) -> None:
    """Raise ConfigError unless it is a ``PlaceChoice``."""
    if place not in get_args(PlaceChoice):
        raise ConfigError(unknown_choice("place", place, get_args(PlaceChoice)))


def check_last_batch(last_batch: LastBatch) -> None:
    """Raise ConfigError unless ``last_batch`` is known."""
    if last_batch not in get_args(LastBatch):
        raise ConfigError(unknown_choice("last_batch", last_batch, get_args(LastBatch)))


def check_shuffle(shuffle: object) -> None:
    """Raise ConfigError unless ``shuffle`` is True or False: elsewhere it is the size of a buffer."""
    if not isinstance(shuffle, bool):
        raise ConfigError(
            f"shuffle={shuffle!r}: must be True or False; window= is how far samples mix, in chunks, and seed= the seed"
        )


def check_order(**choices: object) -> None:
    """Raise ConfigError for text that is not "auto": ``lanes``, ``window`` and ``piece`` are numbers else."""
    for name, choice in choices.items():
        if isinstance(choice, str) and choice != "auto":
            raise ConfigError(f"{name}={choice!r}: must be 'auto' or a whole number{did_you_mean(choice, ['auto'])}")


def parse_cache_limit(cache_dir: str | PathLike[str] | None, cache_limit: int | str | None) -> int | None:
    """Parse the cache's size in bytes, None if not given. Raises ConfigError if it is no size, or there is no cache."""
    if cache_limit is None:
        return None
    if cache_dir is None:
        raise ConfigError(f"cache_limit={cache_limit!r} without a cache; give cache_dir= too")
    return parse_bytes(cache_limit, "cache_limit")


def check_at_least(name: str, value: object, least: int) -> int:
    """Read a whole number, which may be numpy's. Raises ConfigError unless it is at least ``least``."""
    with suppress(TypeError):  # as arrays and floats raise
        if not isinstance(value, bool | np.bool_) and (whole := index(cast(SupportsIndex, value))) >= least:
            return whole
    raise ConfigError(f"{name}={value!r}: must be a whole number of at least {least}")
