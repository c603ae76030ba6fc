"""Samples of one unit, as fields with values, to sequences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .config import FIELDS, Packing
from .documents import Documents
from .packed import Packed, pack_documents
from .tokenizer import TextEncoder, open_tokenizer
from .values import FieldValues, read_mask, read_texts, read_tokens, refuse_long

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
