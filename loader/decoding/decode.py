"""From a field's bytes to its value: the decoder of a field, by its extension or by the user's choice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args, runtime_checkable

import numpy as np

from ...storage.suggestions import did_you_mean, unknown_choice
from ..columns import AnyArray, BytesColumn, ObjectColumn
from ..errors import ConfigError, DecodeError
from .values import IMAGE_EXTENSIONS, LABEL_EXTENSIONS, READERS, field_error, read_text

if TYPE_CHECKING:
    from .images.device_codec import DeviceCodec
    from .images.images import ImageDecoder, ImagePlan
    from .values import BatchValues

Slot = tuple[tuple[int, ...], np.dtype[Any]]

_PACKAGE = __name__.rpartition(".")[0]
# Numbers that are handed out as int64.
WIDENED = frozenset({"uint16", "uint32"})


@runtime_checkable
class FieldDecoder(Protocol):
    """Turns the bytes of one field into its value. Called by many threads at once.

    ``takes_rng``: whether it draws from the sample's generator; otherwise ``rng`` may be None.
    ``slot``: shape and dtype if all values have the same. A batch assembler may then allocate (B, *shape) once and have
    threads call ``decode_into`` on its rows.
    ``is_image``: values are (height, width, channels). They are handed out, in samples and in batches, as (channels,
    height, width), unless the decoder has an attribute ``layout`` that is "hwc".
    """

    @property
    def takes_rng(self) -> bool: ...

    @property
    def slot(self) -> Slot | None: ...

    @property
    def is_image(self) -> bool: ...

    def __call__(self, data: memoryview, rng: np.random.Generator | None) -> Any: ...

    def decode_into(self, data: memoryview, out: AnyArray, rng: np.random.Generator | None) -> None: ...


def is_channels_first(decoder: FieldDecoder) -> bool:
    """Return whether a decoder's images are handed out as (channels, height, width)."""
    return decoder.is_image and getattr(decoder, "layout", "chw") == "chw"


RawValues = Literal["bytes", "view"]
DecodeChoice = Literal["auto"] | Mapping[str, "FieldDecoder | Callable[..., Any] | Sequence[str] | None"] | None
"""Choice of decoders: by extension and type ("auto"), none (None), or by field or extension: a decoder, a function of
bytes, ``str``, a list of categories, or None for bytes."""


def field_decoder(field: str, choice: DecodeChoice, *, of_columns: bool = False) -> FieldDecoder | None:
    """Choose the decoder of ``field`` under the loader's ``decode=`` argument; None leaves raw bytes.

    ``choice`` None leaves every field raw. "auto" goes by the last extension, in upper or lower case:

    - jpg, jpeg, png, webp: uint8 RGB, handed out as (3, h, w)
    - cls, cls2, index, inx, id: int; with ``of_columns``, of a data set whose columns have types, raw bytes
    - json, jsn: the parsed JSON
    - npy: the array; npz: a dict of arrays
    - txt, text, transcript: str
    - anything else, pickles included: raw bytes. Nothing is ever unpickled.

    A mapping names decoders by field or by trailing extensions ("seg.png", "png"; the longest match counts): an
    ``ImageDecoder`` (or any FieldDecoder), a callable that takes bytes, one that also takes the sample's generator in
    a parameter named ``rng``, ``str`` for UTF-8 text, a list of categories for the place of each value in it, or None
    for raw bytes. Of columns of text, lists, decimals and the like, callables take the values. Other fields are decoded
    as with "auto".

    Raises:
        ConfigError: the choice is none of these, or decoding images needs the extra that is not installed.
    """
    if choice is None:
        return None
    if choice == "auto":
        return _auto(field, of_columns)
    key = _matching_key(field, _require_mapping(choice))
    return _auto(field, of_columns) if key is None else _wrap(field, choice[key])


