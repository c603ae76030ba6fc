"""The converting process: ``python -m penstock.benchmarks.harness.convert RESULT``.

It reads what to convert from its standard input. The samples are read by our own loader, in the data set's order, and
written in the peer's format by the peer itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...loader import DistributedDataLoader
from ...loader.formats.detect import make_format
from ...storage.errors import PenstockError
from ..child_arguments import take_arguments
from ..contenders import find_module
from .job import Job
from .layout import Layout
from .measure import tell

_BATCH = 256


def group_scalars(layout: Layout) -> tuple[Layout, dict[str, list[str]]]:
    """The layout that peers get, and the columns behind each of its fields that stands for several.

    Peers handle samples one by one and pay for each field, so a table's scalar columns of one type become one array:
    the layout that an expert chooses for speed. Fields that are no scalars stay as they are.
    """
    scalars: dict[str, list[str]] = defaultdict(list)
    for name, field in layout.items():
        if field["kind"] == "array" and not field["shape"]:
            scalars[field["dtype"]].append(name)
    groups = {f"{dtype}s": names for dtype, names in scalars.items() if len(names) > 1}
    inside = {name for names in groups.values() for name in names}
    grouped: Layout = {name: field for name, field in layout.items() if name not in inside}
    for group, names in groups.items():
        dtype = layout[names[0]]["dtype"]
        size = np.dtype(dtype).itemsize * len(names)
        grouped[group] = {"kind": "array", "dtype": dtype, "shape": [len(names)], "mean_bytes": float(size)}
    return grouped, groups


def read_samples(job: Job, layout: Layout, groups: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    """Every sample, in the data set's order, fields grouped."""
    with DistributedDataLoader(
        job.url,
        batch_size=min(_BATCH, job.num_samples),
        shuffle=False,
        decode=None,
        last_batch="partial",
        storage_options=job.storage_options or None,
        format=None if job.format is None else make_format(job.format, job.format_config),
        rank=0,
        world_size=1,
    ) as loader:
        for batch in loader:
            columns = {name: _column(batch[name], layout[name]) for name in layout if name not in groups}
            for group, names in groups.items():
                columns[group] = np.stack([batch[name].numpy() for name in names], axis=1)
            names = list(columns)
            for row in zip(*columns.values(), strict=True):
                yield dict(zip(names, row, strict=True))


def _column(values: Any, field: dict[str, Any]) -> Any:
    if isinstance(values, torch.Tensor):
        return values.numpy()
    if field["kind"] == "vector":
        return [np.asarray(value, field["dtype"]) for value in values]
    if field.get("missing"):
        return [b"" if value is None else value for value in values]
    return values


def main() -> None:
    result = Path(*take_arguments("RESULT", "penstock bench"))
    os.dup2(2, 1)
    message = json.loads(sys.stdin.read())
    try:
        made = _convert(message)
    except (PenstockError, ImportError) as exc:
        sys.exit(tell(exc))
    result.write_text(json.dumps(made))


def _convert(message: dict[str, Any]) -> dict[str, Any]:
    job, folder = Job(**message["job"]), Path(message["folder"])
    blocks = message["layout"] == "packed"
    # A tar member for each column of each row would be six times the bytes, all of them headers and padding.
    grouped = blocks or job.contender == "webdataset"
    layout, groups = group_scalars(job.fields) if grouped else (job.fields, {})
    samples = read_samples(job, layout, groups)
    shape = find_module(job.contender).convert(samples, layout, folder, message["shard_bytes"], blocks)
    return {"shape": shape, "fields": layout}


if __name__ == "__main__":
    main()
