"""Which image format some bytes are in is told by how they begin."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.loader.decoding.images.kind import image_kind

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("extension", "kind"), [(".jpg", "jpeg"), (".png", "png"), (".webp", "webp")])
def test_what_opencv_writes_is_recognised(extension: str, kind: str) -> None:
    cv2 = pytest.importorskip("cv2")
    data = cv2.imencode(extension, np.zeros((4, 5, 3), np.uint8))[1].tobytes()
    assert image_kind(data) == kind
    assert image_kind(memoryview(data)) == kind
    assert image_kind(data[:12]) == kind


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\x00", PNG[:7], b"RIFF", b"RIFF\0\0\0\0WAVE", b"RIFF\0\0\0\0WEB", b"a" * 12],
)
def test_other_bytes_and_bytes_cut_short_are_no_image(data: bytes) -> None:
    assert image_kind(data) is None


def test_a_signature_is_looked_for_at_the_start_alone() -> None:
    assert image_kind(b" " + PNG) is None
    assert image_kind(PNG + b"anything") == "png"
