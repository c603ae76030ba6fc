"""A batch or a data set as a small table: HTML with thumbnails for notebooks, text elsewhere.

Everything is escaped and bounded in size, and nothing here raises: a notebook shows a value because it is there.
"""

from __future__ import annotations

import base64
import dataclasses
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

from ..decoding.byte_views import ByteViews
from ..decoding.images.kind import image_kind
from .describe import clip, describe_value, to_numpy

if TYPE_CHECKING:
    from ..columns import AnyArray


SIDE = 64
_LEAST_SIDE = 8  # arrays with shorter sides are vectors and small matrices
_MOST_PIXELS = 25_000_000  # of an encoded image that is decoded for a thumbnail


def thumbnail(value: Any) -> str | None:
    """Make a ``data:`` URI of at most about 17 kB for an image: an array, a tensor, or the bytes of a JPEG or PNG.

    Returns None where ``value`` is no image, or none that can be shown; never raises.
    """
    try:
        pixels = _decode(value) if isinstance(value, (bytes, memoryview)) else _sample(value)
        return None if pixels is None else f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"
    except Exception:  # noqa: BLE001 - what cannot be drawn is described by its text
        return None


def _decode(data: bytes | memoryview) -> AnyArray | None:
    kind = image_kind(data)
    if kind not in ("jpeg", "png"):
        return None
    if kind == "png":
        width, height = struct.unpack(">II", data[16:24])
        if width * height > _MOST_PIXELS:
            return None
    from ..decoding.images.images import ImageDecoder

    return _sample(ImageDecoder(size=SIDE)(memoryview(data), None))


def _sample(value: Any) -> AnyArray | None:
    """Sample (h, w, 1 or 3) uint8 pixels, at most SIDE high and wide, by leaving out rows and columns."""
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) == 2 and "uint8" in str(value.dtype):
        value, shape = value[None], (1, *shape)
    if len(shape) != 3:
        return None
    is_first = shape[0] in (1, 3, 4) and min(shape[1:]) >= _LEAST_SIDE
    if not is_first and not (shape[2] in (1, 3, 4) and min(shape[:2]) >= _LEAST_SIDE):
        return None
    height, width = shape[1:] if is_first else shape[:2]
    step = -(-max(height, width) // SIDE)
    pixels = to_numpy(value[:, ::step, ::step] if is_first else value[::step, ::step])
    if is_first:
        pixels = np.moveaxis(pixels, 0, -1)
    return _to_uint8(pixels[..., :3])


def _to_uint8(pixels: AnyArray) -> AnyArray:
    """Map pixels to uint8, which stays: 0 to 1 from black to white; others, as of normalised images, by their range."""
    if pixels.dtype == np.uint8:
        return pixels
    numbers = np.nan_to_num(pixels.astype(np.float64))
    low, high = float(numbers.min()), float(numbers.max())
    if low < 0 or high > 1:
        numbers = (numbers - low) / max(high - low, 1e-12)
    shown: AnyArray = (numbers * 255).astype(np.uint8)
    return shown


def _png(pixels: AnyArray) -> bytes:
    """Write a PNG of 8-bit grey or RGB pixels (ISO/IEC 15948), rows unfiltered."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = np.ascontiguousarray(pixels).reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


_LISTS = (list, tuple, ByteViews)
_ROWS = 8
_SAMPLES = 5
_FIELDS = 12
_THUMBNAILS = 24
_NAME_CHARS = 40
_CELL_CHARS = 80
_LINE_CHARS = 60
_CELL = 'style="text-align: left; vertical-align: top; padding: 2px 8px"'
_PICTURE = f"min-width: {SIDE}px; image-rendering: pixelated"  # a digit of 8 pixels cannot be read otherwise


def show(batch: Any) -> BatchView:
    """A batch as a table: in a notebook the last expression ``penstock.show(batch)``, elsewhere ``print`` of it.

    Any batch may be shown, also one of ``collate``. The batch itself stays a plain dict: a subclass would be a leaf to
    torch's pytree, so that whatever torch does with all tensors of a batch would pass it by.
    """
    return BatchView(batch)


class BatchView:
    """A table of a batch's first rows and fields, which ``show`` returns. Holds the batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def _repr_html_(self) -> str:
        try:
            return _batch_html(self._batch)
        except Exception as exc:  # noqa: BLE001 - see above
            return _excuse(self._batch, exc)

    def __repr__(self) -> str:
        try:
            lines = [(name, kind, first) for name, kind, first in _describe_fields(self._batch)]
        except Exception as exc:  # noqa: BLE001 - see above
            return f"{type(self._batch).__name__}, cannot be shown: {type(exc).__name__}"
        widths = [max(len(line[place]) for line in lines) if lines else 0 for place in (0, 1)]
        shown = (f"{name:{widths[0]}}  {kind:{widths[1]}}  {first}".rstrip() for name, kind, first in lines)
        return "\n".join(shown) or "an empty batch"


class ShownDataset(Protocol):
    """Samples by index, each with a sample id."""

    @property
    def ids(self) -> Iterable[int]: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice, /) -> ShownDataset: ...


