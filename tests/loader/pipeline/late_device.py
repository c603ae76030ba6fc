"""A device made up of copies that are late, and a ring that feeds it."""

from __future__ import annotations

import torch

TENSORS = {
    "uint8": torch.arange(7, dtype=torch.uint8),
    "int64": torch.arange(12).reshape(3, 4),
    "float64": torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    "bfloat16": torch.arange(9).to(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "channels_last": torch.arange(2 * 3 * 4 * 5).reshape(2, 4, 5, 3).permute(0, 3, 1, 2),
    "one_image": torch.arange(3 * 4 * 5).reshape(1, 4, 5, 3).permute(0, 3, 1, 2),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "every_second": torch.arange(10)[::2],
    "expanded": torch.arange(3).expand(4, 3),
    "middle": torch.arange(100)[40:60],
    "with_grad": torch.ones(2, requires_grad=True),
}
