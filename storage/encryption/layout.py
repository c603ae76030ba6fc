"""Layout of an encrypted object: a header, then frames of AES-256-GCM, each of which opens alone. Pure functions.

Every object has a random id of 32 bytes, and its own key: HKDF-SHA256 (RFC 5869) of the user's key, salted by that id.
A frame's nonce is its number and whether it is the last one, so no nonce repeats under a key, and frames that are cut
off, reordered or of another object are refused; each also authenticates the header. This is the construction of STREAM
(Hoang, Reyhanitabar, Rogaway and Vizar, "Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance", CRYPTO
2015) with a key for each object, as Tink's AES-GCM-HKDF streaming has it.

The header, 96 bytes: magic; version; how many parts of the object's path it is bound to; the length of the content; the
object's id; an id of the key; a tag of the path, under the key; a tag of all of this, under the key. Sizes follow from
one another, so that a listing tells how long the contents are.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass
from typing import Any

from ..errors import DecryptionError, UnsupportedURLError
from ..store import ByteRange

ENCRYPTED_SUFFIX = ".penc"
"""End of the keys of encrypted objects in the store below; users of the store see keys without it."""

FRAME_BYTES = 64 << 10
KEY_BYTES = 32
TAG_BYTES = 16
_SEALED_BYTES = FRAME_BYTES + TAG_BYTES

_MAGIC = b"penstckE"
_VERSION = 1
_FIELDS = struct.Struct("<8sBxHIQ32s8s16s")
_NONCE = struct.Struct(">IQ")
HEADER_BYTES = _FIELDS.size + TAG_BYTES
_MOST_PARTS = 0xFFFF


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Keys derived once from a user's key."""

    user_key: bytes
    header_key: bytes
    path_key: bytes
    key_id: bytes

    @classmethod
    def derive(cls, user_key: bytes) -> Keys:
        if len(user_key) != KEY_BYTES:
            raise ValueError(f"a key of {len(user_key)} bytes: needs {KEY_BYTES}")
        header_key, path_key, key_id = (
            _derive(user_key, None, f"penstock {use} v1".encode(), size)
            for use, size in (("header", 32), ("path", 32), ("key id", 8))
        )
        return cls(user_key, header_key, path_key, key_id)

    def __repr__(self) -> str:
        return f"Keys(id={self.key_id.hex()})"


