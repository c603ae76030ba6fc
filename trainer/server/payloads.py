"""Payloads: fp32 values as bytes for the wire, whole or in fewer bits, with what rounding lost."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...storage.suggestions import unknown_choice
from ..compression.dense import INT8_BLOCK, dequantise, quantise
from ..errors import ServerRefusedError, TrainerConfigError

Codec = Literal["fp32", "bf16", "int8", "topk"]
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8", "topk")


@dataclass(frozen=True, kw_only=True, eq=False)
class Payload:
    """Values of a shape, encoded: ``data`` is a flat array of uint8."""

    codec: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """A codec, and for topk the share of the elements that is sent."""

    codec: Codec = "fp32"
    density: float = 0.01

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise TrainerConfigError(unknown_choice("codec", self.codec, CODECS))
        if not 0 < self.density <= 1:
            raise TrainerConfigError(f"density={self.density} must be more than 0 and at most 1")


def encode(values: Tensor, config: CodecConfig) -> Payload:
    """Encode fp32 values of any shape. Of fp32 the payload shares the memory of contiguous values."""
    flat = values.detach().reshape(-1)
    if config.codec == "fp32":
        coded = flat.contiguous().view(torch.uint8)
    elif config.codec == "bf16":
        coded = flat.bfloat16().view(torch.uint8)
    elif config.codec == "int8":
        coded = quantise(flat)[0]
    else:
        count = min(flat.numel(), max(1, math.ceil(flat.numel() * config.density)))
        places = flat.abs().topk(count, sorted=False).indices.sort().values
        coded = torch.cat([flat[places].view(torch.uint8), places.to(torch.int32).view(torch.uint8)])
    return Payload(codec=config.codec, shape=tuple(values.shape), data=coded.numpy())


def decode(payload: Payload, *, checks_values: bool = True) -> Tensor:
    """Decode a payload to fp32 of its shape; it may share the payload's memory, and must not be written to.

    Without ``checks_values`` values may be NaN or infinite.

    Raises:
        ServerRefusedError: codec, shape and bytes do not belong together, or a value is not finite.
    """
    size = math.prod(payload.shape)
    _check_length(payload, size)
    if not size:
        return torch.zeros(payload.shape)
    coded = _share(payload.data)
    if payload.codec == "fp32":
        flat = coded.view(torch.float32) if coded.data_ptr() % 4 == 0 else coded.clone().view(torch.float32)
    elif payload.codec == "bf16":
        flat = coded.clone().view(torch.bfloat16).float()
    elif payload.codec == "int8":
        flat = dequantise(coded, size)
    else:
        flat = _spread(coded, size)
    if checks_values and not is_finite(flat):
        bad = int((~torch.isfinite(flat)).sum())
        raise ServerRefusedError(
            f"{bad} of {size} values of shape {payload.shape} are NaN or infinite; nothing of the push was applied"
        )
    return flat.reshape(payload.shape)


def select_rows(payload: Payload, chosen: NDArray[np.bool_]) -> Payload:
    """The chosen rows (n,) of a payload (n, width), of codec fp32 or bf16 with the same bits.

    Raises:
        ServerRefusedError: as ``decode``.
    """
    if payload.codec not in ("fp32", "bf16"):
        return encode(decode(payload, checks_values=False)[torch.from_numpy(chosen)], CodecConfig())
    _check_length(payload, math.prod(payload.shape))
    data = payload.data.reshape(payload.shape[0], -1)[chosen].reshape(-1)
    return Payload(codec=payload.codec, shape=(int(chosen.sum()), *payload.shape[1:]), data=data)


def _share(data: NDArray[np.uint8]) -> Tensor:
    """Make a tensor of an array's memory, even if it is read-only, as what Ray hands over is: torch would warn."""
    if data.flags.writeable or not data.size or not data.flags.c_contiguous:
        return torch.from_numpy(data if data.flags.writeable else data.copy())
    memory = (ctypes.c_uint8 * data.size).from_address(data.ctypes.data)
    memory.owner = data  # type: ignore[attr-defined]  # lives as long as the tensor
    return torch.from_numpy(np.frombuffer(memoryview(memory), np.uint8))


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite: a sum says so at once, unless it overflows where no value did."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def _spread(coded: Tensor, size: int) -> Tensor:
    count = coded.numel() // 8
    values = coded[: 4 * count].clone().view(torch.float32)
    places = coded[4 * count :].clone().view(torch.int32).long()
    if count and (int(places.min()) < 0 or int(places.max()) >= size or bool((places.diff() <= 0).any())):
        raise ServerRefusedError(f"the places of a topk payload are not distinct, in order and below {size}")
    return torch.zeros(size).index_copy_(0, places, values)


def _check_length(payload: Payload, size: int) -> None:
    blocks = -(-size // INT8_BLOCK)
    expected = {"fp32": 4 * size, "bf16": 2 * size, "int8": size + 4 * blocks}.get(payload.codec)
    length = payload.data.size
    if payload.codec == "topk":
        expected = length - length % 8 if length <= 8 * size else 8 * size
    if expected is None:
        raise ServerRefusedError(f"payload {unknown_choice('codec', payload.codec, CODECS)}")
    if payload.data.dtype != np.uint8 or payload.data.ndim != 1 or min(payload.shape, default=0) < 0:
        raise ServerRefusedError(f"a payload of shape {payload.shape} is not a flat array of bytes")
    if length != expected:
        raise ServerRefusedError(
            f"a {payload.codec} payload of shape {payload.shape} has {length} bytes, and not {expected}"
        )


class ErrorFeedback:
    """Encodes values, and adds what that lost to the next of the same key (1-bit Adam, Tang et al. 2021).

    All mutable state: what is owed, by key. Rows are not remembered: each of a table would owe something.
    """

    def __init__(self, config: CodecConfig) -> None:
        self.config = config
        self._owed: dict[str, Tensor] = {}

    def encode(self, key: str, values: Tensor) -> Payload:
        """Encode fp32 values with what is owed to them. Values that are not finite owe nothing: they are refused."""
        if self.config.codec in ("fp32", "bf16"):
            return encode(values, self.config)
        owed = self._owed.get(key)
        whole = values if owed is None else values + owed
        payload = encode(whole, self.config)
        if is_finite(whole):
            self._owed[key] = whole - decode(payload)
        return payload

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what is owed."""
        return {key: owed.clone() for key, owed in self._owed.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from what ``state_dict`` returned."""
        self._owed = {key: owed.clone() for key, owed in state.items()}
