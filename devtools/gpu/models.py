"""Models that the measured loops train: ResNet-50 (He et al. 2016) on images and a decoder as GPT-2's on tokens.

One loop for every loader, so that nothing but the loader differs: bf16, one step at a time, waited for at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock.trainer.recipes.gpt import SmallGPT
from penstock.trainer.report.flops import copy_without_data, count_flops

Model = Literal["resnet50", "gpt"]

CLASSES = 1000
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride
_GROWTH = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut; the stride is on the 3x3, as in torchvision's ResNet-50."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * _GROWTH
        self.body = nn.Sequential(
            *_convolve(width_in, width, 1),
            nn.ReLU(inplace=True),
            *_convolve(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolve(width, out, 1),
        )
        same = stride == 1 and width_in == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolve(width_in, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _convolve(width_in: int, width: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(width_in, width, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(width)


def make_resnet50() -> nn.Sequential:
    """Make a model from images (B, 3, H, W) to scores (B, 1000); 25.6M parameters."""
    layers: list[nn.Module] = [*_convolve(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for width, blocks, stride in _STAGES:
        for block in range(blocks):
            layers.append(Bottleneck(width_in, width, stride if block == 0 else 1))
            width_in = width * _GROWTH
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, CLASSES))


class TrainStep:
    """One step of training on a batch of the named fields; ``__call__`` returns once the device is done with it.

    Batches may be in host memory, as peers give them, or on the device already.
    """

    def __init__(self, model: Model, device: torch.device, *, is_small: bool) -> None:
        torch.manual_seed(0)
        if is_small:
            torch.set_num_threads(1)  # whose barriers wait long where other processes want the cores, too
        self.device = device
        self.model = model
        self._length = 64 if is_small else 2048
        self._loss: Callable[[Mapping[str, Any]], Tensor]
        if model == "resnet50":
            net: nn.Module = make_resnet50().to(device)
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._loss = self._image_loss
            self._optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        else:
            size = {"width": 128, "heads": 4, "layers": 2} if is_small else {"width": 768, "heads": 12, "layers": 12}
            net = SmallGPT(vocabulary=50_304, length=2048, **size).to(device)
            self._loss = self._token_loss
            self._optimizer = torch.optim.AdamW(net.parameters(), 3e-4, fused=device.type == "cuda")
        self._net = net.train()

    @property
    def tokens_of_row(self) -> int:
        """Count the tokens of a row that are trained on; 0 of images."""
        return self._length if self.model == "gpt" else 0

    def flops_of_row(self, batch: Mapping[str, Any]) -> float:
        """Count the FLOPs of forward and backward of one row."""
        model = copy_without_data(self._net)
        device, net = self.device, self._net

        def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor]:
            self._net = model
            return (self._loss(batch),)

        try:
            self.device = torch.device("meta")
            return count_flops(model, loss, batch)
        finally:
            self.device, self._net = device, net

    def __call__(self, batch: Mapping[str, Any]) -> int:
        """Train on a batch; returns its rows."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return len(next(iter(batch.values())))

    def _image_loss(self, batch: Mapping[str, Any]) -> Tensor:
        pixels = self._move(batch["jpg"])
        if pixels.shape[-1] == 3:  # as peers' decoders give them
            pixels = pixels.permute(0, 3, 1, 2)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        scores = self._net(pixels.to(torch.bfloat16).sub_(127.5).div_(64.0))
        return F.cross_entropy(scores, self._move(torch.as_tensor(batch["cls"])).long())

    def _token_loss(self, batch: Mapping[str, Any]) -> Tensor:
        tokens = self._move(batch["tokens"][:, : self._length + 1]).long()
        scores = self._net(tokens[:, :-1])
        return F.cross_entropy(scores, tokens[:, 1:].flatten())

    def _move(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)


def make_batch(model: Model, rows: int, device: torch.device, *, length: int = 2048) -> dict[str, Tensor]:
    """Make up a batch on the device, as the loaders' batches are."""
    if model == "resnet50":
        return {
            "jpg": torch.randint(0, 256, (rows, 3, 224, 224), dtype=torch.uint8, device=device),
            "cls": torch.randint(0, CLASSES, (rows,), device=device),
        }
    return {"tokens": torch.randint(0, 50_257, (rows, length), device=device)}
