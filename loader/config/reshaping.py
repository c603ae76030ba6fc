"""The arguments for dropping and packing, of a loader or a source of a mixture, and the work that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...storage.suggestions import did_you_mean
from ..errors import ConfigError
from ..formats.schema import NULL_SUFFIX, names_read, null_marks
from ..order.state import FILTER, PACKING
from ..packing.config import Packing
from ..pipeline.tuning import mean_row_bytes
from .checks import check_names

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..packing.packer import Packer
    from .costs import CostArguments
    from .keep import KeepChoice, Sieve


@dataclass(frozen=True, slots=True)
class Reshaping:
    """The operations that change the number of samples: keep, drop, pack and skip.

    ``sieve`` asks ``keep=``, with ``may_drop`` the transform may return None, ``packer`` makes sequences of documents,
    and with ``skips`` bad samples are dropped; ``only_skips``: no others.
    """

    sieve: Sieve | None
    may_drop: bool
    packer: Packer | None
    has_transform: bool
    skips: bool = False
    only_skips: bool = False

    @staticmethod
    def of(
        keep: KeepChoice | None,
        may_drop: object,
        transform: object,
        packing: Packing | None,
        costs: CostArguments,
        on_error: object,
        *,
        open_packer: Callable[[Packing], Packer],
    ) -> Reshaping | None:
        """Read the arguments; None where every sample is delivered. Raises ConfigError where they conflict."""
        if not isinstance(may_drop, bool):
            raise ConfigError(f"may_drop={may_drop!r}: must be True or False")
        if may_drop and transform is None:
            raise ConfigError("may_drop=True without a transform: it says that transform= may return None")
        if packing is not None and not isinstance(packing, Packing):
            raise ConfigError(f"packing={packing!r}: give a Packing, such as Packing(seq_len=2048)")
        skips = on_error == "skip"
        if keep is None and not may_drop and packing is None and not skips:
            return None
        given = {"cost": costs.cost, "bucket": costs.bucket, "batch_tokens": costs.budget}
        named = [f"{name}=" for name, value in given.items() if value is not None]
        if named:
            streams = {"keep=": keep is not None, "may_drop=True": may_drop, "packing=": packing is not None}
            streams["on_error='skip'"] = skips
            raise ConfigError(
                f"{' and '.join(named)} with {next(name for name, is_given in streams.items() if is_given)}: costs are "
                "known of samples as they are stored, not of those that are left or of sequences; leave out one of the "
                "two, or select by subset="
            )
        from .keep import Sieve

        return Reshaping(
            None if keep is None else Sieve(keep),
            may_drop or skips,
            None if packing is None else open_packer(packing),
            transform is not None,
            skips,
            only_skips=keep is None and not may_drop and packing is None,
        )

    def columns_of_batches(self, manifest: Manifest, columns: Sequence[str] | None) -> list[str] | None:
        """Choose the ``columns`` that are decoded: of documents that are packed as they are read, the packed ones.

        Raises:
            ConfigError: there is no such field, or it is not among ``columns``.
        """
        if self.packer is None or self.has_transform:
            return None if columns is None else list(columns)
        needed = list(self.packer.needed)
        known = list(manifest.fields if columns is None else columns)
        missing = [name for name in needed if name not in known]
        if missing:
            where = "the data set's fields" if columns is None else "columns="
            raise ConfigError(
                f"packing=Packing(field=...): {missing} is not among {where} {sorted(known)}; name the field that "
                f"holds token ids, or text with tokenizer=, or make it in transform={did_you_mean(missing, known)}"
            )
        return needed

    def packing_for(self, manifest: Manifest) -> tuple[Packer, int] | None:
        """Get the packer, and the number of samples that it packs together."""
        return None if self.packer is None else (self.packer, self.packer.choose_unit(mean_row_bytes(manifest)))

    def kind_for(self, manifest: Manifest) -> dict[str, Any]:
        """Describe it for a state, as far as states can: they cannot compare functions."""
        packing = self.packing_for(manifest)
        if packing is None:
            return {"kind": FILTER}
        return {"kind": PACKING, "packing": packing[0].fingerprint, "unit": packing[1]}

    def columns_to_read(self, manifest: Manifest, columns: Sequence[str] | None) -> list[str] | None:
        """Choose the decoded ``columns``, and those that ``keep=`` needs. Raises ConfigError where one is unknown."""
        if self.sieve is not None and self.sieve.columns is None and self.packer is not None:
            return None  # keep= gets the whole sample
        asked = [] if self.sieve is None or self.sieve.columns is None else list(self.sieve.columns)
        try:
            if asked:
                check_names(manifest, asked, None)
        except ConfigError as exc:
            marks = [name for name in null_marks(manifest.fields, manifest.fields) if name in asked]
            of = [mark.removesuffix(NULL_SUFFIX) for mark in marks]
            hint = f"; {marks[0]!r} comes with {of[0]!r}, if that has nulls" if marks else ""
            raise ConfigError(f"keep=Keep(...): {exc}{hint}") from exc
        return None if columns is None else [*columns, *(name for name in asked if name not in columns)]


def fields_of_rows(manifest: Manifest, columns: Sequence[str] | None) -> Collection[str] | None:
    """List the fields of rows whose decoded columns are ``columns``, without drops; None for all fields."""
    return None if columns is None else names_read(columns, manifest.fields)
