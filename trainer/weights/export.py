"""Exports: the weights of a checkpoint as safetensors files, whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...storage.files import sync_folder, write_whole
from ...storage.store import ByteRange
from ..checkpoint.folder import read_manifest, seal_file
from ..checkpoint.safetensors_file import write_safetensors
from ..checkpoint.state import EMA, MODEL, find_needs_of, list_averages, read_weights
from ..checkpoint.traffic import open_reader
from ..errors import CheckpointError, TrainerConfigError
from ..options import check_choice
from .names import rename_all
from .run_folder import CONFIG_NAME, Advance, Chosen, Step, Weights
from .stored_run import open_checkpoint

_STEM, _SUFFIX = "model", ".safetensors"
_INDEX_NAME = f"{_STEM}{_SUFFIX}.index.json"
_METADATA_NAME = ".metadata"  # of torch.distributed.checkpoint
_PREFIX = f"{MODEL}."
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Export:
    """Result of an export: ``files`` are names in ``output`` and their bytes; ``tensors`` counts the names."""

    checkpoint: str
    step: int
    output: str
    files: Mapping[str, int]
    tensors: int
    numbers: int

    @property
    def bytes(self) -> int:
        """Bytes of all files that were written."""
        return sum(self.files.values())


def export_run(
    run: str | Path,
    output: str | Path,
    *,
    step: Step = "latest",
    weights: Weights = "model",
    format: Literal["safetensors", "hf"] = "safetensors",  # noqa: A002 - the word that the command line has
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    rename: Sequence[str] = (),
    overwrite: bool = False,
    advance: Advance = lambda count: None,
) -> Export:
    """Write the model of one checkpoint of a run into the new folder ``output``, unsharded.

    With ``weights="ema"`` trained parameters are their moving averages; frozen parameters and buffers are the model's.
    "safetensors": one file, model.safetensors. "hf": the layout of Hugging Face, files of at most ``max_shard_bytes``
    and an index, and the run's config.json where it has one (in ``run``, or beside the checkpoints). ``run`` may be the
    URL of an object store; what is needed is fetched to this node's disk. Needs the memory of the largest file about
    twice, and neither ranks nor the model. ``dtype`` rounds what is floating point; tied
    tensors are written once per name; ``rename`` has rules as ``warm_start.rename``. ``advance`` hears of bytes, first
    those checked and then those written. The folder appears when it is whole; with ``overwrite`` it takes the place of
    an earlier export.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or has no averages, or the output exists or cannot
            be written.
    """
    given, output = str(output), Path(output).absolute()
    check_choice("weights", weights, ("model", "ema"))
    _check_output(output, overwrite)
    with closing(open_checkpoint(run, step)) as chosen:
        if damage := chosen.find_damage(advance=advance):
            raise CheckpointError(f"{chosen.name} is damaged: {'; '.join(damage)}; export another checkpoint")
        metadata = open_reader(chosen.folder).read_metadata()
        facts = _list_tensors(metadata)
        averaged = frozenset(list_averages(chosen.name, metadata, facts) if weights == "ema" else ())
        names = rename_all(facts, rename)
        config = _read_config(chosen) if format == "hf" else None
        if format == "safetensors":
            max_shard_bytes = 1 << 62
        shards = list(_cut(facts, max_shard_bytes, None if dtype is None else _DTYPES[dtype]))
        weight_map: dict[str, str] = {}
        total = 0
        with _new_folder(output, overwrite) as partial:
            chosen.bring(_find_needs(chosen, weights), advance)
            for index, keys in enumerate(shards):
                middle = f"-{index + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
                file = f"{_STEM}{middle}{_SUFFIX}"
                read = _read(chosen.folder, metadata, keys, averaged, dtype)
                tensors = {names[key]: one for key, one in read.items()}
                del read
                _save(tensors, partial / file, chosen.step)
                written = sum(tensor.nbytes for tensor in tensors.values())
                total += written
                advance(written)
                weight_map.update(dict.fromkeys(tensors, file))
            if format == "hf" and len(shards) > 1:
                text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
                write_whole(partial / _INDEX_NAME, text.encode(), durable=True)
            if config is not None:
                write_whole(partial / CONFIG_NAME, config, durable=True)
            sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        return Export(
            checkpoint=chosen.name,
            step=chosen.step,
            output=given,
            files=sizes,
            tensors=len(names),
            numbers=sum(kind.size.numel() for kind in facts.values()),
        )


def count_bytes(run: str | Path, step: Step, weights: Weights = "model") -> int:
    """About how many bytes ``export_run`` tells ``advance`` of."""
    with closing(open_checkpoint(run, step)) as chosen:
        read = chosen.count_bytes(_find_needs(chosen, weights)) if _has_metadata(chosen) else 0
        facts = _list_tensors(open_reader(chosen.folder).read_metadata()) if read else {}
        return read + sum(_count(kind, None) for kind in facts.values())


def _has_metadata(chosen: Chosen) -> bool:
    """Return whether the metadata is as it was saved; if not, the export will name the damage."""
    metadata = chosen.folder / _METADATA_NAME
    return metadata.is_file() and seal_file(metadata) == read_manifest(chosen.folder).files.get(_METADATA_NAME)


def _find_needs(chosen: Chosen, weights: Weights) -> dict[str, list[ByteRange]]:
    return find_needs_of(chosen.folder, _PREFIX, *([f"{EMA}."] if weights == "ema" else []))


def _check_output(output: Path, overwrite: bool) -> None:
    """Refuse what exists, and even with ``overwrite`` what is no export: a mistyped folder must not be deleted."""
    if not output.exists():
        return
    if not output.is_dir():
        raise CheckpointError(f"{output} is a file; give a folder to be made")
    there = [path.name for path in output.iterdir()]
    strange = sorted(name for name in there if name not in (CONFIG_NAME, _INDEX_NAME) and not name.endswith(_SUFFIX))
    if there and not overwrite:
        raise CheckpointError(f"{output} exists and is not empty; give another folder, or --overwrite")
    if strange:
        raise CheckpointError(
            f"{output} holds {', '.join(strange[:3])}, which no export writes, and is not overwritten; give another "
            "folder, or delete it yourself"
        )


def _list_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return {
        key.removeprefix(_PREFIX): kind
        for key, kind in metadata.state_dict_metadata.items()
        if key.startswith(_PREFIX) and isinstance(kind, TensorStorageMetadata)
    }


def _cut(facts: Mapping[str, TensorStorageMetadata], limit: int, dtype: torch.dtype | None) -> Iterator[list[str]]:
    """The tensors, in their order, in groups of at most ``limit`` bytes; one that is larger has its own."""
    if not facts:
        raise CheckpointError("the checkpoint holds no tensors of a model; penstock did not write it")
    group: list[str] = []
    filled = 0
    for key, kind in facts.items():
        count = _count(kind, dtype)
        if group and filled + count > limit:
            yield group
            group, filled = [], 0
        group.append(key)
        filled += count
    yield group


def _count(kind: TensorStorageMetadata, dtype: torch.dtype | None) -> int:
    found = kind.properties.dtype
    return kind.size.numel() * (dtype if dtype is not None and found.is_floating_point else found).itemsize


def _read(
    folder: Path, metadata: Metadata, keys: Sequence[str], averaged: Collection[str], dtype: str | None
) -> dict[str, Tensor]:
    facts = _list_tensors(metadata)
    tensors = {key: torch.empty(facts[key].size, dtype=facts[key].properties.dtype) for key in keys}
    read_weights(folder, tensors, metadata, averaged)
    if dtype is None:
        return tensors
    rounded = {key: one.to(_DTYPES[dtype]) if one.is_floating_point() else one for key, one in tensors.items()}
    for key, one in rounded.items():
        if dtype == "fp16" and one.is_floating_point() and int(one.isinf().sum()) > int(tensors[key].isinf().sum()):
            raise CheckpointError(f"{key} has values beyond the range of fp16; use --dtype bf16")
    return rounded


def _save(tensors: dict[str, Tensor], path: Path, step: int) -> None:
    try:
        write_safetensors(tensors, path, {"format": "pt", "step": str(step)})
    except (OSError, ValueError) as exc:
        path.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {exc}") from exc


def _read_config(chosen: Chosen) -> bytes | None:
    config = chosen.read_config()
    try:
        json.loads(config or b"null")
    except ValueError as exc:
        raise TrainerConfigError(f"the {CONFIG_NAME} of {chosen.name} would be exported and is no JSON: {exc}") from exc
    return config


@contextmanager
def _new_folder(output: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside ``output`` that becomes it when the block ends, and goes away if it raises.

    One export at a time writes it; what a killed one left is used again.
    """
    partial = output.with_name(f".{output.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise CheckpointError(f"{output} cannot be made: {exc.strerror or exc}") from exc
    try:
        _lock(fd, partial, output)
        try:
            for left in partial.iterdir():
                left.unlink()
            yield partial
            sync_folder(partial)
            _publish(partial, output, overwrite)
        except OSError as exc:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"{output} cannot be written: {exc.strerror or exc}") from exc
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(fd)


def _lock(fd: int, partial: Path, output: Path) -> None:
    """Hold the folder itself, which the kernel lets go however this process ends."""
    busy = CheckpointError(f"another export to {output} is under way; wait for it, or give another folder")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:
        return  # a file system without locks
    if not partial.exists() or partial.stat().st_ino != os.fstat(fd).st_ino:
        raise busy  # which has just ended


def _publish(partial: Path, output: Path, overwrite: bool) -> None:
    _check_output(output, overwrite)  # it may have been created meanwhile
    replaced = output.with_name(f".{output.name}.replaced")
    if output.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        output.rename(replaced)
    partial.rename(output)
    sync_folder(output.parent)
    shutil.rmtree(replaced, ignore_errors=True)
