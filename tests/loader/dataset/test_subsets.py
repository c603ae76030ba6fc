"""Subsets of a data set of the Hub never mix: the default one is read, and several without one are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import FakeHub
from hypothesis import given
from hypothesis import strategies as st

from penstock import DistributedDataLoader, open_manifest, verify
from penstock.loader import DatasetError, DoubtfulDatasetWarning
from penstock.loader.dataset.subsets import read_subsets

GSM8K = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
  - split: test
    path: socratic/test-*
dataset_info:
- config_name: main
  features:
  - name: question
    dtype: string
---
# GSM8K

configs:
- this is text
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two subsets of two splits; each sample says where it is from."""
    for subset in ("main", "socratic"):
        (tmp_path / subset).mkdir()
        for split in ("train", "test"):
            table = pa.table({"x": [f"{subset} {split}"] * 2})
            pq.write_table(table, tmp_path / subset / f"{split}-00000-of-00001.parquet")
    return tmp_path


def read(source: Any, **options: Any) -> set[str]:
    with DistributedDataLoader(source, batch_size=100, shuffle=False, last_batch="partial", **options) as loader:
        return {value for batch in loader for value in batch["x"]}


def test_several_subsets_are_refused_with_their_names_and_what_to_do(folder: Path) -> None:
    (folder / "README.md").write_text(GSM8K)
    for options in ({}, {"split": "train"}, {"split": "all"}):
        for source in (folder, [f"{folder}/"]):
            with pytest.raises(
                DatasetError, match=r"several subsets.*: main \(main/train-\*, main/test-\*\); socratic"
            ):
                open_manifest(source, **options)
    with pytest.raises(DatasetError, match=f"by its folder, such as {folder}/main"):
        verify(folder, split="train")
    assert read(f"{folder}/main", split="train") == {"main train"}
    assert len(read(f"{folder}/**")) == 4


def test_the_default_subset_is_read_where_none_is_named(folder: Path) -> None:
    (folder / "README.md").write_text(
        GSM8K.replace("- config_name: socratic\n", "- config_name: socratic\n  default: true\n")
    )
    assert read(folder, split="train") == {"socratic train"}
    assert read(folder, split="all") == {"socratic train", "socratic test"}
    with pytest.raises(DatasetError, match="several splits"):
        open_manifest(folder)
    (folder / "README.md").write_text(GSM8K.replace("config_name: main", "config_name: default"))
    assert read([f"{folder}/"], split=["test"]) == {"main test"}


def test_one_subset_alone_and_readmes_of_other_kinds_change_nothing(folder: Path) -> None:
    everything = open_manifest(folder, split="train").fingerprint
    for text in ("", "# configs:\n- config_name: a\n", "---\nlicense: mit\n---\n", "---\nconfigs:\n"):
        (folder / "README.md").write_text(text)
        assert open_manifest(folder, split="train").fingerprint == everything
    (folder / "README.md").write_text(GSM8K)
    for path in (folder / "socratic").iterdir():
        path.unlink()
    assert read(folder, split="train") == {"main train"}


def test_a_list_of_subsets_that_is_not_understood_is_told(folder: Path) -> None:
    (folder / "README.md").write_text("---\nconfigs: &anchor\n- {config_name: main}\n---\n")
    with pytest.warns(DoubtfulDatasetWarning, match="cannot be read"):
        assert len(read(folder, split="train")) == 2


def test_subsets_on_the_hub_are_refused_alike(folder: Path, hub: FakeHub) -> None:
    (folder / "README.md").write_text(GSM8K)
    for path in folder.rglob("*.*"):
        hub.pipe_file(f"hf://datasets/org/name/{path.relative_to(folder)}", path.read_bytes())
    with pytest.raises(DatasetError, match="such as hf://datasets/org/name/main"):
        open_manifest("hf://datasets/org/name", split="train")
    assert read("hf://datasets/org/name/main", split="test") == {"main test"}


LAYOUTS = [
    ("- config_name: a\n  data_files: a/*.jsonl", [("a", ("a/*.jsonl",), False)]),
    ('- config_name: "a b"\n  data_files: "*.csv"\n  default: true', [("a b", ("*.csv",), True)]),
    ("  - config_name: a\n    data_files:\n      - 'x.json'\n      - y.json", [("a", ("x.json", "y.json"), False)]),
    ("- config_name: a\n  data_files: [x, \"y\"]  # both", [("a", ("x", "y"), False)]),
    ("- config_name: a\n  data_dir: en\n- config_name: b\n  data_dir: de/\n  data_files: '*.json'",
     [("a", ("en/**",), False), ("b", ("de/*.json",), False)]),
    ("- config_name: a\n  data_files:\n  - split: train\n    path:\n    - ./x\n    - y\n  sep: x\n-\n  config_name: b",
     [("a", ("x", "y"), False), ("b", ("**",), False)]),
    ("- config_name: a\n  data_files: data/**.parquet", [("a", ("data/*.parquet",), False)]),
    ("- config_name: default\n  data_files:\n    train: x\n    test: y\n\n", [("default", ("x", "y"), True)]),
]  # fmt: skip


@pytest.mark.parametrize(("block", "expected"), LAYOUTS)
def test_all_ways_to_list_subsets_are_understood(block: str, expected: list[Any]) -> None:
    found = read_subsets(f"---\ntags:\n- x\nconfigs:\n{block}\nlicense: mit\n---\n")
    assert [(subset.name, subset.patterns, subset.is_default) for subset in found] == expected


@given(st.text(alphabet="-: \nabx'\"[]#*"))
def test_no_readme_is_more_than_not_understood(text: str) -> None:
    try:
        read_subsets(f"---\nconfigs:\n{text}\n---\n")
    except ValueError:
        return
