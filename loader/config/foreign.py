"""Habits from other loaders, answered with what to use here: their arguments, and indexing."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

from ..errors import ConfigError

_THREADS = "threads= for decoding and transforms ('auto' by default), or processes= for a transform in pure Python"
_SOURCE = "source=, the first argument: the URL or path of the shards"
_ORDER = "shuffle=, seed= and window= for the order; every rank finds its own share"
_PINNED = "device='cuda', which copies batches ahead of need through pinned buffers"
_AHEAD = "read_ahead= for how much is read ahead, within memory_limit="

CURES = {
    "workers": _THREADS,
    "num_workers": _THREADS,
    "pin_memory": _PINNED,
    "pin_memory_device": _PINNED,
    "drop_last": "last_batch='drop' for True; last_batch='partial', or 'pad', for False",
    "collate_fn": "collate=, a function from a list of samples to a batch",
    "dataset": "source=, the URL or path of the shards, and transform= for work on samples",
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "generator": "seed=",
    "worker_init_fn": "a transform with a parameter rng, which is seeded for each sample",
    "prefetch_factor": _AHEAD,
    "persistent_workers": "nothing: threads and processes=, where given, last as long as the loader",
    "multiprocessing_context": "processes=, which are always spawned",
    "in_order": "nothing: batches always come in their order",
    "timeout": "storage_options={'timeout_s': ...} for requests to a store",
    "num_replicas": "world_size=",
    # mosaicml-streaming, litdata and webdataset
    "remote": _SOURCE,
    "input_dir": _SOURCE,
    "urls": _SOURCE,
    "local": "cache_dir=, a folder that keeps what was read",
    "max_cache_size": "cache_limit=, with cache_dir=",
    "streams": "a Mixture of data sets as the source",
    "shuffle_seed": "seed=",
    "shuffle_block_size": "window=",
    "num_canonical_nodes": "lanes=",
    "predownload": _AHEAD,
    "shardshuffle": "shuffle=True",
    "nodesplitter": _ORDER,
    "workersplitter": _ORDER,
    "resampled": "nothing: an epoch has every sample once; weights= draws with replacement",
}

P = ParamSpec("P")


def refuse_foreign(init: Callable[P, None]) -> Callable[P, None]:
    """Answer arguments of other loaders with a ConfigError, and leave other unknown ones to Python.

    A wrapper, so that type checkers and ``help`` see the loader's own arguments alone.
    """

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) > 2:  # self and source
            raise ConfigError(f"{reprlib.repr(args[2])}: only source is positional; name others, as in batch_size=64")
        answers = [
            f"{name}={reprlib.repr(kwargs[name])}: there is no such argument; use {cure}"
            for name, cure in CURES.items()
            if name in kwargs
        ]
        if answers:
            raise ConfigError("; ".join(answers))
        init(*args, **kwargs)

    return checked


class NoItems:
    """A class's ``__getitem__`` whose use raises a TypeError that says ``text``.

    ``hasattr`` finds no ``__getitem__``, so that frameworks that prefer it over ``__iter__`` still iterate.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise _NoItemsError(self._text)


class _NoItemsError(TypeError, AttributeError):
    """The TypeError of indexing, which ``hasattr`` takes for an attribute that is not there."""
