"""Samples of one unit, as fields with values, to sequences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..columns import AnyArray, IntArray, Ragged
from ..decoding.row_work import RowError
from ..errors import DecodeError
from .config import FIELDS, Packing
from .packed import Documents, Packed, pack_documents
from .tokenizer import TextEncoder, open_tokenizer

FieldValues = AnyArray | Ragged | Sequence[Any]


def read_tokens(values: FieldValues, field: str) -> Ragged:
    """Token ids of n documents: of an (n, k) array, of arrays, tensors or lists of integers.

    Raises:
        RowError: a value is missing, or is not integers from 0 on; names the row.
    """
    ragged = _to_ragged(values, field, "iu")
    if ragged.values.dtype.kind not in "iu":
        kind = ragged.values.dtype
        raise _error(0, f"field {field!r} holds {kind}, and token ids are integers; name the field that has them")
    if ragged.values.dtype.kind == "i" and len(ragged.values) and int(ragged.values.min()) < 0:
        at = int(np.flatnonzero(ragged.values < 0)[0])
        raise _error(
            _row_of(at, ragged), f"field {field!r} holds {ragged.values[at]}, and token ids are whole numbers from 0 on"
        )
    return ragged


def read_mask(values: FieldValues, field: str, tokens: Ragged, token_field: str) -> AnyArray:
    """Read the mask of tokens that count in the loss, (T,) bool, for documents of ``tokens``.

    Raises:
        RowError: a mask is missing, has another length than its tokens, or holds something else than 0 and 1.
    """
    mask = _to_ragged(values, field, "biuf")
    lengths, wanted = np.diff(mask.offsets), np.diff(tokens.offsets)
    wrong = np.flatnonzero(lengths != wanted)
    if len(wrong):
        row = int(wrong[0])
        raise _error(
            row,
            f"mask {field!r} has {lengths[row]} values for the {wanted[row]} tokens of {token_field!r}",
        )
    if mask.values.dtype.kind == "b" or not len(mask.values):
        return mask.values.astype(np.bool_, copy=False)
    is_other = (mask.values != 0) & (mask.values != 1)
    if mask.values.dtype.kind not in "iuf" or is_other.any():
        at = int(np.argmax(is_other))
        raise _error(_row_of(at, mask), f"mask {field!r} holds {mask.values[at]}; give a bool, or 0 and 1, a token")
    return mask.values.astype(np.bool_)


def read_texts(values: FieldValues, field: str) -> list[str]:
    """Texts of n documents, given as str or as UTF-8.

    Raises:
        RowError: a value is missing, or is no text; names the row.
    """
    texts = []
    for row, value in enumerate(values):
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, bytes | bytearray | memoryview):
            try:
                texts.append(str(value, "utf-8"))
            except UnicodeDecodeError as exc:
                raise _error(row, f"field {field!r} is not UTF-8 ({exc}); drop or repair it in transform=") from exc
        elif value is None:
            raise _error(row, _missing(field))
        else:
            raise _error(
                row, f"field {field!r} is {type(value).__name__}, not text; leave tokenizer= out for token ids"
            )
    return texts


def _to_ragged(values: FieldValues, field: str, kinds: str) -> Ragged:
    if isinstance(values, Ragged):
        return values
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return Ragged(values.reshape(-1), np.arange(len(values) + 1, dtype=np.int64) * values.shape[1])
    return Ragged.join([_to_array(value, row, field, kinds) for row, value in enumerate(values)])


def _to_array(value: Any, row: int, field: str, kinds: str) -> AnyArray:
    if value is None:
        raise _error(row, _missing(field))
    if isinstance(value, str | bytes | bytearray | memoryview):
        raise _error(row, f"field {field!r} is {type(value).__name__}, not a list of numbers; give tokenizer= for text")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as exc:
        raise _error(row, f"field {field!r} is no list of numbers: {exc}") from exc
    if array.ndim == 1 and not len(array):
        return np.empty(0, np.uint8)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        wanted = "token ids" if kinds == "iu" else "a mask"
        raise _error(row, f"field {field!r} is {array.dtype} of shape {array.shape}; give a flat list for {wanted}")
    return array


def _missing(field: str) -> str:
    return f"has no field {field!r}, which is packed; name another, or drop the sample in transform="


def _row_of(at: int, ragged: Ragged) -> int:
    return int(np.searchsorted(ragged.offsets, at, side="right")) - 1


def _error(row: int, problem: str) -> RowError:
    return RowError(row, "result", DecodeError(problem))


def refuse_long(lengths: IntArray, rows: IntArray, seq_len: int, field: str) -> None:
    """Refuse documents that are longer than a sequence; ``rows`` are those of the samples that they come from.

    Raises:
        RowError: names the first.
    """
    long = np.flatnonzero(lengths > seq_len)
    if len(long):
        first = int(long[0])
        raise _error(
            int(rows[first]),
            f"field {field!r} has a document of {lengths[first]} tokens, more than seq_len={seq_len}; choose "
            "long_documents='split', 'truncate' or 'drop', or a longer seq_len",
        )


# About this many sequences are made of a unit: with more, less is padding, but more is held in memory and worked on
# before the first batch.
_UNIT_SEQUENCES, _TOKEN_BYTES = 512, 4
_MOST_UNIT_BYTES = 64 << 20
_LEAST_UNIT, _MOST_UNIT = 16, 16384


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs samples; called by several threads at once. ``packing`` names its tokens by id."""

    packing: Packing
    encoder: TextEncoder | None

    @classmethod
    def open(cls, packing: Packing) -> Packer:
        """Loads the tokenizer.

        Raises:
            ConfigError: it cannot be loaded, or does not know a token that the settings name.
        """
        if packing.tokenizer is None:
            return cls(packing, None)
        encoder = open_tokenizer(packing.tokenizer)
        eos, pad = (encoder.find_id(name, getattr(packing, name)) for name in ("eos", "pad"))
        assert pad is not None
        return cls(replace(packing, eos=eos, pad=pad), encoder)

    @property
    def needed(self) -> tuple[str, ...]:
        """The fields of a sample that are used."""
        mask = self.packing.mask_field
        return (self.packing.field,) if mask is None else (self.packing.field, mask)

    @property
    def sequence_bytes(self) -> int:
        """Least number of bytes that a sequence takes in a batch."""
        widths = [np.dtype(FIELDS[name]).itemsize for name in self.packing.batch_fields if name in FIELDS]
        return self.packing.seq_len * max(1, sum(widths))

    def choose_unit(self, row_bytes: int) -> int:
        """Choose how many samples of about ``row_bytes`` each are packed together."""
        if self.packing.buffer_size != "auto":
            return self.packing.buffer_size
        wanted = min(_MOST_UNIT_BYTES, _UNIT_SEQUENCES * self.packing.seq_len * _TOKEN_BYTES)
        return min(_MOST_UNIT, max(_LEAST_UNIT, wanted // row_bytes))

    def pack(self, values: Mapping[str, FieldValues]) -> Packed:
        """Pack n samples: ``values`` are n of each field. Fields that are not used are left out.

        Raises:
            RowError: a sample's document cannot be read, tokenised or packed; names the row.
        """
        packing = self.packing
        given = values.get(packing.field, [None])
        if self.encoder is not None:
            tokens = self.encoder.encode(read_texts(given, packing.field))
        else:
            tokens = read_tokens(given, packing.field)
        mask = None
        if packing.mask_field is not None:
            mask = read_mask(values.get(packing.mask_field, [None]), packing.mask_field, tokens, packing.field)
        documents = Documents(tokens.values, tokens.offsets, mask)
        if packing.long_documents == "error":
            self._refuse_long(documents)
        return pack_documents(documents, packing)

    def _refuse_long(self, documents: Documents) -> None:
        rows = np.arange(len(documents), dtype=np.int64)
        if self.packing.split_at is not None:
            documents, rows = documents.split_after(self.packing.split_at)
        if isinstance(self.packing.eos, int):
            documents = documents.end_with(self.packing.eos)
        refuse_long(documents.lengths, rows, self.packing.seq_len, self.packing.field)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides which sequences documents become, but for what a function tokenises to."""
        names = [one.name for one in fields(self.packing) if one.name not in ("tokenizer", "fields")]
        said: dict[str, Any] = {name: getattr(self.packing, name) for name in names}
        said["tokenizer"] = None if self.encoder is None else (self.encoder.fingerprint or "function")
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
