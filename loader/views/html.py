"""A batch or a data set as a small table: HTML with thumbnails for notebooks, text elsewhere.

Everything is escaped and bounded in size, and nothing here raises: a notebook shows a value because it is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Protocol, overload

from ..decoding.byte_views import ByteViews
from .describe import clip, describe_value
from .thumbnails import SIDE, thumbnail

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
