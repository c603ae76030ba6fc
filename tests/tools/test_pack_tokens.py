"""``pack`` of text: tokenizers are named as for ``Packing``, and what is written is as if texts came one by one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packed_samples import read_samples
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock import Packing, pack
from penstock.cli import run
from penstock.loader import ConfigError, DatasetError
from penstock.loader.packing.packer import Packer
from penstock.storage import MemoryStore
from penstock.tools.packing.target import Target

_WORDS = [f"w{number}" for number in range(50)]
_ROWS = [{"text": " ".join(_WORDS[(7 * row + n) % 50] for n in range(2 + row % 9))} for row in range(200)]
_TOKENS = [int(word[1:]) for row in _ROWS for word in row["text"].split()]
_OPTIONS: dict[str, Any] = {"format": "tokens", "seq_len": 8}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


@pytest.fixture
def names(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ways to say the same tokenizer."""
    (tmp_path / "named").mkdir()
    tokenizer.save(str(tmp_path / "named" / "tokenizer.json"))
    (tmp_path / "own_words.py").write_text(
        "def one(text):\n    return [int(word[1:]) for word in text.split()]\n\n\n"
        "def many(texts):\n    return [one(text) for text in texts]\n\n\n"
        "def letters(texts):\n    return [one(text) if ' ' in text else [0] for text in texts]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return {
        "file": tmp_path / "named" / "tokenizer.json",
        "text": str(tmp_path / "named" / "tokenizer.json"),
        "folder": str(tmp_path / "named"),
        "object": tokenizer,
        "transformers": PreTrainedTokenizerFast(tokenizer_object=tokenizer),
        "import path": "own_words:one",
        "list": "own_words:many",
        "list that takes letters": "own_words:letters",
        "function": lambda text: [int(word[1:]) for word in text.split()],
    }


def written(url: str) -> list[int]:
    return [token for sample in read_samples(url) for token in sample["tokens"]]


_WAYS = [
    "file",
    "text",
    "folder",
    "object",
    "transformers",
    "import path",
    "list",
    "list that takes letters",
    "function",
]


@pytest.mark.parametrize("way", _WAYS)
def test_every_way_to_name_a_tokenizer_writes_the_same_tokens(way: str, names: dict[str, Any], tmp_path: Path) -> None:
    pack(_ROWS, tmp_path / "out", tokenizer=names[way], **_OPTIONS)
    assert written(str(tmp_path / "out")) == _TOKENS[: len(_TOKENS) // 8 * 8]


@pytest.mark.parametrize("way", ["file", "folder", "object", "transformers", "list"])
def test_packing_takes_the_same_names(way: str, names: dict[str, Any]) -> None:
    packer = Packer.open(Packing(seq_len=8, field="text", tokenizer=names[way]))
    assert packer.encoder is not None
    assert [ids.tolist() for ids in packer.encoder.encode(["w3 w1", "w2"])] == [[3, 1], [2]]


def test_the_command_takes_a_file_or_a_function_of_the_current_folder(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs.jsonl").write_text('{"text": "w1 w2 w3 w4"}\n' * 4)
    for number, tokenizer in enumerate(["named/tokenizer.json", "named", "own_words:one"]):
        target = f"out{number}"
        assert (
            run(["pack", "docs.jsonl", target, "--format", "tokens", "--seq-len", "4", "--tokenizer", tokenizer]) == 0
        )
        assert written(target) == [1, 2, 3, 4] * 4


def test_a_tokenizer_may_lie_in_any_store(tokenizer: Tokenizer, tmp_path: Path, memory_store: MemoryStore) -> None:
    memory_store.put("tokenizer.json", tokenizer.to_str().encode())
    for number, url in enumerate([memory_store.url, f"{memory_store.url}/", f"{memory_store.url}/tokenizer.json"]):
        pack(_ROWS, tmp_path / str(number), tokenizer=url, **_OPTIONS)
        assert written(str(tmp_path / str(number))) == _TOKENS[: len(_TOKENS) // 8 * 8]
    memory_store.put("tokenizer.json", b"{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        pack(_ROWS, tmp_path / "out", tokenizer=memory_store.url, **_OPTIONS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere/tokenizer.json", "there is no file"),
        ("no_such_module:encode", "cannot be imported"),
        (7, "tokenizer=7: give the path"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_refused_before_anything_is_read(
    given: Any, words: str, tmp_path: Path
) -> None:
    def rows() -> Iterable[dict[str, str]]:
        raise AssertionError("read")
        yield

    with pytest.raises(ConfigError, match=words):
        pack(rows(), tmp_path / "out", tokenizer=given, **_OPTIONS)
    assert not (tmp_path / "out").exists()


def test_texts_and_tokens_may_follow_each_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"text": "w1 w2"}, {"text": [3, 4]}, {"text": b"w5 w6"}, {"text": ""}, {"text": "w7 w8"}]
    pack(rows, tmp_path / "out", tokenizer=tokenizer, field="text", **_OPTIONS)
    assert written(str(tmp_path / "out")) == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(DatasetError, match="sample 1: no text"):
        pack([{"text": "w1"}, {"text": None}], tmp_path / "none", tokenizer=tokenizer, field="text", **_OPTIONS)


def test_a_text_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    strict = Tokenizer(models.WordLevel({"a": 0}, unk_token="missing"))
    with pytest.raises(DatasetError, match=r"sample 3: its text cannot be tokenised"):
        pack([{"text": "a"}] * 3 + [{"text": "b"}], tmp_path / "out", tokenizer=strict, **_OPTIONS)


def test_an_interrupted_pack_goes_on_with_the_same_tokenizer(
    names: dict[str, Any], tmp_path: Path, memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text('{"text": "w1 w2 w3 w4"}\n' * 40)

    def put_two(self: Target, shards: Iterable[Any]) -> None:
        put_all(self, [shard for _, shard in zip(range(2), shards, strict=False)])
        self._save()
        raise KeyboardInterrupt

    put_all = Target.put_all
    monkeypatch.setattr(Target, "put_all", put_two)
    with pytest.raises(KeyboardInterrupt):
        pack(docs, memory_store.url, tokenizer=names["file"], shard_bytes=64, **_OPTIONS)
    monkeypatch.setattr(Target, "put_all", put_all)
    assert pack(docs, memory_store.url, tokenizer=names["object"], shard_bytes=64, **_OPTIONS).kept_shards == 2
    assert written(memory_store.url) == [1, 2, 3, 4] * 40


@pytest.mark.slow
def test_processes_write_the_tokens_that_one_writes(names: dict[str, Any], tmp_path: Path) -> None:
    pack(_ROWS, tmp_path / "one", tokenizer=names["file"], **_OPTIONS)
    pack(iter(_ROWS), tmp_path / "two", tokenizer=names["file"], processes=2, **_OPTIONS)
    name = "shard-000000.bin"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
