"""Settings that a checkpoint brings are data."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from penstock.trainer.checkpoint.settings import pack_settings, unpack_settings


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_settings_come_back_and_nothing_that_they_name_is_called(tmp_path: Path) -> None:
    settings = [{"lr": 0.1, "betas": (0.9, 0.99), "fused": None, "rate": torch.tensor(2.0), "name": "x"}]
    assert unpack_settings(pack_settings(settings)) == settings
    held = io.BytesIO()
    torch.save([{"k": Hostile(tmp_path / "touched")}], held)
    assert unpack_settings(held.getvalue()) is None
    assert not (tmp_path / "touched").exists()
