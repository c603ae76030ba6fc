from __future__ import annotations

import json
from pathlib import Path

import pytest
from called_commands import call


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder))
    monkeypatch.setenv("COLUMNS", "100")
    return folder


@pytest.fixture
def words(tmp_path: Path) -> Path:
    table = tmp_path / "words.jsonl"
    table.write_text("".join(json.dumps({"n": n, "word": f"w{n}"}) + "\n" for n in range(200)))
    return table


@pytest.fixture
def shards(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    target = tmp_path / "shards"
    assert call(capsys, "pack", words, target, "--shard-mib", 0.05)[0] == 0
    return target
