"""The pinned ring: on a device made up of late copies, and on a real one where there is one."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree
from late_device import TENSORS, LateDevice, feeder
from tar_dataset import write_tars

from penstock import DistributedDataLoader
from penstock.loader import ByteViews, GatheredBytes
from penstock.loader.errors import ConfigError, LoaderClosedError
from penstock.loader.pipeline.device import ALIGN_BYTES, DeviceFeeder, pack_offsets, resolve_cuda


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_values_dtype_and_strides(name):
    ring, _ = feeder()
    tensor = TENSORS[name]
    arrived = ring.stage({"x": tensor}).take()["x"]
    assert arrived.dtype == tensor.dtype
    assert arrived.stride() == torch.empty_like(tensor).stride()
    torch.testing.assert_close(arrived, tensor.detach().resolve_conj(), rtol=0, atol=0)


def test_a_whole_batch_arrives_with_images_still_channels_last():
    ring, device = feeder()
    arrived = ring.stage(TENSORS).take()
    assert list(arrived) == list(TENSORS)
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(arrived[name], tensor.detach().resolve_conj(), rtol=0, atol=0)
    assert arrived["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert device.handed == [len(TENSORS)]


def test_tensors_are_packed_without_overlap_at_aligned_offsets():
    ring, device = feeder()
    ring.stage(TENSORS)
    spans = []
    for source in device.sources[0]:
        if source.nbytes:
            assert source.offset % ALIGN_BYTES == 0
            spans.append((source.offset, source.offset + source.nbytes))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert len({source.storage for source in device.sources[0] if source.nbytes}) == 1


def test_offsets_are_packed_one_after_another():
    assert pack_offsets([1, 256, 0, 257, 3]) == ([0, 256, 512, 512, 1024], 1280)
    assert pack_offsets([]) == ([], 0)


def test_lists_tuples_and_dicts_are_moved_and_other_values_pass_through():
    ring, device = feeder()
    meta, sparse = torch.empty(2, device="meta"), torch.eye(2).to_sparse()
    batch = {
        "list": [torch.ones(1), "a", torch.zeros(2)],
        "pair": (torch.ones(1), 2),
        "dict": {"a": torch.ones(3), "b": None},
        "text": ["x", "y"],
        "elsewhere": meta,
        "sparse": sparse,
    }
    arrived = ring.stage(batch).take()
    assert [type(value) for value in arrived["list"]] == [torch.Tensor, str, torch.Tensor]
    assert arrived["list"][2].tolist() == [0, 0]
    assert arrived["pair"][1] == 2
    assert type(arrived["pair"]) is tuple
    assert arrived["dict"]["b"] is None
    assert arrived["text"] == ["x", "y"]
    assert arrived["elsewhere"] is meta
    assert arrived["sparse"] is sparse
    assert device.handed == [4]
    assert batch["list"][0] is not arrived["list"][0]


def test_views_of_bytes_arrive_gathered():
    views = ByteViews([b"one", None, b"", bytes(range(100))])
    staged = feeder()[0].stage({"blob": views, "n": torch.arange(4)}).take()
    assert type(staged["blob"]) is GatheredBytes
    assert all(torch.equal(a, b) for a, b in zip(staged["blob"], views.gather(), strict=True))


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


class Own:
    """A batch of a class of the user's, which nothing is known of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    "batch",
    [
        (torch.arange(3), "a"),
        [torch.arange(3), [torch.ones(2)], None],
        Pair(torch.arange(3), {"x": Pair(torch.ones(2), 1)}),
        torch.arange(3),
    ],
    ids=["tuple", "list", "named tuple", "tensor"],
)
def test_what_a_collate_makes_is_moved_whatever_it_is_made_of(batch):
    ring, device = feeder()
    arrived = ring.stage(batch).take()
    assert type(arrived) is type(batch)
    assert arrived is not batch
    leaves, expected = (torch.utils._pytree.tree_leaves(each) for each in (arrived, batch))
    assert len(leaves) == len(expected)
    for leaf, value in zip(leaves, expected, strict=True):
        assert (torch.equal(leaf, value) and leaf is not value) if isinstance(value, torch.Tensor) else leaf == value
    assert device.handed == [sum(isinstance(value, torch.Tensor) for value in expected)]


@pytest.mark.parametrize("batch", [Own(torch.ones(2)), None, "text"], ids=["object", "none", "text"])
def test_a_batch_that_is_neither_dict_list_nor_tuple_passes_through(batch):
    assert feeder()[0].stage(batch).take() is batch


def test_views_of_bytes_arrive_gathered_wherever_they_are():
    views = ByteViews([b"one", None])
    for batch in (views, [views], (1, {"blob": [views]}), {"own": {"blob": views}}):
        leaves = torch.utils._pytree.tree_leaves(
            feeder()[0].stage(batch).take(), is_leaf=lambda value: isinstance(value, GatheredBytes)
        )
        (found,) = [leaf for leaf in leaves if not isinstance(leaf, int)]
        assert type(found) is GatheredBytes
        assert all(torch.equal(a, b) for a, b in zip(found, views.gather(), strict=True))