def _require_mapping(choice: Any) -> Mapping[str, Any]:
    if not isinstance(choice, Mapping):
        raise ConfigError(
            f"decode={choice!r}: must be 'auto', None, or a mapping like {{'jpg': fn}}{did_you_mean(choice, ['auto'])}"
        )
    return choice


def check_choice(choice: DecodeChoice, fields: Sequence[str], values: Sequence[str] = ()) -> None:
    """Refuse a mapping with decoders that would never be called.

    Of the data set's ``fields`` those in ``values`` come as values, not as bytes or text, and are never decoded. None
    as a decoder fits them too.

    Raises:
        ConfigError: names the keys that fit nothing, or only such values, and the fields.
    """
    if not isinstance(choice, Mapping):
        return
    key_of = {name: _matching_key(name, choice) for name in fields}
    unused = sorted(set(choice) - set(key_of.values()))
    if unused:
        raise ConfigError(
            f"decode= names {unused}, but the data set's fields are {sorted(fields)}{did_you_mean(unused, fields)}"
        )
    called = {key_of[name] for name in fields if name not in values}
    useless = sorted(key for key, decoder in choice.items() if decoder is not None and key not in called)
    if useless:
        fitting = sorted(name for name in fields if key_of[name] in useless)
        raise ConfigError(
            f"decode= names {useless}, but {fitting} come as values, not as bytes, and are never decoded; "
            "change them in transform= instead"
        )


def _matching_key(field: str, choice: Mapping[str, Any]) -> str | None:
    if field in choice:
        return field
    lowered = {key.lower(): key for key in choice}
    parts = field.lower().split(".")
    for start in range(len(parts)):
        suffix = ".".join(parts[start:])
        if suffix in lowered:
            return lowered[suffix]
    return None


def _auto(field: str, of_columns: bool) -> FieldDecoder | None:
    extension = field.lower().rsplit(".", 1)[-1]
    if of_columns and extension in LABEL_EXTENSIONS:
        return None
    if extension in IMAGE_EXTENSIONS:
        return _image_decoder(field)
    reader = READERS.get(extension)
    return None if reader is None else _Calling(field, reader)


def _image_decoder(field: str) -> FieldDecoder:
    from .images.images import ImageDecoder  # OpenCV and simplejpeg are needed only for images

    return _Named(field, ImageDecoder())


def _wrap(field: str, decoder: FieldDecoder | Callable[..., Any] | Sequence[str] | None) -> FieldDecoder | None:
    if decoder is None:
        return None
    if not isinstance(decoder, type) and isinstance(decoder, FieldDecoder):
        return _Named(field, decoder)
    if decoder is str:
        return _Calling(field, read_text)
    if isinstance(decoder, Sequence) and not isinstance(decoder, str | bytes):
        return _Codes(field, decoder)
    if not callable(decoder):
        raise ConfigError(
            f"decode[{field!r}]={decoder!r} cannot be called; use a function of bytes, a list of categories, or None"
        )
    return _Calling(field, _UserFunction(decoder))


