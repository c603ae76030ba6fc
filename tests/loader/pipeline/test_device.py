"""The pinned ring: on a device made up of late copies, and on a real one where there is one."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from late_device import TENSORS

from penstock.loader import ByteViews, GatheredBytes
from penstock.loader.errors import ConfigError, LoaderClosedError
from penstock.loader.pipeline.device import ALIGN_BYTES, DeviceFeeder, pack_offsets, resolve_cuda


class LateEvent:
    """Passes when someone waits for it, or when ``let_pass`` is set: only then are the copies before it done."""

    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]], gate: threading.Event | None = None) -> None:
        self._copies = copies
        self._gate = gate
        self.waits = 0

    def run(self) -> None:
        for target, source in self._copies:
            target.copy_(source)
        self._copies = []

    def synchronize(self) -> None:
        self.waits += 1
        if self._gate is not None:
            self._gate.wait(60)
        self.run()


class LateDevice:
    """Reads the pinned memory as late as a device may: when the copy's event is waited for, and no sooner."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.allocated: list[int] = []
        self.sources: list[Sequence[torch.Tensor]] = []
        self.events: list[LateEvent] = []
        self.handed: list[int] = []
        self._gate = gate

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def start_copies(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], LateEvent]:
        self.sources.append(sources)
        targets = [
            torch.empty_strided(source.size(), source.stride(), dtype=source.dtype).fill_(99) for source in sources
        ]
        event = LateEvent(list(zip(targets, sources, strict=True)), self._gate)
        self.events.append(event)
        return targets, event

    def hand_over(self, tensors: Sequence[torch.Tensor], event: LateEvent) -> None:
        event.run()
        self.handed.append(len(tensors))


def feeder(slots: int = 3, gate: threading.Event | None = None) -> tuple[DeviceFeeder, LateDevice]:
    device = LateDevice(gate)
    return DeviceFeeder("cuda", slots=slots, backend=device), device


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
        start = source.storage_offset() * source.element_size()
        assert start % ALIGN_BYTES == 0
        spans.append((start, start + source.numel() * source.element_size()))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert len({source.untyped_storage().data_ptr() for source in device.sources[0]}) == 1


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
    assert len({source.data_ptr() for (source,) in device.sources}) == slots


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

    def fail(sources: Sequence[torch.Tensor]) -> None:
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
