"""torchtitan's own base class and configs over the loader, where torchtitan is installed; the example runs on ranks."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import pack
from penstock.loader import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="pip install --no-deps torchtitan==0.3.0"),
]
SEQ_LEN, SAMPLES = 8, 40


@pytest.fixture
def config(tmp_path: Path) -> Any:
    from penstock.loader.integrations import TorchtitanLoader

    (tmp_path / "tokens").mkdir()
    np.arange(SAMPLES * SEQ_LEN + 1, dtype=np.uint16).tofile(tmp_path / "tokens" / "a.bin")
    return TorchtitanLoader.Config(url=str(tmp_path / "tokens"), infinite=False, shuffle=False)


def build(config: Any, **options: Any) -> Any:
    return config.build(**{"dp_world_size": 1, "dp_rank": 0, "seq_len": SEQ_LEN, "local_batch_size": 4, **options})


def test_token_files_become_inputs_positions_and_the_tokens_that_follow(config: Any) -> None:
    loader = build(config, tokenizer=None, snapshot_every_n_steps=5)
    steps = list(loader)
    assert len(steps) == SAMPLES // 4
    for step, (inputs, labels) in enumerate(steps):
        first = torch.arange(4)[:, None] * SEQ_LEN + step * 4 * SEQ_LEN + torch.arange(SEQ_LEN)
        assert torch.equal(inputs["input"], first)
        assert torch.equal(labels, first + 1)
        assert torch.equal(inputs["positions"], torch.arange(SEQ_LEN).expand(4, -1))
    loader.close()


def test_a_finite_loader_ends_after_its_epochs_also_when_it_is_resumed(config: Any) -> None:
    loader = build(replace(config, epochs=3))
    steps = iter(loader)
    for _ in range(23):
        next(steps)
    state = loader.state_dict()
    loader.close()
    halves = [build(replace(config, epochs=3), dp_world_size=2, dp_rank=rank, local_batch_size=2) for rank in (0, 1)]
    for half in halves:
        half.load_state_dict(state)
    counts = [len(list(half)) for half in halves]
    assert counts == [7, 7]
    for half in halves:
        half.close()


def test_torchtitans_validator_can_make_it_endless(config: Any) -> None:
    loader = build(replace(config, infinite=True))
    firsts = [int(labels[0, 0]) for _, (_, labels) in zip(range(25), loader, strict=False)]
    assert firsts == [1 + step % 10 * 4 * SEQ_LEN for step in range(25)]
    loader.close()


def test_samples_of_another_length_are_refused_by_the_lengths(tmp_path: Path) -> None:
    from penstock.loader.integrations import TorchtitanLoader

    pack(([7] * 6 for _ in range(20)), str(tmp_path / "packed"), format="tokens", seq_len=6, progress=False)
    loader = build(TorchtitanLoader.Config(url=str(tmp_path / "packed"), dtype=None))
    with pytest.raises(ConfigError, match=r"'tokens' have \[6\] tokens, and training.seq_len=8 needs 9"):
        next(iter(loader))
    loader.close()
    with pytest.raises(ConfigError, match="give the URL"):
        build(TorchtitanLoader.Config())
