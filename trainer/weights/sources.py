"""Sources of weights: safetensors files, a Hugging Face folder, or a checkpoint of a run.

Each rank reads what it holds and no more. Pickles are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..checkpoint.folder import MANIFEST_NAME
from ..checkpoint.state import MODEL, find_needs_of_weights, list_averages, read_weights
from ..checkpoint.traffic import TRAFFIC, open_reader
from ..errors import CheckpointError
from ..parallel.precision import local_part
from .names import TensorFacts
from .run_folder import Chosen, Step, Weights, holds_checkpoints
from .stored_run import is_url, open_checkpoint

INDEX_SUFFIX = ".safetensors.index.json"
_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MAPPED_BYTES = 64 << 20
# The names of safetensors' formats; those that torch would not convert by value are left out.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class WeightSource(Protocol):
    """Named tensors somewhere; ``name`` is for messages."""

    @property
    def name(self) -> str: ...

    def describe(self) -> dict[str, TensorFacts]:
        """Describe the tensors by name; reads none of them."""
        ...

    def fingerprint(self) -> str:
        """A text that is the same on two nodes if they see the same tensors; cheap."""
        ...

    def find_damage(self, *, share: int, shares: int) -> list[str]:
        """One sentence for each file, of this share of all, that is not as it was written, where that can be known."""
        ...

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the targets, by the source's names, in place; of a DTensor this rank's part."""
        ...

    def close(self) -> None:
        """Give up what was fetched."""
        ...


def open_source(path: str, step: Step, weights: Weights = "model") -> WeightSource:
    """Find out what ``path`` is: a run or checkpoint, a safetensors file or its index, or a folder of those.

    Raises:
        CheckpointError: it is none of these, or of several one cannot tell which is meant.
    """
    place = Path(path)
    if is_url(path) or (place.is_dir() and holds_checkpoints(place)):
        return CheckpointSource(open_checkpoint(path, step), weights)
    files = _find_files(place)
    if step != "latest":
        raise CheckpointError(f"{path} is no run, and step={step!r} chooses a checkpoint of one; leave it out")
    if weights != "model":
        raise CheckpointError(f"{path} is no run, and weights={weights!r} chooses among those of one; leave it out")
    return SafetensorsSource(path, files)


def _find_files(place: Path) -> dict[Path, list[str] | None]:
    """The safetensors files and the names to take of each; None: all."""
    if place.is_file():
        if place.name.endswith(INDEX_SUFFIX):
            return _read_index(place)
        if place.suffix == _SUFFIX:
            return {place: None}
        pickled = " is a pickle, which can run code, and" if place.suffix in _PICKLES else ""
        raise CheckpointError(f"{place}{pickled} is not read; convert it to safetensors")
    if not place.is_dir():
        raise CheckpointError(f"{place} does not exist")
    indexes, files = sorted(place.glob(f"*{INDEX_SUFFIX}")), sorted(place.glob(f"*{_SUFFIX}"))
    usual_file, usual_index = place / f"model{_SUFFIX}", place / f"model{INDEX_SUFFIX}"
    if usual_file in files:
        return {usual_file: None}
    if usual_index in indexes or len(indexes) == 1:
        return _read_index(usual_index if usual_index in indexes else indexes[0])
    if len(files) == 1:
        return {files[0]: None}
    if indexes or files:
        names = ", ".join(path.name for path in indexes or files)
        raise CheckpointError(f"{place} has {names}, and which is meant is not known; give one of them")
    pickles = [path.name for path in sorted(place.iterdir()) if path.suffix in _PICKLES]
    which = f" ({', '.join(pickles[:3])} are pickles, which can run code; convert them)" if pickles else ""
    raise CheckpointError(f"{place} holds neither checkpoints of a run nor safetensors{which}")


