"""The index of costs: one number a sample, in a file of its own beside the manifest, bound to it by its fingerprint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ...storage import LocalStore, NotFoundError, ObjectInfo, Store, open_store
from ...storage.files import write_all
from ...storage.own_folder import OwnFolder
from ..errors import ConfigError, DatasetError
from ..order.costs.costs import Cost, CostValues, SampleCosts
from .cache import cache_home

if TYPE_CHECKING:
    from .manifest import Manifest

_MAGIC = b"penstock costs 1\n"
_HEAD_BYTES = 4096
_DTYPES: Mapping[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_KEPT = 8  # on a node
_PATIENCE_S = 600.0
_OURS = re.compile(r"[0-9a-f]{32}\.(costs|lock)")


def cost_key(name: str, fingerprint: str) -> str:
    """The name of the object that holds an index of costs, beside the manifest with this fingerprint."""
    return f"penstock-costs-{re.sub('[^A-Za-z0-9_.-]', '-', name)}-{fingerprint[:16]}.costs"


def costs_to_bytes(name: str, expression: str, values: CostValues, fingerprint: str) -> bytes:
    """An index of ``values`` (samples,) uint16 or uint32: a head of 4,096 bytes, then the values in little-endian."""
    data = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    about = {
        "name": name,
        "expression": expression,
        "fingerprint": fingerprint,
        "samples": len(values),
        "dtype": values.dtype.name,
        "checksum": xxhash.xxh3_128_hexdigest(data),
    }
    head = _MAGIC + json.dumps(about).encode() + b"\n"
    if len(head) > _HEAD_BYTES:
        raise ConfigError(f"cost {name!r}: its name and expression are too long; give a shorter name")
    return head.ljust(_HEAD_BYTES, b" ") + data


def open_costs(
    manifest: Manifest,
    cost: Cost,
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> SampleCosts:
    """The costs of a manifest's samples, from the index that lies beside it.

    A local index is mapped into memory, so that all processes of a node share it; another is fetched once a node, into
    the folder of its cached manifests. Every process compares it with its checksum.

    Raises:
        DatasetError: there is no such index of this very data set, or it is damaged; says what to run.
        StorageError: the store refused or did not answer.
    """
    key = cost_key(cost.index, manifest.fingerprint)
    store = open_store(manifest.url, storage_options=storage_options)
    read = partial(
        read_costs,
        where=f"{store.url}/{key}",
        fingerprint=manifest.fingerprint,
        samples=manifest.num_samples,
        cost=cost,
    )
    try:
        if isinstance(store, LocalStore):
            costs = read(_map(Path(store.url.removeprefix("file://")) / key))
        else:
            costs = _read_once_a_node(store, store.head(key), cache_dir, read)
    except (NotFoundError, FileNotFoundError) as exc:
        raise DatasetError(
            f"{manifest.url}: no index of the costs {cost.index!r} for this data set as it is now; run {_command(cost)}"
        ) from exc
    finally:
        store.close()
    costs.check_function()
    return costs


def read_costs(data: Any, where: str, *, fingerprint: str, samples: int, cost: Cost) -> SampleCosts:
    """The costs that an index holds, as a view of ``data``.

    Raises:
        DatasetError: it is damaged, or of another data set.
    """
    try:
        head = bytes(data[:_HEAD_BYTES])
        if not head.startswith(_MAGIC):
            raise ValueError("it does not begin like one")
        about = json.loads(head[len(_MAGIC) :])
        dtype = _DTYPES[about["dtype"]]
        if (about["name"], about["fingerprint"], about["samples"]) != (cost.index, fingerprint, samples):
            raise ValueError(f"it is of the index {about['name']!r} of {about['samples']} samples of another data set")
        body = memoryview(data)[_HEAD_BYTES:]
        if len(body) != samples * dtype.itemsize or xxhash.xxh3_128_hexdigest(body) != about["checksum"]:
            raise ValueError("its checksum does not fit")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise DatasetError(f"{where}: not a readable index of costs ({exc}); run {_command(cost)} again") from exc
    return SampleCosts(np.frombuffer(body, dtype), str(about["checksum"])[:16], cost)


def _command(cost: Cost) -> str:
    return f"`penstock index DATA --cost {cost.index}`, or --cost {cost.index}=len:FIELD"


def _map(path: Path) -> Any:
    if not path.stat().st_size:
        return b""
    return np.memmap(path, np.uint8, "r")


def _read_once_a_node(
    store: Store, info: ObjectInfo, cache_dir: str | os.PathLike[str] | None, read: Callable[[Any], SampleCosts]
) -> SampleCosts:
    """An index from a file that all processes of the node map, or fetched into memory where there can be none."""
    if info.etag is not None:
        name = xxhash.xxh3_128_hexdigest(f"{store.url}\0{info.key}\0{info.size}\0{info.etag}".encode())
        with suppress(OSError):
            folder = OwnFolder(cache_home(cache_dir) / f"costs-{os.geteuid()}")
            with folder.lock(f"{name}.lock", wait_s=_PATIENCE_S):
                if folder.has(f"{name}.costs"):
                    with suppress(DatasetError):  # damaged on this disk: it is fetched again
                        return read(_map_in(folder, f"{name}.costs"))
                with folder.replacing(f"{name}.costs") as fd:
                    write_all(fd, store.get(info.key, etag=info.etag))
                _prune(folder)
                return read(_map_in(folder, f"{name}.costs"))
    return read(store.get(info.key, etag=info.etag))


def _map_in(folder: OwnFolder, name: str) -> Any:
    with os.fdopen(folder.open(name, os.O_RDONLY), "rb") as file:
        return np.memmap(file, np.uint8, "r") if os.fstat(file.fileno()).st_size else b""


def _prune(folder: OwnFolder) -> None:
    with folder.scan() as entries:
        files = [(entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries]
    ours = sorted((file for file in files if _OURS.fullmatch(file[1]) and file[1].endswith(".costs")), reverse=True)
    for _, name in ours[_KEPT:]:
        folder.delete(name)
