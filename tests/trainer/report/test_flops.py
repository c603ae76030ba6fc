from __future__ import annotations

import pytest
import torch

from penstock.trainer.recipes.gpt import SmallGPT, next_token_loss
from penstock.trainer.report.flops import copy_without_data, count_flops, find_peak, peak_flops


@pytest.mark.slow
def test_a_transformers_flops_are_those_of_the_formula() -> None:
    width, length, layers, vocabulary = 64, 32, 3, 128
    model = SmallGPT(vocabulary, length, width, 4, layers)
    batch = {"tokens": torch.zeros(2, length + 1, dtype=torch.int32)}
    copy = copy_without_data(model)
    assert {one.device.type for one in copy.parameters()} == {"meta"}
    assert copy.get_parameter("scores.weight") is copy.get_parameter("tokens.weight")
    # Twelve squares of the width a block and the scores, forward once and backward twice; attention's two products.
    weights = 12 * width * width * layers + width * vocabulary
    attention = 2 * length * width * layers
    assert count_flops(copy, next_token_loss, batch) == 3 * 2 * (weights + attention) * length


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989e12),
        ("NVIDIA H100 PCIe", "bf16", False, 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156e12),
        ("NVIDIA L40S", "fp16", False, 362e12),
        ("NVIDIA GeForce RTX 4090", "bf16", False, 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", False, None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", False, None),
        ("Tesla V100-SXM2-16GB", "bf16", False, None),
        ("Some Future GPU", "bf16", False, None),
        ("cpu", "fp32", False, None),
    ],
)
def test_a_peak_is_known_by_name_and_format_or_not_at_all(
    name: str, dtype: str, tf32: bool, peak: float | None
) -> None:
    assert peak_flops(name, dtype, tf32=tf32) == peak


@pytest.mark.parametrize(
    ("where", "name", "value", "peak"),
    [
        (torch.backends.cuda.matmul, "fp32_precision", "tf32", 156e12),
        (torch.backends.cuda.matmul, "fp32_precision", "ieee", 19.5e12),
        (torch.backends.cuda.matmul, "allow_tf32", True, 156e12),
        (torch.backends, "fp32_precision", "tf32", 156e12),
    ],
)
def test_the_peak_heeds_tf32_whichever_of_torchs_settings_a_user_has_made(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, value: object, peak: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    before = getattr(where, name), torch.backends.cuda.matmul.fp32_precision
    setattr(where, name, value)
    try:
        assert find_peak(torch.device("cuda", 0), "fp32") == peak
    finally:
        setattr(where, name, before[0])
        torch.backends.cuda.matmul.fp32_precision = before[1]
    assert torch.get_float32_matmul_precision() == "highest"
