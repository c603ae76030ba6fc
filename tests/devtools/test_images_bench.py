"""The benchmark of images measures every step, and counts the images that a loader decodes ahead, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from devtools import images
from devtools.images import Config, main


@pytest.mark.slow
def test_every_step_is_measured_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "_DISTINCT", 4)
    main(Config(qualities=(90,), size=64, images=128, rounds=1, threads=2, out=tmp_path / "images.json"))
    (found,) = json.loads((tmp_path / "images.json").read_text())["results"]
    assert found["cpu_us"].keys() == {"codec", "whole images", "decoder", "loader"}
    assert all(spent > 0 for spent in [*found["cpu_us"].values(), *found["steps_us"].values()])
    assert found["flags"]["exact"]["psnr_db"] is None
    assert found["flags"]["both"]["psnr_db"] > 30
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*found["steps_us"], *found["flags"], "loader"))
    assert max(map(len, shown.splitlines())) <= 80
