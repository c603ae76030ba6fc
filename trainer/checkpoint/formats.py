"""Number formats of a checkpoint's weights and buffers that are not the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_NAMED = 3


def describe_conversions(model_state: Mapping[str, object], prefix: str, metadata: Metadata) -> list[str]:
    """One sentence for each pair of formats between which reading converts, with the names of what is converted.

    ``prefix`` stands before the names of ``model_state`` in the checkpoint.
    """
    converted: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, here, there in _pairs(model_state, prefix, metadata):
        if here != there:
            converted.setdefault((there, here), []).append(name)
    return [
        f"{', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}: "
        f"{_word(here)} in this model, where the checkpoint had {_word(there)}; the values are converted, and what "
        "follows is not as in an unbroken run"
        for (there, here), names in converted.items()
    ]


def is_other_kind(here: torch.dtype, there: torch.dtype) -> bool:
    """Return whether only one is complex, floating or integral, so that a conversion would lose values."""
    return _kind(here) != _kind(there)


def _pairs(
    model_state: Mapping[str, object], prefix: str, metadata: Metadata
) -> Iterator[tuple[str, torch.dtype, torch.dtype]]:
    for name, value in model_state.items():
        saved = metadata.state_dict_metadata.get(prefix + name)
        if isinstance(value, Tensor) and isinstance(saved, TensorStorageMetadata):
            yield name, value.dtype, saved.properties.dtype


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_complex, dtype.is_floating_point


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
