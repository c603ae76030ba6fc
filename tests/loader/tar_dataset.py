"""Data sets for the loader's tests: small, written with the reference libraries."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_tars(folder: Path, shard_sizes: Sequence[int], *, value_bytes: int = 40) -> int:
    """WebDataset shards with the fields txt (the sample's ordinal) and bin (bytes); returns the number of samples."""
    folder.mkdir(parents=True, exist_ok=True)
    ordinal = 0
    for number, size in enumerate(shard_sizes):
        with tarfile.open(folder / f"shard-{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(size):
                fields = {"txt": str(ordinal).encode(), "bin": np.random.default_rng(ordinal).bytes(value_bytes)}
                for extension, data in fields.items():
                    member = tarfile.TarInfo(f"{ordinal:08d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                ordinal += 1
    return ordinal
