"""A safetensors file, written piece by piece and counted: the package's own writer does not tell how far it has come.

Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .traffic import CountedFile

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def can_write(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all are of formats that ``write_safetensors`` knows; the package knows rarer ones."""
    return all(tensor.dtype in _NAMES for tensor in tensors.values())


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors on the CPU; raises OSError where the disk does not take them."""
    ordered = sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0]))  # so that all are aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in ordered:
        offsets = [start, start + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        start += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with io.BufferedWriter(CountedFile(path, "w")) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
