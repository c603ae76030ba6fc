"""Settings of packing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, get_args

import numpy as np

from ...storage.suggestions import did_you_mean, unknown_choice
from ..errors import ConfigError

PackingMethod = Literal["best_fit", "concat"]
LongDocuments = Literal["split", "truncate", "drop", "error"]
Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]

FIELDS = {"tokens": np.int64, "position_ids": np.int64, "document_ids": np.int32, "loss_mask": np.bool_}
"""The arrays (sequences, seq_len) of a batch, and their dtypes."""
BATCH_FIELDS = (*FIELDS, "cu_seqlens", "max_seqlen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Packs documents of any length into sequences of ``seq_len`` tokens, each of which is one output of the loader.

    A batch of B sequences has ``tokens`` (B, seq_len) int64; ``position_ids`` (B, seq_len) int64, from 0 in each
    document; ``document_ids`` (B, seq_len) int32, 0, 1, ... in each sequence, -1 for padding; ``loss_mask``
    (B, seq_len) bool, true for tokens that are predicted: neither padding, nor a document's first token, nor masked by
    the sample; and, for attention of variable length over all B * seq_len tokens, ``cu_seqlens`` (D + 1,) int32 and
    ``max_seqlen``, with each sequence's padding as a document of its own.

    Args:
        seq_len: tokens of a sequence.
        field: the field of a sample that is its document: token ids, or text where there is a ``tokenizer``.
        tokenizer: path or URL of a ``tokenizer.json`` or its folder (``hf://OWNER/NAME``), a ``tokenizers.Tokenizer``,
            or a function from a list of texts to their token ids, or its ``module:name``.
        method: "best_fit" cuts no document that fits into a sequence (Ding et al. 2024); "concat" lays documents end to
            end and cuts the run every ``seq_len`` tokens.
        long_documents: what happens to documents of more than ``seq_len`` tokens. "split" cuts them into documents of
            ``seq_len`` tokens and a rest, "truncate" keeps their first ``seq_len``, "drop" leaves them out, "error"
            raises.
        mask_field: the field of a sample with one bool or 0/1 a token: whether it counts in the loss (chat, preference
            data). With a tokenizer, token ids and mask must come from ``transform=`` instead.
        eos: token that is put after each document that does not end with it; an id, or with a tokenizer its text.
        split_at: token id that ends a document inside ``field``, for samples that are runs of several, such as the
            sequences of a raw token file; usually the same as ``eos``.
        pad: token of the padding; an id, or with a tokenizer its text.
        fields: which of a batch's fields are made, such as ``["tokens", "document_ids"]``; None for all. What nobody
            reads need not be made: all take 21 bytes a token, ``tokens`` alone 8.
        buffer_size: how many samples of a lane are packed together. More waste less padding, and take more memory and
            time before the first batch; "auto" packs together what makes about 500 sequences.
    """

    seq_len: int
    field: str = "tokens"
    tokenizer: str | PathLike[str] | Tokenize | Any | None = None
    method: PackingMethod = "best_fit"
    long_documents: LongDocuments = "split"
    mask_field: str | None = None
    eos: int | str | None = None
    split_at: int | None = None
    pad: int | str = 0
    fields: Sequence[str] | None = None
    buffer_size: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        self._read_int("seq_len", 2, "a sequence has at least two tokens, one of which is predicted")
        if not isinstance(self.buffer_size, str) or self.buffer_size != "auto":
            self._read_int("buffer_size", 1, "at least one sample is packed at a time, or 'auto'")
        for name in ("eos", "split_at", "pad"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "split_at":
                if self.tokenizer is None:
                    raise ConfigError(f"{name}={value!r} without a tokenizer that knows it; give the token's id")
            elif value is not None or name == "pad":
                self._read_int(name, 0, "token ids are whole numbers from 0 on")
        for name, kind in (("method", PackingMethod), ("long_documents", LongDocuments)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(unknown_choice(name, getattr(self, name), get_args(kind)))
        for name in ("field", "mask_field"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and (name == "field" or value is not None):
                raise ConfigError(f"{name}={value!r}: give the name of a field, such as 'tokens'")
        if self.mask_field is not None and self.tokenizer is not None:
            raise ConfigError(
                f"mask_field={self.mask_field!r} with a tokenizer: nobody knows the mask of tokens before there are "
                "tokens; make both in transform= and leave the tokenizer out"
            )
        if self.mask_field == self.field:
            raise ConfigError(f"mask_field={self.mask_field!r} is the field of the tokens; name another")
        if self.fields is not None:
            self._read_fields(self.fields)

    @property
    def batch_fields(self) -> tuple[str, ...]:
        """The fields that a batch has, in their order."""
        return BATCH_FIELDS if self.fields is None else tuple(name for name in BATCH_FIELDS if name in self.fields)

    def _read_fields(self, given: Sequence[str]) -> None:
        names = [given] if isinstance(given, str) else list(given)
        if not names or len(set(names)) < len(names) or not set(names) <= set(BATCH_FIELDS):
            raise ConfigError(
                f"fields={given!r}: name some of {', '.join(BATCH_FIELDS)}, each once, or None for all"
                f"{did_you_mean([name for name in names if name not in BATCH_FIELDS], BATCH_FIELDS)}"
            )
        object.__setattr__(self, "fields", tuple(names))

    def _read_int(self, name: str, least: int, why: str) -> None:
        """Take a setting, which may be one of numpy's integers, as one of Python's, as states keep it."""
        value = getattr(self, name)
        try:
            number = operator.index(value)
        except TypeError:
            number = least - 1
        if number < least or isinstance(value, bool) or number > (1 << 31) - 1:
            raise ConfigError(f"{name}={value!r}: {why}")
        object.__setattr__(self, name, number)
