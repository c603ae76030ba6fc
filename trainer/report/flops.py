"""Model FLOPs utilisation: what a step computes, as a share of what the devices can.

As in PaLM (Chowdhery et al. 2022, appendix B), the FLOPs are those of forward and backward of the model as written:
recomputed activations and the optimizer are not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..data.batches import count_rows, move_batch
from ..ranks.world import World
from .config import ReportConfig

Loss = Callable[[nn.Module, Any], Any]

# Dense peak FLOP/s by the vendors' data sheets. The first row of which all words are in the device's name counts.
_BF16, _FP16, _TF32, _FP32 = "bf16", "fp16", "tf32", "fp32"
_PEAKS: tuple[tuple[tuple[str, ...], Mapping[str, float]], ...] = (
    (("gb200",), {_BF16: 2500e12, _FP16: 2500e12, _TF32: 1250e12, _FP32: 80e12}),
    (("b200",), {_BF16: 2250e12, _FP16: 2250e12, _TF32: 1100e12, _FP32: 75e12}),
    (("h200", "nvl"), {_BF16: 835e12, _FP16: 835e12, _TF32: 418e12, _FP32: 60e12}),
    (("h200",), {_BF16: 989e12, _FP16: 989e12, _TF32: 494.7e12, _FP32: 66.9e12}),
    (("gh200",), {_BF16: 989e12, _FP16: 989e12, _TF32: 494.7e12, _FP32: 66.9e12}),
    (("h100", "nvl"), {_BF16: 835e12, _FP16: 835e12, _TF32: 418e12, _FP32: 60e12}),
    (("h100", "pcie"), {_BF16: 756e12, _FP16: 756e12, _TF32: 378e12, _FP32: 51.2e12}),
    (("h100",), {_BF16: 989e12, _FP16: 989e12, _TF32: 494.7e12, _FP32: 66.9e12}),
    (("a100",), {_BF16: 312e12, _FP16: 312e12, _TF32: 156e12, _FP32: 19.5e12}),
    (("a800",), {_BF16: 312e12, _FP16: 312e12, _TF32: 156e12, _FP32: 19.5e12}),
    (("a40",), {_BF16: 149.7e12, _FP16: 149.7e12, _TF32: 74.8e12, _FP32: 37.4e12}),
    (("a30",), {_BF16: 165e12, _FP16: 165e12, _TF32: 82e12, _FP32: 10.3e12}),
    (("a10",), {_BF16: 125e12, _FP16: 125e12, _TF32: 62.5e12, _FP32: 31.2e12}),
    (("l40s",), {_BF16: 362e12, _FP16: 362e12, _TF32: 183e12, _FP32: 91.6e12}),
    (("l40",), {_BF16: 181e12, _FP16: 181e12, _TF32: 90.5e12, _FP32: 90.5e12}),
    (("l4",), {_BF16: 121e12, _FP16: 121e12, _TF32: 60e12, _FP32: 30.3e12}),
    (("v100", "pcie"), {_FP16: 112e12, _FP32: 14e12}),
    (("v100",), {_FP16: 125e12, _FP32: 15.7e12}),
    (("t4",), {_FP16: 65e12, _FP32: 8.1e12}),
    (("rtx", "5090"), {_BF16: 209.5e12, _FP16: 209.5e12, _TF32: 104.8e12, _FP32: 104.8e12}),
    (("rtx", "4090"), {_BF16: 165.2e12, _FP16: 165.2e12, _TF32: 82.6e12, _FP32: 82.6e12}),
    (("rtx", "3090"), {_BF16: 71e12, _FP16: 71e12, _TF32: 35.6e12, _FP32: 35.6e12}),
    (("mi300x",), {_BF16: 1307.4e12, _FP16: 1307.4e12, _TF32: 653.7e12, _FP32: 163.4e12}),
    (("mi325x",), {_BF16: 1307.4e12, _FP16: 1307.4e12, _TF32: 653.7e12, _FP32: 163.4e12}),
)
# Devices of the same name that are slower, or a part.
_OTHERS = frozenset(("laptop", "mig", "max", "d", "ti", "super"))


def peak_flops(device_name: str, dtype: str, *, tf32: bool) -> float | None:
    """Dense FLOP/s of a device by its name and the computation's format ("fp32", "bf16" or "fp16"); None if unknown.

    With ``tf32`` fp32's matrix products are rounded to TF32, which is what it is then compared with.
    """
    words = set(device_name.lower().replace("-", " ").split())
    for marks, peaks in _PEAKS:
        # Whole words, so that "L4" is not found in "L40S" or "A10" in "A100".
        if words.issuperset(marks):
            return None if words & _OTHERS else peaks.get(_TF32 if dtype == _FP32 and tf32 else dtype)
    return None


def device_name(device: torch.device) -> str:
    """The device's name by its driver, or its type where that is all there is to it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_peak(device: torch.device, dtype: str) -> float | None:
    """The peak of the device that this process computes on, or None."""
    if device.type != "cuda":
        return None
    # Not torch.get_float32_matmul_precision(), which raises where a user has set this, the newer one of the two.
    return peak_flops(device_name(device), dtype, tf32=torch.backends.cuda.matmul.fp32_precision == "tf32")


