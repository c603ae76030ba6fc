"""Samples and batches: manifest, plan, reading, decoding, the loader itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data_loader import DistributedDataLoader
    from .dataset.index import open_manifest
    from .dataset.manifest import Manifest
    from .decoding.images import ImageDecoder
    from .formats.arrow.ipc import ArrowFormat
    from .formats.arrow.parquet import ParquetFormat
    from .formats.json.jsonl import JsonlFormat
    from .formats.mds import MdsFormat
    from .formats.tar.format import TarFormat
    from .formats.tokens import TokensFormat

_HOMES = {
    "ArrowFormat": ".formats.arrow.ipc",
    "DistributedDataLoader": ".data_loader",
    "ImageDecoder": ".decoding.images",
    "JsonlFormat": ".formats.json.jsonl",
    "Manifest": ".dataset.manifest",
    "MdsFormat": ".formats.mds",
    "ParquetFormat": ".formats.arrow.parquet",
    "TarFormat": ".formats.tar.format",
    "TokensFormat": ".formats.tokens",
    "open_manifest": ".dataset.index",
}

__all__ = [
    "ArrowFormat",
    "DistributedDataLoader",
    "ImageDecoder",
    "JsonlFormat",
    "Manifest",
    "MdsFormat",
    "ParquetFormat",
    "TarFormat",
    "TokensFormat",
    "open_manifest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
