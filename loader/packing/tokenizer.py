"""Encode texts as token ids: with Hugging Face ``tokenizers`` or a user's function, which may be given by name."""

from __future__ import annotations

import hashlib
import os
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage import StorageError, open_store
from ..columns import AnyArray, Ragged
from ..decoding.row_work import RowError
from ..errors import ConfigError, DecodeError
from ..order.cached import cached_property

if TYPE_CHECKING:
    from .config import Tokenize

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_INSTALL = "install penstock[text], or give a function from a list of texts to their token ids"


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts; called by several threads at once. ``tokenizer`` is a ``tokenizers.Tokenizer`` or a function."""

    tokenizer: Any
    is_function: bool

    def encode(self, texts: list[str]) -> Ragged:
        """Token ids of each text, with the special tokens that the tokenizer itself adds. Releases the GIL.

        Raises:
            RowError: a text cannot be encoded, or a function returned something else than token ids; names the row.
        """
        if not texts:
            return Ragged.join([])
        try:
            encoded = self._encode(texts)
        except Exception as exc:
            raise self._find_culprit(texts, exc) from exc
        if self.is_function and (not isinstance(encoded, Sequence | np.ndarray) or len(encoded) != len(texts)):
            got = f"{len(encoded)} lists" if isinstance(encoded, Sequence | np.ndarray) else type(encoded).__name__
            raise ConfigError(
                f"tokenizer= returned {got} for {len(texts)} texts; it must return a list of token ids for each text"
            )
        if self.is_function:
            return Ragged.join([_to_ids(ids, row) for row, ids in enumerate(encoded)])
        return Ragged.join([np.array(encoding.ids, np.int32) for encoding in encoded])

    def _encode(self, texts: list[str]) -> Any:
        if self.is_function:
            return self.tokenizer(texts)
        return self._encode_batch(texts)

    @cached_property
    def _encode_batch(self) -> Any:
        # The fast one leaves out where each token lies in its text. tokenizers before 0.20.1 do not have it.
        return getattr(self.tokenizer, "encode_batch_fast", None) or self.tokenizer.encode_batch

    def _find_culprit(self, texts: list[str], raised: Exception) -> Exception:
        """The text that cannot be encoded, found one by one; what was raised if each alone can."""
        for row, text in enumerate(texts):
            try:
                self._encode([text])
            except Exception as exc:  # noqa: BLE001 - handed to the caller, who raises it
                return RowError(row, "result", DecodeError(f"its text cannot be tokenised: {exc!r}"))
        return DecodeError(f"tokenizer= raised {raised!r} on {len(texts)} texts together, and on none of them alone")

    def find_id(self, name: str, token: int | str | None) -> int | None:
        """The id of a token given by id or text; ``name`` is the argument's.

        Raises:
            ConfigError: the tokenizer has no such token.
        """
        if token is None:
            return None
        if isinstance(token, str):
            if self.is_function:
                raise ConfigError(f"{name}={token!r} with a function as the tokenizer; give the token's id")
            found: int | None = self.tokenizer.token_to_id(token)
            if found is None:
                raise ConfigError(f"{name}={token!r}: the tokenizer has no such token; give one that it has, or its id")
            return found
        if not self.is_function and self.tokenizer.id_to_token(token) is None:
            size = self.tokenizer.get_vocab_size()
            raise ConfigError(f"{name}={token}: the tokenizer has no such token id; it has {size} tokens")
        return token

    @cached_property
    def fingerprint(self) -> str | None:
        """A hash of the tokenizer; None of a function, which has none."""
        if self.is_function:
            return None
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()[:16]


def open_tokenizer(tokenizer: str | os.PathLike[str] | Tokenize | Any) -> TextEncoder:
    """The encoder of what a user gives as a tokenizer. Truncation and padding, which its file may ask for, are off.

    A text is the path of a ``tokenizer.json`` or of its folder, or the import path ``module:name`` of a tokenizer or a
    function, or the URL of a ``tokenizer.json`` or its folder in any store, such as ``hf://openai-community/gpt2``.

    Raises:
        ConfigError: it cannot be loaded, or is no tokenizer; says what would work.
    """
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = _find(tokenizer)
    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)  # inside the fast tokenizers of transformers
    if callable(getattr(fast, "encode_batch", None)) and callable(getattr(fast, "token_to_id", None)):
        return TextEncoder(_whole_documents(fast), is_function=False)
    if not callable(tokenizer):
        raise ConfigError(
            f"tokenizer={tokenizer!r}: give the path of a tokenizer.json, module:name, a tokenizers.Tokenizer, or a "
            "function from a list of texts to their token ids"
        )
    return TextEncoder(tokenizer, is_function=True)


def _find(given: str | os.PathLike[str]) -> Any:
    """The tokenizer, or the function, of a path or a name."""
    path, name = Path(given), given if isinstance(given, str) else ""
    if not path.exists() and _FUNCTION.fullmatch(name):
        return _import(name)
    try:
        from tokenizers import Tokenizer
    except ImportError as exc:
        raise ConfigError(
            f"tokenizer={str(path)!r} is read with tokenizers, which is not installed; {_INSTALL}"
        ) from exc
    if "://" in name:
        return _fetch(Tokenizer, name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"tokenizer={str(path)!r}: there is no file {file}; give the path of a tokenizer.json "
            f"(Tokenizer.from_pretrained(...).save(path) of tokenizers writes one), or of the Hugging Face Hub "
            "'hf://OWNER/NAME'"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as exc:
        raise ConfigError(
            f"tokenizer={str(path)!r}: {file} cannot be read as a tokenizer of Hugging Face ({exc}); "
            "give a tokenizer.json that this version of tokenizers reads"
        ) from exc


def _import(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"tokenizer={name!r}: cannot be imported: {exc}") from exc


def _fetch(kind: Any, url: str) -> Any:
    """The tokenizer of a URL. Raises ConfigError; StorageError where the store does not give it."""
    folder, _, name = (url if url.endswith(".json") else f"{url.rstrip('/')}/tokenizer.json").rpartition("/")
    store = open_store(folder + "/")
    try:
        return kind.from_str(bytes(store.get(name)).decode())
    except StorageError:
        raise
    except Exception as exc:
        raise ConfigError(
            f"tokenizer={url!r}: {name} cannot be read as a tokenizer of Hugging Face ({exc}); give a tokenizer.json "
            "that this version of tokenizers reads"
        ) from exc
    finally:
        store.close()


def _whole_documents(tokenizer: Any) -> Any:
    """The tokenizer without truncation and padding; a copy of it where it has them, for it is the user's."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    try:
        copy = type(tokenizer).from_str(tokenizer.to_str())
    except Exception as exc:
        raise ConfigError(
            f"the tokenizer truncates or pads, and cannot be copied ({exc}); call its no_truncation() and no_padding()"
        ) from exc
    copy.no_truncation()
    copy.no_padding()
    return copy


def _to_ids(ids: Any, row: int) -> AnyArray:
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as exc:
        raise _no_ids(row, type(ids).__name__) from exc
    if array.ndim != 1 or (len(array) and (array.dtype.kind not in "iu" or int(array.min()) < 0)):
        raise _no_ids(row, f"{array.dtype} of shape {array.shape}")
    return array


def _no_ids(row: int, got: str) -> RowError:
    return RowError(
        row, "result", DecodeError(f"tokenizer= returned {got}; it must return whole numbers from 0 on for each text")
    )
