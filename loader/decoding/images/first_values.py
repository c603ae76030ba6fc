"""Detection of images in fields whose name says nothing, by their first value: the same on every rank."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from ....storage import NotFoundError, ObjectChangedError
from ...columns import Block, BytesColumn
from ...errors import FormatError
from ...reading.checksum import has_whole_sums_alone
from .kind import image_kind

if TYPE_CHECKING:
    from ...reading.chunk_source import ChunkSource

# In how many chunks from the data set's beginning on a first value is looked for.
LOOK_CHUNKS = 8


class ImageFields:
    """Looks at the first chunks of a data set, whatever this rank is to read, when it is first asked for a field.

    So every rank, world size and resume decodes alike. The answer for a field is that for its first value; where the
    first ``LOOK_CHUNKS`` chunks hold none, it is no. Chunks whose data are bad hold none: that is reported where their
    samples are due. Mutable state: the answers, under a lock.
    """

    def __init__(self, chunks: ChunkSource) -> None:
        self._chunks = chunks
        self._answers: dict[str, bool] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str) -> bool:
        """Return whether the field holds images. Raises StorageError where a chunk cannot be fetched."""
        with self._lock:
            if name not in self._answers:
                self._look(name)
            return self._answers[name]

    def _look(self, name: str) -> None:
        # Of columns each has bytes of its own; fields of files lie in one chunk, which answers for all of them.
        # Where all is read and chunks have checksums as a whole alone, whole ones are read here, too, and compared.
        manifest, columns = self._chunks.manifest, self._chunks.columns
        are_whole = "columns" not in manifest.schema or (columns is None and has_whole_sums_alone(manifest))
        together = columns if are_whole else [name]
        source = self._chunks.apart(together)
        for chunk in range(min(LOOK_CHUNKS, manifest.num_chunks)):
            try:
                block = source.load(chunk)
            except (FormatError, NotFoundError, ObjectChangedError):
                continue
            for field, answer in _answers(block).items():
                self._answers.setdefault(field, answer)
            if name in self._answers:
                return
        self._answers[name] = False


def _answers(block: Block) -> dict[str, bool]:
    answers = {}
    for name, column in block.columns.items():
        if isinstance(column, BytesColumn) and not column.text:
            present = np.flatnonzero(column.starts >= 0)
            if len(present):
                start, stop = column.starts[present[0]], column.stops[present[0]]
                answers[name] = image_kind(column.buffer[start:stop]) is not None
    return answers
