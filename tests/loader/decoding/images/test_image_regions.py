"""The regions that the image decoder draws and cuts, and what depends on its generator."""

import math

import numpy as np
import pytest
from PIL import Image
from pil_images import by_pil, encode, photo, psnr

from penstock.loader.decoding.images import images
from penstock.loader.decoding.images.images import ImageDecoder
from penstock.loader.decoding.images.regions import Region, center_region, random_region, scale_region
from penstock.loader.errors import ConfigError
from penstock.loader.order.permutation import sample_rng


@pytest.mark.slow
def test_random_crops_are_pils_resize_of_the_region_drawn():
    height, width = 500, 700
    data = encode(photo(width, height))
    whole = by_pil(data)
    decoder = ImageDecoder(size=96, crop="random")
    reductions = set()
    for sample_id in range(60):
        region = random_region(height, width, decoder.scale, decoder.ratio, sample_rng(0, 0, sample_id))
        reduction = images._choose_reduction(region, (96, 96, 3))
        reductions.add(reduction)
        factor_y, factor_x = -(-height // reduction) / height, -(-width // reduction) / width
        placed = scale_region(region, factor_y, factor_x)
        assert abs(placed.top / factor_y - region.top) <= reduction / 2
        assert abs(placed.left / factor_x - region.left) <= reduction / 2
        box = (
            placed.left / factor_x,
            placed.top / factor_y,
            (placed.left + placed.width) / factor_x,
            (placed.top + placed.height) / factor_y,
        )
        expected = whole.resize((96, 96), Image.Resampling.BILINEAR, box=box)
        assert psnr(decoder.decode(data, sample_rng(0, 0, sample_id)), np.asarray(expected)) > 36
    assert reductions == {1, 2, 4}


def test_the_centre_region_is_what_resize_256_and_crop_224_leave():
    assert center_region(375, 500, 224, 224, None) == Region(23, 86, 328, 328)
    assert center_region(375, 500, 224, 224, 256) == Region(23, 86, 328, 328)
    assert center_region(375, 500, 224, 224, 224) == Region(0, 62, 375, 375)
    assert center_region(100, 100, 32, 64, 64) == Region(25, 0, 50, 100)
    assert center_region(1, 1, 224, 224, None) == Region(0, 0, 1, 1)


def test_a_narrow_image_is_enlarged_until_the_crop_fits():
    region = center_region(1000, 10, 64, 128, 64)
    assert (region.width, region.height) == (10, 5)


def test_random_regions_have_the_areas_and_aspects_asked_for_and_lie_inside():
    rng = np.random.default_rng(0)
    regions = [random_region(300, 400, (0.08, 1), (3 / 4, 4 / 3), rng) for _ in range(3000)]
    heights = np.array([region.height for region in regions])
    widths = np.array([region.width for region in regions])
    tops = np.array([region.top for region in regions])
    lefts = np.array([region.left for region in regions])
    assert (tops >= 0).all()
    assert (lefts >= 0).all()
    assert (tops + heights <= 300).all()
    assert (lefts + widths <= 400).all()
    area = heights * widths / 120_000
    aspect = widths / heights
    assert 0.079 < area.min() < 0.09
    assert area.max() > 0.95
    assert aspect.min() > 0.74
    assert aspect.max() < 1.35
    naive = np.array([_naive_random_region(300, 400, rng) for _ in range(3000)])
    assert abs(area.mean() - (naive[:, 2] * naive[:, 3]).mean() / 120_000) < 0.025
    assert abs(np.log(aspect).mean() - np.log(naive[:, 3] / naive[:, 2]).mean()) < 0.02
    assert abs(tops.mean() - naive[:, 0].mean()) < 4
    assert abs(lefts.mean() - naive[:, 1].mean()) < 6


def _naive_random_region(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """RandomResizedCrop as its documentation tells it."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1)), h, w
    raise AssertionError("a draw of ten fits an image of aspect 4:3")


def test_where_no_draw_fits_the_largest_centred_part_is_taken():
    rng = np.random.default_rng(0)
    assert random_region(1000, 10, (0.9, 1.0), (1.0, 1.0), rng) == Region(495, 0, 10, 10)
    assert random_region(10, 1000, (0.9, 1.0), (0.5, 2.0), rng) == Region(0, 490, 10, 20)
    assert random_region(1, 1, (0.01, 0.02), (1.0, 1.0), rng) == Region(0, 0, 1, 1)


def test_golden_random_regions():
    drawn = [random_region(375, 500, (0.08, 1), (3 / 4, 4 / 3), sample_rng(0, 0, sample_id)) for sample_id in range(3)]
    assert drawn == [
        Region(38, 19, 140, 121),
        Region(7, 33, 367, 424),
        Region(97, 218, 250, 267),
    ]


def test_the_same_generator_gives_the_same_pixels():
    decoder = ImageDecoder(size=64, crop="random", flip=0.5)
    data = encode(photo(200, 150))
    one, again = decoder(data, sample_rng(1, 2, 3)), decoder(data, sample_rng(1, 2, 3))
    np.testing.assert_array_equal(one, again)
    assert (decoder(data, sample_rng(1, 2, 4)) != one).any()


@pytest.mark.parametrize("size", [None, 40])
def test_a_flip_mirrors_left_and_right(size):
    data = encode(photo(80, 60))
    straight, flipped = ImageDecoder(size=size)(data), ImageDecoder(size=size, flip=1.0)(data)
    np.testing.assert_array_equal(flipped, straight[:, ::-1])
    assert flipped.flags.c_contiguous


def test_half_of_the_samples_are_flipped():
    data = encode(photo(16, 12))
    straight = ImageDecoder(size=8)(data)
    decoder = ImageDecoder(size=8, flip=0.5)
    flipped = sum(int((decoder(data, sample_rng(0, 0, i)) != straight).any()) for i in range(400))
    assert 160 < flipped < 240


def test_only_decoders_that_draw_need_a_generator():
    data = encode(photo(40, 30))
    assert not ImageDecoder(size=8, crop="center", flip=1.0).takes_rng
    for decoder in (ImageDecoder(size=8, crop="random"), ImageDecoder(size=8, flip=0.5), ImageDecoder(flip=0.5)):
        assert decoder.takes_rng
        with pytest.raises(ConfigError, match="rng"):
            decoder(data)