class _Named:
    """A decoder whose errors name the field."""

    def __init__(self, field: str, decoder: FieldDecoder) -> None:
        self._field = field
        self._decoder = decoder
        self.takes_rng = decoder.takes_rng
        self.slot = decoder.slot
        self.is_image = decoder.is_image
        self.layout = getattr(decoder, "layout", "chw")
        self.codec: DeviceCodec | None = None
        # What plans images before they are decoded; not of a subclass, which may decode in a way of its own.
        plans = decoder.slot is not None and "decode_planned" in vars(type(decoder))
        self.plan = cast("ImageDecoder", decoder).plan if plans else None

    @property
    def is_own(self) -> bool:
        """Return whether it is one of this package's, which decodes value by value on the CPU."""
        return self.codec is None and type(self._decoder).__module__.startswith(_PACKAGE)

    @property
    def asks_for_device(self) -> bool:
        return decodes_on_device(self._decoder)

    def on_host(self) -> _Named:
        """Make the same decoder without a device."""
        return _Named(self._field, self._decoder)

    def batch_values(self, count: int) -> BatchValues | None:
        """Make room for ``count`` values that are decoded on a device; None where each is decoded by itself."""
        if self.codec is None:
            return None
        from .images.device_images import DeviceImages  # torch, which worker processes need not wait for

        return DeviceImages(cast("ImageDecoder", self._decoder), self.codec, count, partial(field_error, self._field))

    def __call__(self, data: memoryview, rng: np.random.Generator | None) -> Any:
        try:
            return self._decoder(data, rng)
        except Exception as exc:
            raise field_error(self._field, data, exc) from exc

    def decode_into(self, data: memoryview, out: AnyArray, rng: np.random.Generator | None) -> None:
        try:
            self._decoder.decode_into(data, out, rng)
        except Exception as exc:
            raise field_error(self._field, data, exc) from exc

    def decode_planned(self, data: memoryview, plan: ImagePlan, out: AnyArray) -> None:
        try:
            cast("ImageDecoder", self._decoder).decode_planned(data, plan, out)
        except Exception as exc:
            raise field_error(self._field, data, exc) from exc


class _UserFunction:
    """A user's function of bytes, or of a column's values (text, lists); perhaps with the sample's generator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.takes_rng = has_rng_parameter(function)
        self.takes_views = False

    def __call__(self, data: Any, rng: np.random.Generator | None) -> Any:
        value = bytes(data) if isinstance(data, memoryview) and not self.takes_views else data
        return self._function(value, rng=rng) if self.takes_rng else self._function(value)


class _Calling:
    """A decoder that calls a function, whose values have no shape known in advance."""

    slot: Slot | None = None
    is_image = False

    def __init__(self, field: str, function: Callable[[memoryview], Any] | _UserFunction) -> None:
        self._field = field
        self._function = function
        self.takes_rng = isinstance(function, _UserFunction) and function.takes_rng

    @property
    def is_own(self) -> bool:
        return not isinstance(self._function, _UserFunction)

    def give_views(self) -> None:
        """Call a user's function with memoryviews instead of bytes."""
        if isinstance(self._function, _UserFunction):
            self._function.takes_views = True

    def __call__(self, data: memoryview, rng: np.random.Generator | None) -> Any:
        try:
            if isinstance(self._function, _UserFunction):
                return self._function(data, rng)
            return self._function(data)
        except Exception as exc:
            raise field_error(self._field, data, exc, is_own=self.is_own) from exc

    def decode_into(self, data: memoryview, out: AnyArray, rng: np.random.Generator | None) -> None:
        raise ConfigError(f"field {self._field!r} cannot be decoded into a slot; call its decoder instead")


class _Codes(_Calling):
    """The place of each value in a list of categories; -1 where it is missing."""

    takes_missing = True

    def __init__(self, field: str, categories: Sequence[str]) -> None:
        self._codes = {name: code for code, name in enumerate(categories)}
        if len(self._codes) < len(categories) or not all(isinstance(name, str) for name in categories):
            raise ConfigError(f"decode[{field!r}]={list(categories)!r}: categories are texts that differ")
        super().__init__(field, self._find)

    def _find(self, data: memoryview | str | None) -> int:
        if data is None:
            return -1
        text = read_text(data)
        if text not in self._codes:
            raise DecodeError(f"{text!r} is none of its {len(self._codes)} categories in decode=")
        return self._codes[text]


def batch_values(decoder: FieldDecoder, count: int) -> BatchValues | None:
    """Make room for ``count`` values of a decoder that decodes them together; None where it decodes one by one."""
    return decoder.batch_values(count) if isinstance(decoder, _Named) else None


def decodes_on_device(decoder: object) -> bool:
    """Return whether a decoder is an ``ImageDecoder`` that asks to decode batches on the loader's device."""
    return hasattr(decoder, "decode_planned") and getattr(decoder, "device", None) is not None


