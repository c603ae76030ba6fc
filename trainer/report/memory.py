"""Memory of this process, on the device and on the host, without waiting for either."""

from __future__ import annotations

import torch

from ...storage.observability.process_usage import peak_resident_bytes, resident_bytes


def measure_memory(device: torch.device) -> dict[str, int]:
    """Bytes now and at their peak since the process began: of this process, and of its tensors on a CUDA device.

    ``device_memory_bytes`` is what tensors hold, ``device_memory_reserved_bytes`` what torch has taken for them.
    """
    peak, now = peak_resident_bytes(), resident_bytes()
    found = {"host_memory_peak_bytes": peak if now is None else max(peak, now)}  # the kernel's peak lags behind
    if now is not None:
        found["host_memory_bytes"] = now
    if device.type == "cuda":
        found["device_memory_bytes"] = torch.cuda.memory_allocated(device)
        found["device_memory_reserved_bytes"] = torch.cuda.memory_reserved(device)
        found["device_memory_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def measure_gpu(device: torch.device) -> dict[str, float]:
    """Utilisation, in 0 to 1, and watts of a CUDA device by its driver (NVML); empty without one, or without pynvml.

    ``utilisation`` is the share of the driver's last sampling period, up to a second, in which a kernel ran.
    """
    if device.type != "cuda":
        return {}
    found = {}
    for name, read, unit in (("utilisation", torch.cuda.utilization, 0.01), ("power_w", torch.cuda.power_draw, 1e-3)):
        try:
            found[name] = read(device) * unit
        except Exception:  # noqa: BLE001 - no pynvml, no permission, or a card that does not tell
            continue
    return found
