"""What a batch consists of: chosen columns, decoded, transformed and collated, as tensors where values allow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from loaders_of_ranks import SIZES, ids_of, ranks
from tar_dataset import write_tars

from penstock import DistributedDataLoader, ImageDecoder, TokensFormat
from penstock.loader import (
    ConfigError,
)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


def test_columns_choose_what_is_read(tars):
    with DistributedDataLoader(tars, batch_size=16, columns=["txt"]) as loader:
        assert set(next(iter(loader))) == {"__key__", "txt"}
    with pytest.raises(ConfigError, match=r"\['jpg'\] is not among \['bin', 'txt'\]"):
        DistributedDataLoader(tars, batch_size=16, columns=["jpg"])
    with pytest.raises(ConfigError, match="nothing"):
        DistributedDataLoader(tars, batch_size=16, columns=[])


def test_a_decoder_for_a_field_that_is_not_there_is_refused_with_those_that_are(tars):
    with pytest.raises(ConfigError, match=r"\['tyt'\].*'bin', 'txt'"):
        DistributedDataLoader(tars, batch_size=16, decode={"tyt": int})


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, dict])
@pytest.mark.parametrize("batch_size", [1, 2])  # with 1 the rank has samples of steps that are gathered with the last
def test_a_rank_without_samples_of_the_last_batch_gets_empty_tensors_of_the_right_type(tmp_path, batch_size, transform):
    write_tars(tmp_path, [9])
    options = {"decode": {"txt": int, "bin": lambda data: np.frombuffer(data, np.uint8)}, "transform": transform}
    loaders = ranks(str(tmp_path), 4, batch_size=batch_size, last_batch="partial", with_ids=True, **options)
    first, *_, last = [list(loader)[-1] for loader in loaders]
    assert len(first["__id__"]) == 1
    assert (last["txt"].dtype, last["txt"].shape) == (torch.int64, (0,))
    assert (last["bin"].dtype, last["bin"].shape) == (torch.uint8, (0, 40))
    assert last["__id__"].shape == (0,)
    assert last["__key__"] == []


def test_a_decoder_of_a_text_column_is_given_its_text(tmp_path):
    pq.write_table(pa.table({"caption": ["a cat", "a dog", "ein Bär"]}), tmp_path / "t.parquet")
    with DistributedDataLoader(str(tmp_path), batch_size=3, decode={"caption": len}) as loader:
        assert sorted(next(iter(loader))["caption"].tolist()) == [5, 5, 7]
    with DistributedDataLoader(str(tmp_path), batch_size=3, decode={"caption": str}) as loader:
        assert "ein Bär" in next(iter(loader))["caption"]


def test_hashes_of_64_bits_keep_their_sign(tmp_path):
    values = np.array([1, 2**63, 2**64 - 1], np.uint64)
    pq.write_table(pa.table({"hash": values}), tmp_path / "t.parquet")
    with DistributedDataLoader(str(tmp_path), batch_size=3, shuffle=False) as loader:
        assert next(iter(loader))["hash"].tolist() == values.tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused_at_once(tars):
    with pytest.raises(ConfigError, match="no CUDA device"):
        DistributedDataLoader(tars, batch_size=4, device="cuda")
    with pytest.raises(ConfigError, match="mps"):
        DistributedDataLoader(tars, batch_size=4, device="mps")


def test_decode_none_gives_the_bytes_of_the_shard(tars):
    with DistributedDataLoader(tars, batch_size=16, decode=None, with_ids=True) as loader:
        batch = next(iter(loader))
        assert batch["txt"] == [str(sample).encode() for sample in ids_of(batch)]


@pytest.mark.slow
def test_a_transform_sees_samples_and_its_generator_depends_on_the_sample_alone(tars):
    def transform(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"number": int(sample["txt"]), "noise": rng.integers(0, 1 << 30)}

    def noises(world_size: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for loader in ranks(tars, world_size, batch_size=6, transform=transform, last_batch="partial", threads=2):
            for batch in loader:
                assert batch["number"].dtype == torch.int64
                found.update(zip(batch["number"].tolist(), batch["noise"].tolist(), strict=True))
            loader.close()
        return found

    alone = noises(1)
    assert len(set(alone.values())) > 300
    assert noises(3) == alone


def test_a_collate_gets_the_samples_and_gives_the_batch(tars):
    def collate(samples: list[dict[str, Any]]) -> tuple[int, ...]:
        return tuple(sorted(sample["__id__"] for sample in samples))

    with DistributedDataLoader(tars, batch_size=16, collate=collate, with_ids=True) as loader:
        assert all(isinstance(batch, tuple) and len(batch) == 16 for batch in loader)


def test_table_rows_come_as_tensors_and_python_values(tmp_path):
    rows = 1000
    numbers = np.arange(rows)
    table = pa.table(
        {
            **{f"f{i}": (numbers * i).astype(np.float32) for i in range(6)},
            **{f"c{i}": (numbers + i).astype(np.uint32) for i in range(6)},
            "id": numbers,
            "word": [f"w{n}" for n in numbers],
            "nested": [{"a": int(n)} for n in numbers],
            "maybe": pa.array([None if n % 3 == 0 else int(n) for n in numbers], pa.int32()),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=90)
    with DistributedDataLoader(str(tmp_path), batch_size=64, last_batch="partial") as loader:
        seen = []
        for batch in loader:
            ids = batch["id"]
            assert (batch["f3"] == (ids * 3).float()).all()
            assert batch["c5"].dtype == torch.int64
            assert (batch["c5"] == ids + 5).all()
            assert batch["word"] == [f"w{n}" for n in ids.tolist()]
            assert batch["nested"] == [{"a": n} for n in ids.tolist()]
            assert (batch["maybe__null"] == (ids % 3 == 0)).all()
            assert (batch["maybe"][~batch["maybe__null"]] == ids[ids % 3 != 0]).all()
            seen += ids.tolist()
        assert sorted(seen) == list(range(rows))


def test_tokens_come_as_int64_sequences(tmp_path):
    tokens = np.arange(40_000, dtype=np.uint16)
    for number, part in enumerate(np.split(tokens, [13_000, 13_500])):
        part.tofile(tmp_path / f"t{number}.bin")
    with DistributedDataLoader(str(tmp_path), batch_size=4, format=TokensFormat(seq_len=128)) as loader:
        for batch in loader:
            assert batch["tokens"].shape == (4, 128)
            assert batch["tokens"].dtype == torch.int64
            assert (batch["tokens"].diff(dim=1) == 1).all()


def test_images_are_decoded_into_their_slot_the_same_on_any_number_of_ranks(tmp_path):
    cv2 = pytest.importorskip("cv2")
    (tmp_path / "d").mkdir()
    import io
    import tarfile

    with tarfile.open(tmp_path / "d" / "a.tar", "w") as tar:
        for number in range(60):
            pixels = np.random.default_rng(number).integers(0, 255, (40, 50, 3)).astype(np.uint8)
            fields = {"jpg": cv2.imencode(".jpg", pixels)[1].tobytes(), "cls": str(number).encode()}
            for extension, data in fields.items():
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    decode = {"jpg": ImageDecoder(size=24, crop="random", flip=0.5)}

    def images(world_size: int) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for loader in ranks(str(tmp_path / "d"), world_size, batch_size=5, decode=decode, last_batch="partial"):
            for batch in loader:
                assert batch["jpg"].shape[1:] == (3, 24, 24)
                assert batch["jpg"].is_contiguous(memory_format=torch.channels_last)
                found.update({int(c): image.clone() for c, image in zip(batch["cls"], batch["jpg"], strict=True)})
            loader.close()
        return found

    alone, together = images(1), images(3)
    assert len(alone) == 60
    assert all(torch.equal(alone[number], together[number]) for number in alone)