def has_rng_parameter(function: Callable[..., Any]) -> bool:
    """Return whether a user's function has a parameter for the sample's generator."""
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return False


def check_decode(choice: DecodeChoice, raw: RawValues, processes: int = 0) -> None:
    """Refuse invalid choices, and views that would be sent to worker ``processes``.

    Raises:
        ConfigError: names the argument.
    """
    if raw not in get_args(RawValues):
        raise ConfigError(unknown_choice("raw", raw, get_args(RawValues)))
    if raw == "view" and processes:
        raise ConfigError(
            f"raw='view' with processes={processes}: views of this process's memory cannot be sent to others; use "
            "threads (processes=0), or raw='bytes'"
        )
    if choice is not None and choice != "auto":
        _require_mapping(choice)


def _is_no_image(name: str) -> bool:
    return False


class FieldDecoders:
    """The decoder of each field, chosen when the field is first seen and kept from then on.

    ``are_images`` says whether a field whose name is no hint holds images: the same on every rank, so not by
    the values that happen to come first. ``of_columns``: fields are columns, whose types say what their values are;
    their names only say whether they hold images, text, JSON or arrays.
    Decoders that ask for a device are given ``codec``; without one they decode on the CPU.
    With ``widens_on_device``, rows that are copied late stay as they are ``stored``, which is noted by field.
    With ``raw`` "view", undecoded values are handed out as views of chunks, and users' functions are given views.

    Raises:
        ConfigError: ``choice`` is none of what ``field_decoder`` takes, or ``raw`` is neither "bytes" nor "view".
    """

    def __init__(self, choice: DecodeChoice, raw: RawValues = "bytes", codec: DeviceCodec | None = None) -> None:
        check_decode(choice, raw)
        self.choice = choice
        self.raw = raw
        self.codec = codec
        self.settled: dict[str, FieldDecoder | None] = {}
        self.are_images: Callable[[str], bool] = _is_no_image
        self.of_columns = False
        self.widens_on_device = False
        self.stored: set[str] = set()

    def copy(self) -> FieldDecoders:
        """Copy the decoders settled here; the copy settles further ones by itself."""
        copied = FieldDecoders(self.choice, self.raw, codec=self.codec)
        copied.settled.update(self.settled)
        copied.are_images = self.are_images
        copied.of_columns = self.of_columns
        return copied

    def on_host(self) -> FieldDecoders:
        """Copy the decoders, to decode on the CPU."""
        copied = self.copy()
        copied.codec = None
        for name, decoder in self.settled.items():
            if isinstance(decoder, _Named):
                copied.settled[name] = decoder.on_host()
        return copied

    def of(self, name: str, column: BytesColumn | ObjectColumn) -> FieldDecoder | None:
        """Get the decoder of a column's values; for Python values, one that the user named, or none."""
        if name not in self.settled:
            decoder = self.settled[name] = self._settle(name, column)
            if self.raw == "view" and isinstance(decoder, _Calling):
                decoder.give_views()
            if isinstance(decoder, _Named) and decoder.asks_for_device:
                decoder.codec = self.codec
        return self.settled[name]

    def _settle(self, name: str, column: BytesColumn | ObjectColumn) -> FieldDecoder | None:
        named = isinstance(self.choice, Mapping) and _matching_key(name, self.choice) is not None
        if not named and (isinstance(column, ObjectColumn) or column.text):
            return None
        decoder = field_decoder(name, self.choice, of_columns=self.of_columns)
        if decoder is None and not named and self.choice is not None and self.are_images(name):
            return _image_decoder(name)
        return decoder

    def dtype_of(self, values: AnyArray) -> np.dtype[Any]:
        """Get the dtype in which numbers are handed out: unsigned ones are widened, as torch supports them poorly.

        uint64 stays, as there is no wider type.
        """
        wide = self.choice is not None and values.dtype.name in WIDENED
        return np.dtype(np.int64) if wide else values.dtype
