"""What the values of a field become in a batch."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from penstock.loader.decoding.row_job import collate_samples, collate_values, images_to_tensor


@pytest.mark.parametrize(
    "values",
    [
        [1, -2, 3],
        [1.0, 2.5],
        [True, False],
        [np.arange(6).reshape(2, 3), np.ones((2, 3), np.int64)],
        [np.float32(1.5), np.float32(2)],
        [torch.zeros(2, 2), torch.ones(2, 2)],
        [np.zeros((0, 3), np.float16)] * 2,
    ],
)
def test_equal_values_become_the_tensor_of_torchs_default_collate(values):
    tensor, expected = collate_values(values), default_collate(values)
    assert tensor.dtype == expected.dtype
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def test_ints_among_floats_are_floats():
    assert collate_values([1, 2.5]).tolist() == [1.0, 2.5]
    assert collate_values([1, 2.5]).dtype == torch.float64


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([np.int64(1), 2], torch.int64),
        ([1, torch.tensor(2)], torch.int64),
        ([np.float64(1.5), 2.5], torch.float64),
        ([np.float64(1.5), 2], torch.float64),
        ([np.float64(1.5), 2, 3.5], torch.float64),
        ([np.bool_(True), False], torch.bool),
        ([np.ones(2, np.float32), torch.zeros(2)], torch.float32),
        ([np.frombuffer(b"\x00\x01\x00\x02", ">i2"), torch.ones(2, dtype=torch.int16)], torch.int16),
        ([np.float32(1), torch.tensor(2.0)], torch.float32),
    ],
)
def test_values_that_are_one_tensor_by_type_are_one_together(values, dtype):
    tensor = collate_values(values)
    assert tensor.dtype == dtype
    assert tensor.tolist() == [value if isinstance(value, int | float) else value.tolist() for value in values]
    assert collate_values(values[::-1]).equal(tensor.flip(0))


@pytest.mark.parametrize(
    "values",
    [
        [np.float32(1), 2.0],
        [np.int32(1), 2],
        [np.uint64(1), 2],
        [np.int64(1), True],
        [np.int64(1), 2.5],
        [np.int64(1), 2**63],
        [np.float64(1), 10**400],
        [np.int64(1), None],
        [np.int64(1), "a"],
        [np.str_("a"), 1],
        [np.ones(1), 1.0],
        [np.array(["a"]), torch.ones(1)],
    ],
)
def test_numbers_of_other_types_stay_the_list_that_they_are(values):
    collated = collate_values(values)
    assert type(collated) is list
    assert all(one is other for one, other in zip(collated, values, strict=True))


def test_arrays_beside_tensors_of_other_shapes_or_dtypes_become_a_list_of_tensors():
    ragged = collate_values([np.zeros(2), torch.zeros(3)])
    assert [tuple(tensor.shape) for tensor in ragged] == [(2,), (3,)]
    mixed = collate_values([np.zeros(2, np.int16), torch.zeros(2)])
    assert [tensor.dtype for tensor in mixed] == [torch.int16, torch.float32]


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        [b"a"],
        [{"a": 1}],
        [None, 1],
        [1, "a"],
        [True, 1],
        [[1], [2]],
        [2**63, 1],
        [10**400, 0.5],
        [-(2**63) - 1],
        [],
    ],
)
def test_anything_else_stays_the_list_that_it_is(values):
    collated = collate_values(values)
    assert collated == values
    assert type(collated) is list


def test_arrays_of_different_shapes_or_dtypes_become_a_list_of_tensors():
    ragged = collate_values([np.zeros(2), np.zeros(3)])
    assert [tuple(tensor.shape) for tensor in ragged] == [(2,), (3,)]
    mixed = collate_values([np.zeros(2, np.float32), np.zeros(2, np.int16)])
    assert [tensor.dtype for tensor in mixed] == [torch.float32, torch.int16]
    assert type(collate_values([torch.zeros(1), torch.zeros(2)])) is list


def test_arrays_of_text_and_dates_stay_arrays():
    assert collate_values([np.array(["a"]), np.array(["b"])])[1].tolist() == ["b"]
    assert collate_values([np.array(["2020-01-01"], "datetime64[D]")] * 2)[0].dtype == "datetime64[D]"


def test_read_only_and_big_endian_arrays_are_as_good():
    frozen = np.frombuffer(b"\x00\x01\x00\x02", ">i2")
    assert collate_values([frozen, frozen]).tolist() == [[1, 2], [1, 2]]
    ragged = collate_values([frozen, frozen[:1]])
    assert [tensor.tolist() for tensor in ragged] == [[1, 2], [1]]


def test_images_come_out_as_channels_first_in_channels_last_memory():
    pixels = [np.random.default_rng(i).integers(0, 255, (4, 5, 3), np.uint8) for i in range(2)]
    batch = collate_values(pixels, is_image=True)
    assert batch.shape == (2, 3, 4, 5)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(batch[1].permute(1, 2, 0).numpy(), pixels[1])


def test_arrays_in_channels_last_memory_stay_in_it() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (2, 4, 5, 3), np.uint8)
    batch = collate_values(list(pixels.transpose(0, 3, 1, 2)))
    assert batch.shape == (2, 3, 4, 5)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(batch.numpy(), pixels.transpose(0, 3, 1, 2))


def test_images_of_different_shapes_are_a_list_of_channels_first_tensors():
    batch = collate_values([np.zeros((4, 5, 3), np.uint8), np.zeros((6, 7, 3), np.uint8)], is_image=True)
    assert [tuple(image.shape) for image in batch] == [(3, 4, 5), (3, 6, 7)]


def test_a_batch_of_images_is_a_tensor_on_the_same_memory():
    pixels = np.zeros((2, 4, 5, 3), np.uint8)
    batch = images_to_tensor(pixels)
    pixels[1, 2, 3, 0] = 9
    assert batch[1, 0, 2, 3] == 9


def test_samples_become_a_batch_of_their_fields():
    samples = [
        {"jpg": np.zeros((4, 4, 3), np.uint8), "cls": 1, "txt": "a"},
        {"jpg": np.ones((4, 4, 3), np.uint8), "cls": 2, "txt": "b", "extra": 1.0},
    ]
    batch = collate_samples(samples)
    assert list(batch) == ["jpg", "cls", "txt", "extra"]
    assert batch["jpg"].shape == (2, 4, 4, 3)
    assert batch["cls"].tolist() == [1, 2]
    assert batch["txt"] == ["a", "b"]
    assert batch["extra"] == [None, 1.0]
