"""Samples and batches: manifest, plan, reading, decoding, the loader itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data_loader import DistributedDataLoader
    from .formats.arrow_ipc import ArrowFormat
    from .formats.jsonl import JsonlFormat
    from .formats.mds import MdsFormat
    from .formats.parquet import ParquetFormat
    from .formats.tar import TarFormat
    from .formats.tokens import TokensFormat
    from .images import ImageDecoder
    from .index import open_manifest
    from .manifest import Manifest

_HOMES = {
    "ArrowFormat": ".formats.arrow_ipc",
    "DistributedDataLoader": ".data_loader",
    "ImageDecoder": ".images",
    "JsonlFormat": ".formats.jsonl",
    "Manifest": ".manifest",
    "MdsFormat": ".formats.mds",
    "ParquetFormat": ".formats.parquet",
    "TarFormat": ".formats.tar",
    "TokensFormat": ".formats.tokens",
    "open_manifest": ".index",
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
