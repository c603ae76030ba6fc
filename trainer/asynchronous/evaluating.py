"""Evaluation by one worker, of what the servers hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.safetensors_file import write_safetensors
from ..data.batches import move_batch
from ..errors import CheckpointError
from ..evaluation.metrics import MetricSums
from ..evaluation.modes import in_evaluation
from ..parallel.precision import compute_context
from ..recipes.recipe import Recipe, opened
from ..server.client import ClientConfig, ServerClient
from ..server.embedding import find_tables
from ..server.messages import READER, Header
from ..server.schema import Schema
from ..server.services import Begun, Services
from .setup import open_evaluation_data, trained_parameters


class Reader:
    """Reads what servers hold, beside all workers: nobody waits for it."""

    def __init__(self, services: Services, begun: Begun, schema: Schema, config: ClientConfig) -> None:
        header = Header(run=begun.run, schema=schema.digest, worker="reader", incarnation=READER, token=begun.token)
        self._client = ServerClient(
            header, schema, call=services.call, placement=services.placement, wait=lambda seconds: None, config=config
        )

    def load(self, model: nn.Module) -> None:
        """Write what servers hold to a model's trained parameters, and have its tables read there."""
        values = self._client.pull()
        with torch.no_grad():
            for name, parameter in trained_parameters(model).items():
                parameter.copy_(values[name])
        for table in find_tables(model).values():
            table.bind(self._client.pull_rows)


def export(model: nn.Module, path: Path, step: int) -> None:
    """Write a model's tensors to a safetensors file.

    Raises:
        CheckpointError: it cannot be written; then there is nothing of it.
    """
    partial = path.with_name(f"{path.name}.tmp")
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(tensors, partial, {"format": "pt", "step": str(step), "weights": "model"})
        partial.replace(path)
    except (OSError, ValueError) as exc:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {exc}; make room, or give another path") from exc


def evaluate(recipe: Recipe, model: nn.Module, device: torch.device) -> Mapping[str, float]:
    """Compute the recipe's metrics over all evaluation data."""
    assert recipe.evaluation is not None
    metrics = recipe.evaluation.resolve(2)
    sums = MetricSums(device)
    with opened(open_evaluation_data(recipe)) as batches, in_evaluation(model), torch.no_grad():
        for batch in batches:
            with compute_context(recipe.trainer.precision, device, model):
                sums.add(metrics(model, move_batch(batch, device)))
    return sums.average()
