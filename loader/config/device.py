"""Whether a loader's arguments let images be decoded on its device, and with what."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..decoding.decode import DecodeChoice, decodes_on_device
from ..decoding.images import device_codec
from ..errors import ConfigError


def open_image_codec(
    decode: DecodeChoice, device: torch.device | None, needs_host: Mapping[str, object]
) -> device_codec.DeviceCodec | None:
    """The codec for the decoders of ``decode`` that ask for a device; None where none does.

    ``needs_host``: arguments, by name, that work on samples in host memory, each None where it is not given.

    Raises:
        ConfigError: names the field, and the argument that it does not go with; or what is missing here.
    """
    named = decode.items() if isinstance(decode, Mapping) else ()
    fields = sorted(name for name, decoder in named if decodes_on_device(decoder))
    if not fields:
        return None
    for name, value in needs_host.items():
        if value is not None:
            raise ConfigError(
                f"decode[{fields[0]!r}]=ImageDecoder(device='cuda') with {name}: its images are on the device, whole "
                f"batches at once, and never samples in host memory; leave out {name}, or the decoder's device="
            )
    return device_codec.open_codec(device)