def dataset_html(dataset: ShownDataset) -> str:
    """Make a table of the first samples of a data set, as training gets them."""
    try:
        samples: list[Mapping[str, Any]] = []
        problem = ""
        for index in range(min(_SAMPLES, len(dataset))):
            try:
                samples.append(dataset[index])
            except Exception as exc:  # noqa: BLE001 - shown instead of the samples
                problem = f"sample {index} cannot be shown: {exc}"
                break
        fields = list(dict.fromkeys(str(name) for sample in samples for name in sample))
        rows = [
            [sample_id, *map(sample.get, fields)]
            for sample_id, sample in zip(dataset[: len(samples)].ids, samples, strict=True)
        ]
        head = f"<b>{escape(clip(repr(dataset), 300))}</b>"
        note = f"<div>{escape(clip(problem, 300))}</div>" if problem else ""
        return f"<div>{head}{_table(['id', *fields], [''] * (len(fields) + 1), rows)}{note}</div>"
    except Exception as exc:  # noqa: BLE001 - see above
        return _excuse(dataset, exc)


def _batch_html(batch: Any) -> str:
    fields = _fields_of(batch)
    count = _count_rows(list(fields.values()))
    shown = min(_ROWS, count)
    kinds = [_kind_of(value) for value in fields.values()]
    rows = [[_row_of(value, row, count) for value in fields.values()] for row in range(max(shown, 1))]
    more = f"<div>{shown} of {count} rows</div>" if count > shown else ""
    return f"<div>{_table(list(fields), kinds, rows)}{more}</div>"


def _table(names: Sequence[str], kinds: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(
        f"<th {_CELL}>{escape(clip(name, _NAME_CHARS))}<br><small>{escape(clip(kind, _NAME_CHARS))}</small></th>"
        for name, kind in zip(names[:_FIELDS], kinds, strict=False)
    )
    if len(names) > _FIELDS:
        head += f"<th {_CELL}>{len(names) - _FIELDS} more fields</th>"
    left = [_THUMBNAILS]
    body = "".join(f"<tr>{''.join(_cell(value, left) for value in row[:_FIELDS])}</tr>" for row in rows)
    return f'<div style="overflow-x: auto"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any, left: list[int]) -> str:
    if value is _ABSENT:
        return "<td></td>"
    kind, text = describe_value(value, _CELL_CHARS)
    picture = thumbnail(value) if left[0] else None
    if picture is not None:
        left[0] -= 1
        caption = escape(clip(kind, _NAME_CHARS))
        return f'<td {_CELL}><img src="{picture}" alt="" style="{_PICTURE}"><br><small>{caption}</small></td>'
    return f"<td {_CELL}>{escape(text)}</td>"


_ABSENT = object()


def _fields_of(batch: Any) -> dict[str, Any]:
    """Name the parts of a batch of any type."""
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    names = getattr(batch, "_fields", None)  # of a named tuple
    if names is not None and isinstance(batch, tuple):
        return dict(zip(map(str, names), batch, strict=True))
    if isinstance(batch, list) and batch and all(isinstance(sample, Mapping) for sample in batch[:_ROWS]):
        names = dict.fromkeys(name for sample in batch[:_ROWS] for name in sample)
        return {str(name): [sample.get(name) for sample in batch] for name in names}
    if isinstance(batch, (tuple, list)):
        return {str(place): value for place, value in enumerate(batch[:1000])}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {"batch": batch}


def _count_rows(values: Sequence[Any]) -> int:
    """Count the samples: the length that most of the fields share."""
    lengths = [length for value in values if (length := _length(value)) is not None]
    return max(lengths, key=lengths.count, default=0)


def _length(value: Any) -> int | None:
    if hasattr(value, "shape"):
        return int(value.shape[0]) if len(value.shape) else None
    return len(value) if isinstance(value, _LISTS) else None


def _row_of(value: Any, row: int, count: int) -> Any:
    """Get the value of one sample; a field without a value a sample stands whole in the first row."""
    if count and _length(value) == count:
        return value[row]
    return value if row == 0 else _ABSENT


def _kind_of(value: Any) -> str:
    if isinstance(value, _LISTS):
        return f"{type(value).__name__} of {len(value)}" + (f" {type(value[0]).__name__}" if value else "")
    return describe_value(value)[0]


def _describe_fields(batch: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (name, kind, first sample's value) of the first fields of a batch."""
    fields = _fields_of(batch)
    count = _count_rows(list(fields.values()))
    for name, value in list(fields.items())[:_FIELDS]:
        text = describe_value(_row_of(value, 0, count), _LINE_CHARS)[1]
        yield clip(name, _NAME_CHARS), clip(_kind_of(value), _NAME_CHARS), text
    if len(fields) > _FIELDS:
        yield f"{len(fields) - _FIELDS} more fields", "", ""


def _excuse(value: Any, exc: Exception) -> str:
    return f"<div>{escape(type(value).__name__)}, cannot be shown: {escape(type(exc).__name__)}</div>"
