"""The writer of safetensors files: piece by piece, and counted.

The package's own writer maps the whole file (0.8), so that a watchdog could not tell slow from stuck;
before that it copied the model. Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import io
import json
import os
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
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALIGNMENT = 8


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors on the CPU, and sync the file.

    Raises:
        OSError: the file cannot be written.
        ValueError: the format has no name for a tensor's dtype.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files do not hold; convert it")
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
        file.flush()
        os.fsync(file.fileno())
