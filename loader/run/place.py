"""The place where a loader's pipeline runs: on threads of the training process, or in a process beside it."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from ..decoding.values import IMAGE_EXTENSIONS
from ..errors import ConfigError
from ..limits import can_start_python

if TYPE_CHECKING:
    from ..config.loader_config import LoaderConfig
    from ..decoding.workers.main import Code
    from ..sources.sources import OpenSource, Sources

_LEAST_CORES = 2  # of a rank: the loop's own, and one for the process
_OF_THIS_PROCESS = ("mem://", "memory://")  # ours and fsspec's


@dataclass(frozen=True, slots=True)
class Work:
    """The arguments of a loader in another process, and a digest of what decodes, transforms and makes batches."""

    digest: str
    config: LoaderConfig


@dataclass(frozen=True, slots=True)
class Place:
    """The choice, and its reason in words. ``work``: the pickled ``Work`` for the process, if that is the choice."""

    reason: str
    work: bytes | None = None
    digest: str = ""


def choose_place(config: LoaderConfig, sources: Sources) -> Place:
    """Choose where the pipeline runs, where a process is asked for or may be chosen.

    Raises:
        ConfigError: a process is asked for, and cannot do the work; says why.
    """
    if config.place == "auto":
        reason = next(_reasons_for_threads(config, sources), None)
        if reason is not None:
            return Place(f"'auto': {reason}")
    obstacle = next(_obstacles(config, sources), None)
    if obstacle is None:
        work = _make_work(config, sources)
        try:
            reason = "as given" if config.place == "process" else "'auto': images or functions, and a core to spare"
            return Place(reason, pickle.dumps(work, pickle.HIGHEST_PROTOCOL), work.digest)
        except Exception as exc:  # noqa: BLE001 - whatever pickling raises
            obstacle = _name_unsendable(work.config, exc)
    if config.place == "process":
        raise ConfigError(f"place='process': {obstacle}; leave that out, or use place='threads'")
    return Place(f"'auto': {obstacle}")


def _reasons_for_threads(config: LoaderConfig, sources: Sources) -> Iterator[str]:
    """Yield why a process would gain nothing, under "auto".

    It gains where threads hold the GIL while the loop wants it: between the calls of codecs, and in functions of the
    user's (``devtools interference`` measures by how much). It costs a core beside the loop's, or decoding takes the
    loop's time slices instead of its lock; and at the start another import of torch, in time and memory. Tokens, rows
    and raw bytes hold the GIL for microseconds a batch.
    """
    cores = config.tuning.cores
    if cores < _LEAST_CORES:
        yield f"a rank has {cores} of the machine's cores, and a process needs one beside the loop's"
    if config.collate is None and not any(map(_works_on_samples, sources)):
        yield "no images are decoded, and no functions of yours work on samples"


def _works_on_samples(source: OpenSource) -> bool:
    choice = source.options.decode
    if source.options.transform is not None or callable(source.options.keep):
        return True
    if isinstance(choice, Mapping):
        return any(decoder is not None for decoder in choice.values())
    return choice == "auto" and any(name.rpartition(".")[2] in IMAGE_EXTENSIONS for name in source.fields)


def _obstacles(config: LoaderConfig, sources: Sources) -> Iterator[str]:
    """Yield what a process beside this one cannot do."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
        yield "this system has no memory without names to share (memfd_create)"
    if not can_start_python():
        yield "an application that Python is part of would be started again"
    if config.raw == "view":
        yield "raw='view' hands out memory of the process that reads"
    if config.codec is not None:
        yield "ImageDecoder(device='cuda') decodes in the process that trains"
    for source in sources:
        if source.manifest.url.startswith(_OF_THIS_PROCESS):
            yield f"{source.manifest.url} lies in the memory of the training process"


def _make_work(config: LoaderConfig, sources: Sources) -> Work:
    """Make the arguments for a process, with the data sets' manifests in place of their URLs."""
    asked = tuple(
        replace(one, given=replace(one.given, url=source.manifest, split=None))
        for one, source in zip(config.sources, sources, strict=True)
    )
    sent = copy.copy(config)
    source = config.source if sources.is_mixed else sources[0].manifest
    for name, value in {
        "source": source,
        "sources": asked,
        "place": "threads",
        "mesh": None,
        "data_dims": None,
        "device": None,
        "cuda": None,
    }.items():
        object.__setattr__(sent, name, value)
    return Work(_digest(sent), sent)


def _digest(config: LoaderConfig) -> str:
    """Digest what a batch of given samples depends on; empty where that cannot be pickled."""
    names = ("collate", "raw", "with_ids", "last_batch", "seed", "columns", "errors", "group")
    of_source = ("decode", "transform", "columns", "keep", "may_drop", "packing")
    of_sources = [[getattr(one.given, name) for name in of_source] for one in config.sources]
    parts = [[getattr(config, name) for name in names], of_sources]
    with suppress(Exception):
        return xxhash.xxh3_128_hexdigest(pickle.dumps(parts, pickle.HIGHEST_PROTOCOL))
    return ""


def code_of(work: bytes) -> Code:
    """Make the first message of a process that is to do the work."""
    from ..decoding.workers.pool import is_of_main, make_code

    return make_code(work, needs_main=is_of_main(work))


def _name_unsendable(config: LoaderConfig, error: Exception) -> str:
    of_sources = (
        (name, getattr(one.given, name))
        for one in config.sources
        for name in ("transform", "decode", "keep", "packing", "format")
    )
    for name, value in (("collate", config.collate), *of_sources):
        try:
            pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as exc:  # noqa: BLE001 - whatever pickling raises
            return f"{name}={value!r} cannot be sent to another process ({exc}); define it at the top level of a module"
    return f"an argument cannot be sent to another process ({error})"
