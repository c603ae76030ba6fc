"""torchtitan: a dataloader of token sequences, with its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..data_loader import DistributedDataLoader
from ..errors import ConfigError
from ..formats.tokens import TokensFormat

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError as exc:
    raise ImportError("TorchtitanLoader needs torchtitan 0.3: pip install torchtitan") from exc


class TorchtitanLoader(BaseDataLoader):  # type: ignore[misc]
    """torchtitan's dataloader over penstock: (inputs, labels), dealt out over the data-parallel ranks.

    Use ``TorchtitanLoader.Config(url=...)`` as ``dataloader`` of a ``Trainer.Config``, and of its validator. A finite
    run has the same number of batches on every rank. The state is one for all ranks, and names no data-parallel degree:
    a checkpoint continues on another one, with the same samples in every global batch if that has the same size.

    An input is ``{"input": (B, seq_len) int64, "positions": (B, seq_len) int64}``, labels are (B, seq_len) int64, the
    tokens that follow. For other data, subclass and override ``to_step``.

    Raises:
        ConfigError: samples have another length than seq_len + 1 tokens; or as ``DistributedDataLoader`` does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        url: str = ""
        """Where the shards are."""

        dtype: str | None = "uint16"
        """Of the token files' numbers; None for other formats, whose samples have seq_len + 1 tokens."""

        column: str = "tokens"
        """The field of a sample that holds the tokens."""

        infinite: bool = True
        """Whether epoch follows epoch for ever; torchtitan's validator sets this."""

        epochs: int = 1
        """How many epochs there are where ``infinite`` is False."""

        shuffle: bool = True
        """Whether each epoch has its own random order."""

        seed: int = 0
        """The seed of these orders."""

        cache_dir: str | None = None
        """A folder of the node to keep fetched chunks in."""

        audit_dir: str | None = None
        """A folder to log every delivery in, for ``penstock audit``."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        if not config.url:
            raise ConfigError("TorchtitanLoader.Config(url=''): give the URL of the shards")
        if config.epochs < 1:
            raise ConfigError(f"TorchtitanLoader.Config(epochs={config.epochs}): must be at least 1")
        self._config = config
        self._seq_len = seq_len
        self.loader: DistributedDataLoader[dict[str, Any]] = DistributedDataLoader(
            config.url,
            batch_size=local_batch_size,
            shuffle=config.shuffle,
            seed=config.seed,
            columns=[config.column],
            format=None if config.dtype is None else TokensFormat(seq_len=seq_len + 1, dtype=config.dtype, overlap=1),
            rank=dp_rank,
            world_size=dp_world_size,
            cache_dir=config.cache_dir,
            audit_dir=config.audit_dir,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while self._config.infinite or self.loader.state_dict()["epoch"] < self._config.epochs:
            for batch in self.loader:
                yield self.to_step(batch)

    def to_step(self, batch: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Convert a batch of the loader to torchtitan's (inputs, labels)."""
        tokens = batch[self._config.column]
        wanted = self._seq_len + 1
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.shape[1] != wanted:
            found = list(tokens.shape[1:]) if isinstance(tokens, torch.Tensor) else "different lengths"
            raise ConfigError(
                f"TorchtitanLoader: samples of {self._config.column!r} have {found} tokens, and training.seq_len="
                f"{self._seq_len} needs {wanted}; set seq_len to one less than the samples have, or pack the data anew"
            )
        tokens = tokens.long()
        positions = torch.arange(self._seq_len).expand(len(tokens), -1).contiguous()
        return {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position, on any data-parallel degree; an empty state is a checkpoint without one."""
        if state_dict:
            self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop the loader's threads."""
        self.loader.close()
