"""penstock: sharded data from object storage to the accelerators, balanced over ranks, resumed exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.loader import (
        ArrowFormat,
        DistributedDataLoader,
        ImageDecoder,
        JsonlFormat,
        Manifest,
        MdsFormat,
        ParquetFormat,
        TarFormat,
        TokensFormat,
        open_manifest,
    )
    from penstock.storage import PenstockError, open_store

__version__ = "0.1.0"

# Names are looked up when they are first used, so that the command line does not wait for torch.
_HOMES = {
    "ArrowFormat": "penstock.loader",
    "DistributedDataLoader": "penstock.loader",
    "ImageDecoder": "penstock.loader",
    "JsonlFormat": "penstock.loader",
    "Manifest": "penstock.loader",
    "MdsFormat": "penstock.loader",
    "ParquetFormat": "penstock.loader",
    "PenstockError": "penstock.storage",
    "TarFormat": "penstock.loader",
    "TokensFormat": "penstock.loader",
    "open_manifest": "penstock.loader",
    "open_store": "penstock.storage",
}

__all__ = [
    "ArrowFormat",
    "DistributedDataLoader",
    "ImageDecoder",
    "JsonlFormat",
    "Manifest",
    "MdsFormat",
    "ParquetFormat",
    "PenstockError",
    "TarFormat",
    "TokensFormat",
    "open_manifest",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
