from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from device_pictures import HostCodec


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> HostCodec:
    """The codec of every device, made up on the CPU."""
    from device_pictures import HostCodec

    from penstock.loader.decoding.images import device_codec, device_images

    made = HostCodec()
    monkeypatch.setattr(device_codec, "open_codec", lambda device: made)
    monkeypatch.setattr(device_images, "_refusing", set())
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of 24 pictures, some of which no device decodes."""
    from device_pictures import picture, write

    return write(tmp_path_factory.mktemp("pictures"), [picture(number) for number in range(24)])
