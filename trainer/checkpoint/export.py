"""A checkpoint's weights, or their moving averages, as one safetensors file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...storage.files import sync_folder
from ...storage.store import ByteRange
from ..errors import CheckpointError
from ..options import check_choice
from .folder import read_manifest
from .remote.download import opened_checkpoint
from .safetensors_file import write_safetensors
from .state import EMA, MODEL, allocate, find_needs_of, list_averages, read_weights
from .traffic import open_reader


def export_safetensors(checkpoint: str | Path, path: str | Path, *, weights: Literal["model", "ema"] = "model") -> None:
    """Write the model of a checkpoint to one safetensors file, unsharded, as the bare model names its tensors.

    With ``weights="ema"`` trained parameters are their moving averages; frozen parameters and buffers are the model's.
    The checkpoint is a folder, or a URL as ``s3://bucket/run/step-100``, of which the weights alone are fetched. Needs
    memory for the whole model once, and neither process group nor model. Tied tensors are written once per name.

    Raises:
        CheckpointError: the checkpoint is damaged or has no averages, or the file cannot be written; then there
            is nothing of it.
    """
    check_choice("weights", weights, ("model", "ema"))
    path, prefix = Path(path), f"{MODEL}."

    def need(folder: Path) -> dict[str, list[ByteRange]]:
        return find_needs_of(folder, prefix, *([f"{EMA}."] if weights == "ema" else []))

    with opened_checkpoint(checkpoint, need) as folder:
        manifest = read_manifest(folder)
        metadata = open_reader(folder).read_metadata()
        keys = [key for key, kind in metadata.state_dict_metadata.items() if _is_tensor(key, prefix, kind)]
        tensors = {key.removeprefix(prefix): allocate(metadata, key) for key in keys}
        averaged = list_averages(folder, metadata, tensors) if weights == "ema" else ()
        read_weights(folder, tensors, metadata, frozenset(averaged))
    partial = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(tensors, partial, {"format": "pt", "step": str(manifest.step), "weights": weights})
        partial.replace(path)
        sync_folder(path.parent)
    except (OSError, ValueError) as exc:
        with suppress(OSError):
            partial.unlink()
        raise CheckpointError(
            f"{path} cannot be written: {exc}; make room, or give another path. {checkpoint} keeps the weights, and "
            "`penstock export` takes them from there, too"
        ) from exc


def _is_tensor(key: str, prefix: str, kind: object) -> bool:
    return key.startswith(prefix) and isinstance(kind, TensorStorageMetadata)
