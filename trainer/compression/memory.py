"""Memory of compression from step to step: tensors of one rank, by slot and parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import CompressionError


class GradientMemory:
    """Tensors that outlive a step, made as zeros when first asked for.

    They are kept by parameter, not by bucket, because DDP rebuilds its buckets after the first step. All are of
    gradients of a step's mean loss: ``correction`` is what makes a step's own gradients such, before they are added.
    """

    def __init__(self, model: nn.Module) -> None:
        self.correction: float | None = 1.0
        """None in a step that counts nothing: nothing is sent, and nothing changes here."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._tensors: dict[str, Tensor] = {}

    def like(self, slot: str, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the slot's tensor for each parameter, of the shape and type of its gradient."""
        return [
            self.named(f"{slot}.{self._names[id(parameter)]}", gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]

    def named(self, key: str, like: Tensor) -> Tensor:
        """Return the tensor of that name; a loaded one is moved to the device and type of ``like``."""
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = torch.zeros_like(like)
        elif tensor.shape != like.shape:
            raise CompressionError(
                f"what compression remembers of {key} has shape {tuple(tensor.shape)} and the gradient has "
                f"{tuple(like.shape)}; it belongs to another model or bucket: resume without it"
            )
        elif tensor.device != like.device or tensor.dtype != like.dtype:
            tensor = self._tensors[key] = tensor.to(like)
        return tensor

    def name_of(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]

    def recall(self, key: str) -> Tensor | None:
        return self._tensors.get(key)

    def remember(self, key: str, tensor: Tensor) -> None:
        self._tensors[key] = tensor

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all tensors."""
        return {key: tensor.detach().clone() for key, tensor in self._tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all tensors by copies of those given."""
        self._tensors = {key: tensor.detach().clone() for key, tensor in state.items()}
