"""Values of a field, by readers for its extension or many together; NumPy's .npy and .npz, read within bounds.

A size in a header is compared with the data before memory is taken for it."""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import ConfigError, DecodeError, MemoryLimitError

if TYPE_CHECKING:
    from ..columns import AnyArray


T = TypeVar("T")

_MOST_ARRAYS = 10_000
# Limits of one archive's arrays together: this many bytes, or this many times the archive, if that is more.
_MOST_BYTES, _MOST_RATIO = 1 << 30, 8
_MOST_VALUE_BYTES = 1 << 20  # of a value of an empty array
# The header that NumPy writes of numbers: magic, version 1.0, its length, then the text of a dict.
_USUAL = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<|>](?:b1|[iu][1248]|f[248]))', 'fortran_order': False, "
    rb"'shape': \(((?:(?:0|[1-9][0-9]{0,8}), ?)*(?:0|[1-9][0-9]{0,8})?)\), \} *\n",
    re.DOTALL,
)
_TRIES = 20


def read_npy(data: memoryview) -> AnyArray:
    """Read the array of a .npy. Raises DecodeError or ValueError where it is invalid, cut short, or holds objects."""
    usual = _read_usual(data)
    return _again(lambda: _read_any(data)) if usual is None else usual


def _again(read: Callable[[], T]) -> T:
    """Call ``read``, again after a SystemError, and return its result.

    NumPy reads headers by Python's ``ast``. In some versions of Python, 3.11.7 among them, all threads share its count
    of depth, and a call that finds another's count there raises SystemError, which says nothing of the data.
    """
    for _ in range(_TRIES):
        with suppress(SystemError):
            return read()
    return read()


def _read_any(data: memoryview) -> AnyArray:
    _check_size(io.BytesIO(data), len(data))
    return _read(io.BytesIO(data))


def _read_usual(data: memoryview) -> AnyArray | None:
    """Read a .npy of numbers as NumPy writes it; None for any other, or one that is cut short."""
    found = _USUAL.match(data)
    if found is None or found.end() != 10 + int.from_bytes(found[1], "little"):
        return None
    shape = [int(side) for side in found[3].replace(b" ", b"").split(b",") if side]
    dtype = np.dtype(found[2].decode())
    count = math.prod(shape)
    is_tuple = len(shape) != 1 or found[3].endswith(b",")
    if not is_tuple or not count or count * dtype.itemsize > len(data) - found.end():
        return None
    return np.frombuffer(data, dtype, count, found.end()).reshape(shape).copy()


def read_npz(data: memoryview) -> dict[str, Any]:
    """Read the arrays of a .npz by name; members that are no .npy as bytes.

    Raises:
        DecodeError: it is none, or its arrays are too many or too large together.
    """
    return _again(lambda: _read_archive(data))


def _read_archive(data: memoryview) -> dict[str, Any]:
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise DecodeError(f"not an .npz archive: {len(data)} bytes that start with {bytes(data[:8])!r}")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        total, most = sum(member.file_size for member in members), max(_MOST_BYTES, _MOST_RATIO * len(data))
        if len(members) > _MOST_ARRAYS or total > most:
            raise DecodeError(
                f"an .npz of {len(data):,} bytes opens to {len(members):,} arrays of {total:,} bytes; no more than "
                f"{_MOST_ARRAYS:,} arrays of {most:,} are opened. Write fewer or smaller ones, or give decode= a "
                "function of your own"
            )
        return {member.filename.removesuffix(".npy"): _read_member(archive, member) for member in members}


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> AnyArray | bytes:
    with archive.open(member) as stream:
        if stream.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            return archive.read(member)
    with archive.open(member) as stream:
        _check_size(stream, member.file_size)
    with archive.open(member) as stream:
        return _read(stream)


def _read(stream: IO[bytes]) -> AnyArray:
    array: AnyArray = np.lib.format.read_array(stream, allow_pickle=False)  # type: ignore[no-untyped-call]
    return array


