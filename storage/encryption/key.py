"""Load the key of encrypted data from the environment, a file or the caller, never from an option's text."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import AccessDeniedError, UnsupportedURLError
from ..files import in_home
from .layout import KEY_BYTES

ENVIRONMENT_NAME = "PENSTOCK_ENCRYPTION_KEY"
_MOST_FILE_BYTES = 4096

KeySource = str | bytes | Callable[[], str | bytes]


def load_key(source: KeySource) -> bytes:
    """The 32 bytes of a key.

    ``source`` is "env" (the variable PENSTOCK_ENCRYPTION_KEY), "env:NAME", "file:PATH", 32 bytes, or a function that
    returns 32 bytes or their text. Text is base64 or hexadecimal; a file holds text or 32 bytes.

    Raises:
        UnsupportedURLError: it is none of these, or not a key; the message does not show it.
        AccessDeniedError: there is no such variable or file.
    """
    if callable(source):
        return _parse(source(), "what the function of encryption_key returned")
    if isinstance(source, bytes):
        return _parse(source, "encryption_key")
    kind, _, name = source.partition(":") if isinstance(source, str) else ("", "", "")
    if kind == "env":
        name = name or ENVIRONMENT_NAME
        text = os.environ.get(name)
        if not text:
            raise AccessDeniedError(
                f"the environment has no {name}, which holds the key of encrypted data; "
                f"set it, for new data e.g. with: export {name}=$(openssl rand -base64 32)"
            )
        return _parse(text, f"the environment's {name}")
    if kind == "file" and name:
        return _parse(_read(Path(in_home(name))), f"the file {name}")
    raise UnsupportedURLError(
        f"encryption_key is none: write 'env' (for {ENVIRONMENT_NAME}), 'env:NAME' or 'file:PATH', or give {KEY_BYTES} "
        "bytes or a function that returns them; the key itself is no text of an option, which would be shown and kept"
    )


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_FILE_BYTES)
    except OSError as exc:
        raise AccessDeniedError(f"the key of encrypted data can't be read: {exc.strerror} ({path})") from exc


def _parse(data: str | bytes, where: str) -> bytes:
    if isinstance(data, bytes) and len(data) == KEY_BYTES:
        return data
    if isinstance(data, (str, bytes)):
        for decode in (binascii.unhexlify, _from_base64):
            try:
                key = decode(data.strip())
            except ValueError:
                continue
            if len(key) == KEY_BYTES:
                return key
    raise UnsupportedURLError(
        f"{where} is no key: needs {KEY_BYTES} bytes, or their base64 or hexadecimal text, as "
        "`openssl rand -base64 32` prints it"
    ) from None


def _from_base64(text: str | bytes) -> bytes:
    return base64.b64decode(text, altchars=b"-_" if set("-_") & set(str(text)) else None, validate=True)