@dataclass(frozen=True, slots=True)
class Opened:
    """An object whose header was found to be right: its length in bytes, and what opens its frames."""

    length: int
    header: bytes
    cipher: Any

    def decrypt(self, sealed: memoryview, first: int, where: str) -> bytearray:
        """The content of whole frames, from number ``first`` on.

        Raises:
            DecryptionError: a frame was changed, or is another one.
        """
        from cryptography.exceptions import InvalidTag

        plain = bytearray(max(0, len(sealed) - TAG_BYTES * -(-len(sealed) // _SEALED_BYTES)))
        view, last = memoryview(plain), (self.length - 1) // FRAME_BYTES
        for i, start in enumerate(range(0, len(sealed), _SEALED_BYTES)):
            frame, number = sealed[start : start + _SEALED_BYTES], first + i
            into = view[i * FRAME_BYTES : i * FRAME_BYTES + len(frame) - TAG_BYTES]
            try:
                self.cipher.decrypt_into(_nonce(number, is_last=number == last), frame, self.header, into)
            except (InvalidTag, ValueError):
                raise DecryptionError(
                    f"{where}: bytes {number * FRAME_BYTES:,} to {number * FRAME_BYTES + len(into):,} are not what was "
                    "encrypted: they were changed, cut off or exchanged; write or copy the object again"
                ) from None
        view.release()
        return plain


def encrypt(keys: Keys, path: str, data: memoryview) -> bytearray:
    """A whole object of ``data``, bound to ``path`` ('a/b.tar')."""
    object_id = os.urandom(32)
    parts = path.count("/") + 1
    if parts > _MOST_PARTS:
        raise ValueError(f"{path[:100]!r}... has {parts} parts")
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, parts, 0, len(data), object_id, keys.key_id, _tag_path(keys, object_id, path)
    )
    header = fields + _tag(keys.header_key, fields)
    cipher = _cipher(keys, object_id)
    sealed = bytearray(sealed_size(len(data)))
    view = memoryview(sealed)
    view[:HEADER_BYTES] = header
    last, at = (len(data) - 1) // FRAME_BYTES, HEADER_BYTES
    for number, start in enumerate(range(0, len(data), FRAME_BYTES)):
        frame = data[start : start + FRAME_BYTES]
        stop = at + len(frame) + TAG_BYTES
        cipher.encrypt_into(_nonce(number, is_last=number == last), frame, header, view[at:stop])
        at = stop
    view.release()
    return sealed


def open_header(keys: Keys, header: bytes, path: str, where: str) -> Opened:
    """Check a header; ``path`` is the object's whole path, of which the last parts are compared.

    Raises:
        DecryptionError: it is no header, belongs to another key or path, or was changed.
    """
    if len(header) < HEADER_BYTES or header[: len(_MAGIC)] != _MAGIC:
        raise DecryptionError(f"{where}: is no encrypted object, or is cut off; pack it with encryption (--encrypt)")
    fields, tag = header[: _FIELDS.size], header[_FIELDS.size : HEADER_BYTES]
    _, version, parts, _, length, object_id, key_id, path_tag = _FIELDS.unpack(fields)
    if version != _VERSION:
        raise DecryptionError(f"{where}: was encrypted by another version of penstock ({version}); install a later one")
    if key_id != keys.key_id:
        raise DecryptionError(
            f"{where}: is encrypted with another key (its key has the id {key_id.hex()}, the one given "
            f"{keys.key_id.hex()}); give the key that it was written with as encryption_key"
        )
    if not hmac.compare_digest(tag, _tag(keys.header_key, fields)):
        raise DecryptionError(f"{where}: its first {HEADER_BYTES} bytes were changed; write or copy the object again")
    named = "/".join(path.split("/")[-parts:])
    if not hmac.compare_digest(path_tag, _tag_path(keys, object_id, named)):
        raise DecryptionError(
            f"{where}: holds what was written under another name: it was renamed, or exchanged with another object; "
            "restore its name, or write it again"
        )
    return Opened(length, header[:HEADER_BYTES], _cipher(keys, object_id))


def sealed_size(length: int) -> int:
    """The bytes that an object of ``length`` bytes takes once encrypted."""
    return HEADER_BYTES + length + TAG_BYTES * -(-length // FRAME_BYTES)


def plain_size(size: int) -> int:
    """The length of the content of an encrypted object of ``size`` bytes; 0 for one that is cut off."""
    whole, rest = divmod(max(0, size - HEADER_BYTES), _SEALED_BYTES)
    return whole * FRAME_BYTES + max(0, rest - TAG_BYTES)


def sealed_range(byte_range: ByteRange, length: int) -> tuple[ByteRange, int]:
    """Range of the frames that hold a range of the content, which is not empty, and the number of the first frame."""
    first, last = byte_range.start // FRAME_BYTES, (byte_range.stop - 1) // FRAME_BYTES
    stop = min(HEADER_BYTES + (last + 1) * _SEALED_BYTES, sealed_size(length))
    return ByteRange(HEADER_BYTES + first * _SEALED_BYTES, stop), first


def _cipher(keys: Keys, object_id: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_derive(keys.user_key, object_id, b"penstock frames v1", 32))


def _derive(key: bytes, salt: bytes | None, info: bytes, size: int) -> bytes:
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as exc:
        raise UnsupportedURLError(
            "reading and writing encrypted data needs the package cryptography: install penstock[encryption]"
        ) from exc
    return HKDF(SHA256(), size, salt, info).derive(key)


def _nonce(number: int, *, is_last: bool) -> bytes:
    return _NONCE.pack(is_last, number)


def _tag(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")[:TAG_BYTES]


def _tag_path(keys: Keys, object_id: bytes, path: str) -> bytes:
    return _tag(keys.path_key, object_id + path.encode("utf-8", "surrogateescape"))
