"""``pack`` and ``index`` on a Ray cluster write the bytes that they write here, and go on where they were stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import run_ray

from penstock.cli import run
from penstock.loader.dataset.index import read_saved_manifest
from penstock.loader.errors import ConfigError, DatasetError
from penstock.loader.reading import spread_sums
from penstock.storage.errors import ClusterError
from penstock.tools.pack import pack

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with run_ray(3) as address:
        yield address


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n} " * (n % 7)}) + "\n" for n in range(1000)))
    return path


def shorten(sample: dict[str, Any]) -> dict[str, Any] | None:
    if len(sample["text"]) % 5 == 4:
        return None
    return {"text": sample["text"].upper()}


def fail_at_702(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["text"].startswith("text 702"):
        raise ValueError("no 702")
    return sample


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}  # a manifest has ETags


def test_a_cluster_packs_the_bytes_that_one_process_packs_and_goes_on_after_a_failure(
    cluster: str, rows: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"format": "parquet", "shard_bytes": 3000, "progress": False}
    pack(rows, tmp_path / "here", map=shorten, **options)
    pack(rows, tmp_path / "there", map=shorten, cluster=cluster, **options)
    assert content(tmp_path / "there") == content(tmp_path / "here")
    with pytest.raises(DatasetError, match=r"sample 702.*no 702"):
        pack(rows, tmp_path / "failed", map=fail_at_702, cluster=cluster, **options)


def test_a_cluster_sums_what_one_process_sums_and_nothing_twice(
    cluster: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(spread_sums, "_TASK_BYTES", 1)
    monkeypatch.setattr(spread_sums, "_KEEP_EVERY_S", 0.0)
    pack(rows, tmp_path / "data", format="parquet", shard_bytes=3000, progress=False, checksums=False)
    shutil.copytree(tmp_path / "data", tmp_path / "here")
    assert run(["index", str(tmp_path / "here")]) == 0
    spread = spread_sums._spread

    def stop_halfway(*arguments: Any) -> Iterator[Any]:
        for number, one in enumerate(spread(*arguments)):
            if number == 1:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(spread_sums, "_spread", stop_halfway)
    assert run(["index", str(tmp_path / "data"), "--ray", "--address", cluster]) != 0
    monkeypatch.setattr(
        spread_sums, "_spread", lambda ray, manifest, todo, *rest: _note(spread, todo, ray, manifest, rest)
    )
    _asked.clear()
    assert run(["index", str(tmp_path / "data"), "--ray", "--address", cluster]) == 0
    here, there = (
        read_saved_manifest(str(tmp_path / name / "penstock-manifest.arrow"), None) for name in ("here", "data")
    )
    assert 0 < len(_asked) < there.num_chunks
    assert there.checksums is not None
    assert here.checksums is not None
    assert there.checksums.tolist() == here.checksums.tolist()
    assert there.fingerprint == here.fingerprint
    capsys.readouterr()


_asked: list[int] = []


def _note(spread: Any, todo: list[int], ray: Any, manifest: Any, rest: tuple[Any, ...]) -> Iterator[Any]:
    _asked.extend(todo)
    return spread(ray, manifest, todo, *rest)  # type: ignore[no-any-return]


def test_no_cluster_and_nothing_to_spread_are_errors_at_once(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no Ray cluster is reachable at 127\.0\.0\.1:9"):
        pack(rows, tmp_path / "out", map=shorten, cluster="127.0.0.1:9", progress=False)
    with pytest.raises(ClusterError, match="write it as host:port"):
        pack(rows, tmp_path / "out", map=shorten, cluster="somewhere", progress=False, overwrite=True)
    with pytest.raises(ConfigError, match="neither is given"):
        pack(rows, tmp_path / "out", cluster="127.0.0.1:9", progress=False)
    with pytest.raises(ConfigError, match="give one of them"):
        pack(rows, tmp_path / "out", map=shorten, processes=2, cluster="127.0.0.1:9", progress=False)
