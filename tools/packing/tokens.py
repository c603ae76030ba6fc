"""Shards of raw tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...loader.columns import KEY_COLUMN, AnyArray, Ragged
from ...loader.dataset.manifest import Manifest
from ...loader.errors import ConfigError, DatasetError
from ...loader.packing.tokenizer import TextEncoder
from ...storage.suggestions import did_you_mean
from .writer import Shard

_NEEDS_TOKENIZER = (
    "the samples are text; give tokenizer=, the path of a tokenizer.json, or a function from str to a list of integers"
)


class TokensWriter:
    """Raw little-endian tokens, one text after another; every shard holds whole sequences. A unit is a token."""

    suffix = ".bin"
    takes_batches = False

    def __init__(self, shard_bytes: int, *, seq_len: int, dtype: str) -> None:
        if dtype not in ("uint16", "uint32"):
            raise ConfigError(f"dtype={dtype!r}: packed tokens are uint16 or uint32")
        self.added = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._limit = np.iinfo(dtype).max
        self._seq_len = seq_len
        self._shard_tokens = max(1, shard_bytes // self._dtype.itemsize // seq_len) * seq_len
        self._count = 0
        self._held: list[AnyArray] = []
        self._held_tokens = 0

    def resume(self, state: Mapping[str, Any], units: int) -> None:
        self.added = units

    def units(self, item: Any) -> int:
        return len(self._tokens(item))

    def rest(self, item: Any, units: int) -> Any:
        return self._tokens(item)[units:]

    def samples(self) -> int:
        return self.added // self._seq_len

    def companions(self, manifest: Manifest) -> Mapping[str, bytes]:
        return {}

    def notes(self) -> Sequence[str]:
        return ()

    @property
    def dropped(self) -> str | None:
        """Describe the tokens that did not fill a last sequence; None if there were none."""
        left = self.added % self._seq_len
        if not left:
            return None
        noun = "token, which does" if left == 1 else f"{left} tokens, which do"
        return f"the last {noun} not fill a sequence of {self._seq_len}"

    def add(self, item: Any) -> list[Shard]:
        tokens = self._tokens(item)
        self._count += 1
        self._held.append(tokens)
        self._held_tokens += len(tokens)
        self.added += len(tokens)
        full = []
        while self._held_tokens >= self._shard_tokens:
            full.append(self._take(self._shard_tokens))
        return full

    def finish(self) -> list[Shard]:
        whole = self._held_tokens // self._seq_len * self._seq_len
        return [self._take(whole)] if whole else []

    def _take(self, tokens: int) -> Shard:
        run = np.concatenate(self._held) if len(self._held) > 1 else self._held[0]
        self._held = [run[tokens:]]
        self._held_tokens = len(run) - tokens
        return Shard(run[:tokens].tobytes(), self.added - self._held_tokens)

    def _tokens(self, value: Any) -> AnyArray:
        if isinstance(value, (str, bytes, Mapping)):
            raise ConfigError(_NEEDS_TOKENIZER)
        array = np.asarray(value)
        if array.size == 0:
            return np.empty(0, self._dtype)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DatasetError(
                f"sample {self._count} is {array.dtype} of shape {array.shape}; tokens must be a list of integers"
            )
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > self._limit:
            raise DatasetError(
                f"sample {self._count} has token {low if low < 0 else high}, which {self._dtype.name} cannot hold"
                + ("; use dtype='uint32'" if low >= 0 and high < 1 << 32 else "")
            )
        return array.astype(self._dtype)


class Tokenize:
    """Samples to their tokens, or to texts that ``encoder`` turns into them; ``field`` holds either."""

    def __init__(self, encoder: TextEncoder | None, field: str | None) -> None:
        self._encoder = encoder
        self._field = field
        self._takes_lists: bool | None = None  # a function of one text at a time, or of a list; None: not known yet

    @property
    def takes_many(self) -> bool:
        """Return whether ``encode_all`` beats one text at a time: for a tokenizer, not for a function."""
        return self._encoder is not None and not self._encoder.is_function

    def __call__(self, sample: Any) -> Any:
        """The tokens of one sample, a 1-D array of integers unless the tokenizer gave something else."""
        value = self.read(sample)
        return _to_array(self._encode(value)) if isinstance(value, str) else value

    def read(self, sample: Any) -> Any:
        """A sample's text, or an array of the tokens that it has already."""
        value = self._pick(sample) if isinstance(sample, Mapping) else sample
        if isinstance(value, (bytes, bytearray)):
            try:
                value = value.decode()
            except UnicodeDecodeError as exc:
                raise DatasetError(f"not UTF-8 text ({exc}); use text or integers") from exc
        if not isinstance(value, str):
            return _to_array(value)
        if self._encoder is None:
            raise ConfigError(_NEEDS_TOKENIZER)
        return value

    def encode_all(self, texts: list[str]) -> Ragged:
        """The tokens of texts, on all cores. Raises RowError, which names the text."""
        assert self._encoder is not None
        return self._encoder.encode(texts)

    def _encode(self, text: str) -> Any:
        assert self._encoder is not None
        if not self._encoder.is_function:
            return self._encoder.encode([text])[0]
        function = self._encoder.tokenizer
        if self._takes_lists is None and text:
            tokens, self._takes_lists = _try_both(function, text)
            return tokens
        return function([text])[0] if self._takes_lists else function(text)

    def _pick(self, sample: Mapping[str, Any]) -> Any:
        if self._field is not None:
            if self._field not in sample:
                raise DatasetError(
                    f"no field {self._field!r}; it has {sorted(sample)}{did_you_mean(self._field, sample)}"
                )
            return sample[self._field]
        names = [name for name in sample if name != KEY_COLUMN]
        for name in ("tokens", "input_ids", "text", "txt"):
            if name in names:
                return sample[name]
        raise ConfigError(f"a sample has the fields {sorted(names)}; name the one with the text with field=")


def _to_array(value: Any) -> Any:
    if value is None:
        raise DatasetError("no text, or the tokenizer gave None; drop such samples with map=")
    # Integers beyond int64 would become floats or objects here, and be refused as such.
    return value if isinstance(value, np.ndarray) else np.asarray(list(value))


def _try_both(function: Callable[[Any], Any], text: str) -> tuple[Any, bool]:
    """The tokens of a text, and whether the function takes lists of texts, as that of ``Packing`` does.

    Such a function raises at a text, or takes it for a list of letters.
    """
    try:
        tokens = function(text)
    except Exception:
        try:
            (only,) = function([text])
            found = np.asarray(only)
        except Exception:  # noqa: BLE001 - the error at one text is what the user looks for
            found = np.empty((0, 0))
        if found.ndim == 1 and found.dtype.kind in "iu":
            return only, True
        raise
    is_list = isinstance(tokens, list | tuple | np.ndarray) and len(tokens) > 0
    if is_list and isinstance(tokens[0], list | tuple | np.ndarray):
        (only,) = function([text])
        return only, True
    return tokens, False