def _read_index(index: Path) -> dict[Path, list[str] | None]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        pairs = list(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{index} is no index of safetensors files ({type(exc).__name__}: {exc})") from exc
    files: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(_SUFFIX):
            raise CheckpointError(f"{index}: {name!r} is in {file!r}, which is no safetensors file beside the index")
        names = files.setdefault(index.parent / file, [])
        assert names is not None
        names.append(name)
    return files


@dataclass
class SafetensorsSource:
    """One or several safetensors files; ``files`` has the names to take of each, None for all."""

    name: str
    files: Mapping[Path, list[str] | None]

    def describe(self) -> dict[str, TensorFacts]:
        found: dict[str, TensorFacts] = {}
        for path, names in self.files.items():
            with _opened(path) as file:
                there = list(file.keys())
                lost = sorted(set(names or ()) - set(there))
                if lost:
                    raise CheckpointError(f"{path} lacks {', '.join(lost[:5])}, which the index says it has")
                for name in there if names is None else names:
                    one = file.get_slice(name)
                    kind = one.get_dtype()
                    found[name] = TensorFacts(tuple(one.get_shape()), _DTYPES.get(kind), kind)
        return found

    def fingerprint(self) -> str:
        total = xxhash.xxh3_64()
        for path in self.files:
            size = path.stat().st_size
            total.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for number in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                    total.update(file.read(_SAMPLE_BYTES))
        return total.hexdigest()

    def find_damage(self, *, share: int, shares: int) -> list[str]:
        return []  # the format has no checksums; a file that was cut is refused where it is opened

    def read(self, targets: Mapping[str, Tensor]) -> None:
        for path, names in self.files.items():
            if names is None:
                with _opened(path) as file:
                    names = list(file.keys())
            for part in _in_parts({name: targets[name] for name in names if name in targets}):
                with _opened(path) as file, torch.no_grad():  # what was read of a mapped file counts while it is open
                    for name, target in part.items():
                        _fill(target, file, name)

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


@dataclass
class CheckpointSource:
    """The model of a run's checkpoint, of which ``weights`` may be the averages."""

    chosen: Chosen
    weights: Weights = "model"

    @property
    def name(self) -> str:
        return self.chosen.name

    def describe(self) -> dict[str, TensorFacts]:
        prefix = f"{MODEL}."
        saved = open_reader(self.chosen.folder).read_metadata().state_dict_metadata
        return {
            key.removeprefix(prefix): TensorFacts(
                tuple(kind.size), kind.properties.dtype, str(kind.properties.dtype).removeprefix("torch.")
            )
            for key, kind in saved.items()
            if key.startswith(prefix) and isinstance(kind, TensorStorageMetadata)
        }

    def fingerprint(self) -> str:
        return xxhash.xxh3_64_hexdigest((self.chosen.folder / MANIFEST_NAME).read_bytes())

    def find_damage(self, *, share: int, shares: int) -> list[str]:
        return self.chosen.find_damage(share=share, shares=shares)

    def read(self, targets: Mapping[str, Tensor]) -> None:
        metadata = open_reader(self.chosen.folder).read_metadata()
        averaged = frozenset(list_averages(self.name, metadata, self.describe()) if self.weights == "ema" else ())
        self.chosen.bring(find_needs_of_weights(self.chosen.folder, targets, metadata, averaged))
        read_weights(self.chosen.folder, targets, metadata, averaged)

    def close(self) -> None:
        self.chosen.close()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, mapped into memory; its errors name the file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as exc:
        raise CheckpointError(
            f"{path} needs the safetensors package; install it with: pip install 'penstock[safetensors]'"
        ) from exc
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc


def _in_parts(targets: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The targets in turn, in groups of which this rank reads about ``_MAPPED_BYTES``."""
    part: dict[str, Tensor] = {}
    filled = 0
    for name, target in targets.items():
        part[name] = target
        filled += local_part(target).nbytes
        if filled >= _MAPPED_BYTES:
            yield part
            part, filled = {}, 0
    if part:
        yield part


def _fill(target: Tensor, file: Any, name: str) -> None:
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        local = target.to_local()
        if local.numel():
            part = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
            local.copy_(file.get_slice(name)[part])
        count = local.nbytes
    else:
        target.copy_(file.get_tensor(name))
        count = target.nbytes
    TRAFFIC.add(count)
