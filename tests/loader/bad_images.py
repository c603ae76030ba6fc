"""A data set of images of which some are damaged."""

from __future__ import annotations

import io
import itertools
import tarfile
from pathlib import Path

from PIL import Image

SIZES = [20, 7, 31, 1, 25, 16]
TOTAL = sum(SIZES)
DAMAGED = {3, 4, 21, 40, 41, 58, 99}  # 58 is alone in its chunk


def write_images(folder: Path, damaged: set[int]) -> None:
    """Sample i is a grey JPEG of brightness 2 i, and its ordinal; the damaged ones are cut off in their header."""
    folder.mkdir(parents=True, exist_ok=True)
    ordinals = itertools.count()
    for number, size in enumerate(SIZES):
        with tarfile.open(folder / f"shard-{number:05d}.tar", "w") as tar:
            for ordinal in itertools.islice(ordinals, size):
                file = io.BytesIO()
                Image.new("RGB", (8, 8), (2 * ordinal,) * 3).save(file, "JPEG", quality=95)
                data = file.getvalue()[: 30 if ordinal in damaged else None]
                for extension, value in {"jpg": data, "cls": str(ordinal).encode()}.items():
                    member = tarfile.TarInfo(f"{ordinal:04d}.{extension}")
                    member.size = len(value)
                    tar.addfile(member, io.BytesIO(value))
