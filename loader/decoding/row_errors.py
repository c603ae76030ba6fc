"""Errors of rows as users see them, with the sample's place in the data set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..columns import KEY_COLUMN
from ..errors import ConfigError, DecodeError

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from .row_work import RowError
    from .rows import Rows


def explain_row_error(error: RowError, rows: Rows, manifest: Manifest) -> Exception:
    """Make the error that users see: ours name the sample; those of a transform keep their type and get a note."""
    where, cause = describe_row(error.row, rows, manifest), error.cause
    if error.step != "transform" and isinstance(cause, DecodeError | ConfigError):
        kind = DecodeError if isinstance(cause, DecodeError) else ConfigError
        explained: Exception = kind(f"{where}: {cause}")
        explained.__cause__ = cause
        return explained
    cause.add_note(f"in {'transform=' if error.step == 'transform' else 'decoding'} of {where}")
    return cause


def describe_row(row: int, rows: Rows, manifest: Manifest) -> str:
    """Describe a row's sample for people: its id, its place in its shard, and its key where it has one."""
    sample_id = int(rows.ids[row])
    shard, number = manifest.shard_of(sample_id)
    key = rows.fields.get(KEY_COLUMN)
    named = f", key {key[row]!r}" if key is not None else ""
    return f"{manifest.name_sample(sample_id)} (number {number} of {shard}{named})"