def copy_without_data(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and no storage (device "meta"); those shared stay shared."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def count_flops(model: nn.Module, loss: Loss, batch: Any) -> float:
    """FLOPs of forward and backward of one row of ``batch`` (2 for a multiplication with an addition).

    ``model`` is without data, and nothing is computed: values that the loss reads on the host are taken for 1.

    Raises:
        Exception: whatever the model raises that cannot run without data, such as one whose forward reads values.
    """
    rows = int(count_rows(batch))
    if not rows:
        raise ValueError("the first batch has no rows")
    inside = [False]

    def enter(*_: Any) -> None:
        inside[0] = True

    def leave(*_: Any) -> None:
        inside[0] = False

    hooks = (model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True))
    with FlopCounterMode(display=False) as counter, _HostReads(inside), _seeds_kept(), torch.device("meta"):
        loss(model, move_batch(batch, torch.device("meta")))[0].backward()
    for hook in hooks:
        hook.remove()
    total = counter.get_total_flops()
    if not total:
        raise ValueError("no operation with known FLOPs was seen")
    return float(total) / rows


class _HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers 1 where a loss reads a number, such as its count of tokens; in forward that is refused."""

    def __init__(self, inside: list[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            if self._inside[0]:
                raise ValueError("forward reads values of tensors, which decide what it computes")
            return {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0}.get(args[0].dtype, 1)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Cost of a sample and peak of the devices, as far as known; FLOPs and FLOP/s."""

    per_sample: float | None
    per_token: float | None
    peak: float | None
    devices: int

    def describe(self, *, rows: int, count: float, seconds: float) -> dict[str, float | int | str | None]:
        """FLOP/s of one device, and their share of its peak."""
        flops = rows * self.per_sample if self.per_sample is not None else count * (self.per_token or 0.0)
        per_device = flops / seconds / self.devices
        found: dict[str, float | int | str | None] = {"flops_per_s": per_device}
        return found if self.peak is None else found | {"mfu": per_device / self.peak}


class FlopCount:
    """Count of a sample's FLOPs: given by the config, or counted once on a copy of ``model`` without data.

    Made before the model is compiled, recomputes activations or is spread over the ranks. All mutable state: the copy,
    until it has been counted, and why it could not be made.
    """

    def __init__(self, config: ReportConfig, model: nn.Module, loss: Loss, world: World, dtype: str) -> None:
        self._world = world
        self._loss = loss
        self._given = (config.flops_per_sample, config.flops_per_token)
        self.peak = find_peak(world.device, dtype) if config.peak_flops is None else config.peak_flops
        self.is_wanted = config.count_flops or any(self._given)
        self._dtype = dtype
        self._copy: nn.Module | None = None
        self._problem: Exception | None = None
        if config.count_flops:
            try:
                self._copy = copy_without_data(model)
            except Exception as exc:  # noqa: BLE001 - a model that cannot be copied trains all the same
                self._problem = exc

    def settle(self, batch: Any) -> tuple[Compute | None, list[str]]:
        """Settle the costs, and return them with notes for people.

        Every rank calls it with a batch of its own, because a loss may have collectives.
        """
        notes = []
        per_sample, per_token = self._given
        if self._copy is not None:
            try:
                per_sample = count_flops(self._copy, self._loss, batch)
                notes.append(f"forward and backward of one sample are {per_sample:.4g} FLOPs")
            except Exception as exc:  # noqa: BLE001 - as above
                self._problem = exc
            self._copy = None
        if self._problem is not None:
            problem = f"{type(self._problem).__name__}: {self._problem!s:.200}"
            notes = [f"the FLOPs of a sample cannot be counted without data ({problem}); give report.flops_per_sample"]
            return None, notes
        if self.peak is None:
            what = f"{device_name(self._world.device)!r} in {self._dtype}"
            notes.append(f"the peak FLOP/s of {what} are not known, so there is no MFU; give report.peak_flops")
        return Compute(
            per_sample=per_sample, per_token=per_token, peak=self.peak, devices=self._world.world_size
        ), notes


@contextmanager
def _seeds_kept() -> Iterator[None]:
    state = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
