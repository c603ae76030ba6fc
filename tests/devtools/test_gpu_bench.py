"""The command for GPUs works as far as it can be tried without one, and says so where there is none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
import simplejpeg
import torch
from rich.console import Console

from devtools.gpu import decoding, interference
from devtools.gpu.__main__ import main
from devtools.gpu.decoding import Decoding, run_decoding
from devtools.gpu.interference import Interference, run_interference
from devtools.gpu.models import make_resnet50
from devtools.gpu.parts import LIMIT, GpuConfig
from devtools.gpu.show import print_decoding, print_interference
from penstock.benchmarks.datasets import CASES, make_case
from penstock.loader import ConfigError
from penstock.loader.decoding.images import device_codec

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    screen = Console(record=True, width=300)
    assert main(GpuConfig(results=tmp_path / "results"), screen) == 3
    assert "sees no CUDA device here" in screen.export_text()
    assert not (tmp_path / "results").exists()
    with pytest.raises(ConfigError, match="add --small"):
        main(GpuConfig(device="cpu"), screen)


def test_the_image_model_is_resnet_50() -> None:
    with torch.device("meta"):
        assert sum(one.numel() for one in make_resnet50().parameters()) == 25_557_032


@pytest.mark.full
def test_loaders_take_turns_in_one_loop_and_leave_json_and_a_plot(tmp_path: Path) -> None:
    screen = Console(record=True, width=120)
    config = GpuConfig(
        device="cpu", small=True, parts=("copies", "tokens"), against=(), rounds=1, seconds=0.1, scale=0.001,
        data=tmp_path / "data", results=tmp_path / "results",
    )  # fmt: skip
    assert main(config, screen) == 0
    told = screen.export_text()
    assert "copies: needs a GPU" in told
    assert "gpt on tokens" in told
    result = json.loads((tmp_path / "results" / "gpu-tokens.json").read_text())
    assert result["date"].startswith("20")
    case = result["tokens"]
    assert case["runs"].keys() == {"penstock", LIMIT}
    for runs in case["runs"].values():
        assert runs[0]["samples_per_s"] > 0
        assert 0 <= runs[0]["wait_share"] < 1
    assert (tmp_path / "results" / "gpu.png").stat().st_size > 0


@pytest.mark.full
def test_decoding_is_measured_on_the_cpu_and_by_a_codec_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(make_case(CASES["images"], tmp_path, 0.001))
    monkeypatch.setattr(decoding, "_WARM_S", 0.0)
    asked = Decoding(device="cpu", url=url, rows=4, seconds=0.01)
    told = run_decoding(asked)
    assert "give the loader device='cuda' too" in told["refused"]

    class Codec:
        device = torch.device("cpu")
        turn = threading.Lock()

        @contextmanager
        def lane(self) -> Iterator[Self]:
            yield self

        def wait(self) -> None:
            pass

        def host_memory(self, nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8)

        def decode(self, streams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.from_numpy(simplejpeg.decode_jpeg(one.numpy())).movedim(-1, 0) for one in streams]

    monkeypatch.setattr(device_codec, "open_codec", lambda device: Codec())
    monkeypatch.setattr(decoding, "_BARE_IMAGES", 4)
    rates = run_decoding(asked)
    assert rates.keys() == {"cpu", "threads", "device", "bare", "resize"}
    assert rates["resize"]["images"] == 4
    assert min(rates["resize"].values()) > 0
    assert all(rates[way]["images_per_s"] > 0 for way in ("cpu", "threads", "device", "bare"))
    screen = Console(record=True, width=120)
    print_decoding(rates, screen)
    print_decoding(told, screen)
    assert "images decoded on the device: " in screen.export_text()


@pytest.mark.full
def test_a_loops_launches_are_timed_beside_what_feeds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(make_case(CASES["images"], tmp_path, 0.001))
    monkeypatch.setattr(interference, "_WARM_S", 0.0)
    monkeypatch.setattr(interference, "_OPERATIONS", 10)
    runs = {}
    for way in ("nothing", "threads"):
        asked = Interference(way=way, device="cpu", url=url, rows=4, steps=3, period_s=0.01, processes=1)
        runs[way] = [run_interference(asked)]
        assert all(value > 0 for value in runs[way][0].values())
    screen = Console(record=True, width=120)
    print_interference({"batch_size": 4, "period_s": 0.01, "runs": runs, "refused": {"spdl": "not installed"}}, screen)
    told = screen.export_text()
    assert "4 images each 10 ms" in told
    assert "not measured: spdl: not installed" in told