def _check_size(stream: IO[bytes], size: int) -> None:
    """Raise DecodeError unless the values that a .npy's header states fit into its ``size`` bytes."""
    version = np.lib.format.read_magic(stream)  # type: ignore[no-untyped-call]
    if version > (2, 0):  # of 3.0 only names of fields can differ from 2.0, and their encoding is no matter here
        version = (2, 0)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, _, dtype = read(stream)  # type: ignore[no-untyped-call]
    count, held = math.prod(shape), size - stream.tell()
    if dtype.hasobject:
        return  # refused by NumPy, in its words
    # NumPy allocates one value for an array of none.
    is_wide = not count and dtype.itemsize > max(held, _MOST_VALUE_BYTES)
    is_odd = any(side < 0 for side in shape) or (count and not dtype.itemsize) or _is_overflown(dtype)
    if is_odd or is_wide or count * dtype.itemsize > held:
        raise DecodeError(f"an .npy whose header says {shape} values of {dtype.str!r}, in {held:,} bytes")


def _is_overflown(dtype: np.dtype[Any]) -> bool:
    """Return whether the text of a dtype, or of one inside it, is so long that NumPy's count of its bytes overflows."""
    parts = [dtype.base] if dtype.subdtype else [field[0] for field in (dtype.fields or {}).values()]
    return dtype.itemsize < 0 or any(map(_is_overflown, parts))


def read_text(data: Any) -> str:
    """Read UTF-8 text; text of a column as it is, and other values as Python writes them."""
    return str(data, "utf-8") if isinstance(data, bytes | memoryview) else str(data)


def _read_int(data: memoryview) -> int:
    return int(bytes(data))


def _read_json(data: memoryview) -> Any:
    return json.loads(bytes(data))


IMAGE_EXTENSIONS = frozenset(("jpg", "jpeg", "png", "webp"))
# Labels of files: numbers as text. A column that holds numbers says so by its type, whatever its name.
LABEL_EXTENSIONS = frozenset(("cls", "cls2", "index", "inx", "id"))
READERS: dict[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(sorted(LABEL_EXTENSIONS), _read_int),
    **dict.fromkeys(("json", "jsn"), _read_json),
    **dict.fromkeys(("txt", "text", "transcript"), read_text),
    "npy": read_npy,
    "npz": read_npz,
}


def field_error(field: str, data: Any, exc: Exception, *, is_own: bool = False) -> Exception:
    """Make the error for a value of ``field`` whose decoder raised ``exc``; ``is_own``: a reader chosen by its name."""
    if isinstance(exc, ConfigError):
        return exc
    size = f"{len(data):,} bytes" if isinstance(data, bytes | memoryview) else f"a {type(data).__name__}"
    if isinstance(data, str):
        size = f"{len(data):,} characters"
    if isinstance(exc, MemoryError):
        return MemoryLimitError(f"field {field!r}: memory ran out while its {size} were decoded ({exc})")
    cause = str(exc) if isinstance(exc, DecodeError) else f"{type(exc).__name__}: {exc} ({size})"
    raw = "as bytes" if isinstance(data, bytes | memoryview) else "as it is"
    cure = f"; decode={{{field!r}: None}} leaves the field {raw}" if is_own else ""
    error = DecodeError(f"field {field!r}: {cause}{cure}")
    error.field = field
    return error


class BatchValues(ABC):
    """The values of one field of n rows. Threads ``prepare`` rows while ``preparing``; one then calls ``decode``."""

    @abstractmethod
    def preparing(self) -> AbstractContextManager[None]:
        """Enter to prepare some rows, when it is this thread's turn."""

    @abstractmethod
    def prepare(self, row: int, data: memoryview, rng: np.random.Generator | None) -> None:
        """Look at a row's bytes, and draw its random numbers. Raises DecodeError where they are visibly damaged."""

    @abstractmethod
    def decode(self, is_stopped: Callable[[], bool]) -> list[tuple[int, Exception]]:
        """Decode all prepared rows; return those that failed, each with its error.

        Raises:
            CancelledError: ``is_stopped`` says that the values are no longer wanted.
            MemoryLimitError: memory ran out.
        """

    @abstractmethod
    def tensor(self) -> Any:
        """Get all values as one tensor of the decoder's shape, (n, ...)."""

    @abstractmethod
    def __getitem__(self, row: int) -> Any:
        """Get the value of a row."""

    @abstractmethod
    def __setitem__(self, row: int, value: Any) -> None:
        """Replace the value of a row by another's."""
