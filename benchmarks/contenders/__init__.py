"""The loaders that are measured: ours and its peers, each behind one small interface, each imported on its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Protocol

from ...loader.errors import ConfigError
from ..harness.job import Job

# Name -> its module in this folder. ``limit`` is no loader: a bare loop over the same libraries.
OURS, LIMIT = "penstock", "limit"
MODULES = {
    OURS: "ours",
    LIMIT: "limit",
    "webdataset": "webdataset",
    "mosaicml-streaming": "mosaicml",
    "litdata": "litdata",
    "datasets": "hf_datasets",
    "grain": "grain",
    "spdl": "spdl",
    "torch": "torch_loader",
    "penstock-view": "ours",
    "penstock-gather": "ours",
    "penstock-unchecked": "ours",
    "spdl-view": "spdl",
}
# Contenders that are measured of raw bytes alone, and the loader that each of them is. Most hand these out otherwise
# than as bytes objects: as views of what was read, or as one tensor of all bytes and one of offsets. UNCHECKED compares
# no checksums, as peers have none.
VIEWS, GATHER, UNCHECKED = "penstock-view", "penstock-gather", "penstock-unchecked"
VARIANTS = {VIEWS: OURS, GATHER: OURS, UNCHECKED: OURS, "spdl-view": "spdl"}
WITHOUT_OBJECTS = VARIANTS.keys() - {UNCHECKED}


def base_of(name: str) -> str:
    """The loader that a contender is: itself, but for variants."""
    return VARIANTS.get(name, name)


class Contender(Protocol):
    """One loader over one data set. Made after its imports are done; making it is part of the timed start-up."""

    def epoch(self) -> Iterator[Any]:
        """One pass over the data set, or the rest of it after a resume, in the loader's own kind of batches."""
        ...

    def state(self) -> Any:
        """The position as JSON-serialisable data; None if the loader cannot save or resume it."""
        ...

    def report(self) -> dict[str, Any]:
        """``settings``: how it was set up; of ours also ``bottleneck`` and ``stages``."""
        ...

    def close(self) -> None:
        """Stop its threads and processes, and wait for them."""
        ...


def find_module(name: str) -> Any:
    """The module of a contender, imports done; it has ``open_contender(job)`` and, for peers, ``convert``.

    Raises:
        ConfigError: there is no such contender, or it is not installed.
    """
    if name not in MODULES:
        raise ConfigError(f"unknown contender {name!r}; the contenders are {', '.join(MODULES)}")
    try:
        return importlib.import_module(f".{MODULES[name]}", __name__)
    except ImportError as exc:
        raise ConfigError(f"{name} cannot be imported ({exc})") from exc


def open_contender(job: Job) -> Contender:
    return find_module(job.contender).open_contender(job)  # type: ignore[no-any-return]