def test_a_batch_may_be_changed_as_soon_as_it_is_staged():
    ring, _ = feeder()
    images = torch.arange(1000)
    staged = ring.stage({"x": images})
    images.zero_()
    assert staged.take()["x"].sum() == 499500


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_a_slot_is_not_overwritten_before_its_copy_is_done(slots, lag):
    ring, device = feeder(slots)
    waiting, arrived = [], []
    for number in range(20):
        waiting.append(ring.stage({"x": torch.full((1000,), number), "n": number}))
        if len(waiting) > lag:
            arrived.append(waiting.pop(0).take())
    arrived += [staged.take() for staged in waiting]
    for number, batch in enumerate(arrived):
        assert batch["n"] == number
        assert (batch["x"] == number).all()
    assert len({source.address for (source,) in device.sources}) == slots


def test_staging_waits_only_for_the_slot_it_is_about_to_fill():
    ring, device = feeder(slots=3)
    for number in range(5):
        ring.stage({"x": torch.full((4,), number)})
    assert [event.waits for event in device.events] == [1, 1, 0, 0, 0]


def test_a_buffer_grows_to_the_largest_batch_and_is_then_kept():
    ring, device = feeder(slots=1)
    for rows in (10, 1 << 20, 3 << 20, 100, 3 << 20):
        staged = ring.stage({"x": torch.ones(rows, dtype=torch.uint8)})
        assert staged.take()["x"].shape == (rows,)
    assert device.allocated == [1 << 20, 4 << 20]
    assert ring.pinned_bytes == 4 << 20


def test_a_batch_without_tensors_passes_through():
    ring, _ = feeder()
    assert ring.stage({"a": ["x"], "b": 3}).take() == {"a": ["x"], "b": 3}
    assert ring.stage({}).take() == {}


def test_close_in_the_middle_waits_for_copies_frees_the_ring_and_keeps_staged_batches_good():
    ring, device = feeder(slots=2)
    staged = [ring.stage({"x": torch.full((8,), number)}) for number in range(2)]
    ring.close()
    ring.close()
    assert ring.pinned_bytes == 0
    assert [event.waits for event in device.events] == [1, 1]
    assert [batch.take()["x"][0].item() for batch in staged] == [0, 1]
    with pytest.raises(LoaderClosedError):
        ring.stage({"x": torch.ones(1)})


def test_close_while_the_feeder_waits_for_a_slot_ends_both():
    gate = threading.Event()
    ring, device = feeder(slots=1, gate=gate)
    ring.stage({"x": torch.ones(3)})
    outcome: list[object] = []

    def feed() -> None:
        try:
            while True:
                outcome.append(ring.stage({"x": torch.ones(3)}))
                time.sleep(0.001)
        except LoaderClosedError as exc:
            outcome.append(exc)

    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    deadline = time.monotonic() + 60
    while device.events[0].waits == 0:
        assert time.monotonic() < deadline, "staging never waited for the only slot"
        time.sleep(0.001)
    closing = threading.Thread(target=ring.close)
    closing.start()
    gate.set()
    closing.join(60)
    feeding.join(60)
    assert not closing.is_alive()
    assert not feeding.is_alive()
    assert isinstance(outcome[-1], LoaderClosedError)
    assert ring.pinned_bytes == 0


def test_a_copy_that_fails_leaves_the_ring_usable():
    ring, device = feeder(slots=2)
    start_copies = device.start_copies

    def fail(sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> None:
        raise torch.OutOfMemoryError("no memory")

    device.start_copies = fail
    with pytest.raises(torch.OutOfMemoryError):
        ring.stage({"x": torch.ones(3)})
    device.start_copies = start_copies
    for number in range(4):
        assert ring.stage({"x": torch.full((3,), number)}).take()["x"].tolist() == [number] * 3
    ring.close()


def test_devices_that_need_no_staging_or_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="'cpu' needs no staging"):
        DeviceFeeder("cpu")
    with pytest.raises(ConfigError, match="'nonsense'"):
        DeviceFeeder("nonsense")
    with pytest.raises(ConfigError, match="slots=0"):
        DeviceFeeder("cuda", slots=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(ConfigError, match="no CUDA device here"):
        resolve_cuda("cuda:0")


class Resident(torch.Tensor):
    """Says that it is on a CUDA device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def test_tensors_that_are_on_the_device_already_are_handed_over_and_not_copied():
    ring, device = feeder()
    there = torch.zeros(2, 3).as_subclass(Resident)
    batch = ring.stage({"jpg": there, "cls": torch.arange(2)}).take()
    ring.close()
    assert batch["jpg"] is there
    assert batch["cls"].tolist() == [0, 1]
    assert [len(sources) for sources in device.sources] == [1]
    assert device.handed == [2]


@pytest.mark.parametrize("options", [{}, {"keep": lambda sample: True}], ids=["plain", "filtered"])
def test_a_loader_with_a_collate_of_its_own_feeds_and_peeks(tmp_path, monkeypatch, options):
    monkeypatch.setattr("penstock.loader.pipeline.device.resolve_cuda", torch.device)
    monkeypatch.setattr("penstock.loader.pipeline.device.CudaBackend", lambda device: LateDevice())
    write_tars(tmp_path, [20])

    def collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, list[str]]:
        return torch.tensor([int(sample["txt"]) for sample in samples]), [sample["txt"] for sample in samples]

    with DistributedDataLoader(
        str(tmp_path), batch_size=5, shuffle=False, device="cuda:0", collate=collate, **options
    ) as loader:
        batches = [loader.peek(), *loader]
    assert [numbers.tolist() for numbers, _ in batches] == [
        [0, 1, 2, 3, 4],
        *(list(range(n, n + 5)) for n in range(0, 20, 5)),
    ]
    assert all(texts == [str(number) for number in numbers.tolist()] for numbers, texts in batches)
