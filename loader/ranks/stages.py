"""Fields that the stages of a pipeline read, where a model is cut into such stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...storage.suggestions import did_you_mean
from ..errors import ConfigError
from .detect import PIPELINE_DIMS, find_place_in_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Stage = Literal["first", "last"] | int
FieldsByStage = Mapping[str, Stage | Sequence[Stage]]

_NAMED: dict[object, int] = {"first": 0, "last": -1}


@dataclass(frozen=True, kw_only=True)
class StageFields:
    """The fields that not all stages read: ``stages`` maps each to those that do. This process is in ``stage``.

    A stage is a place along the mesh's pipeline dimension, from 0.
    """

    stages: Mapping[str, frozenset[int]]
    stage: int
    count: int

    @staticmethod
    def read(
        fields_by_stage: FieldsByStage | None,
        mesh: DeviceMesh | None,
        data_dims: Sequence[str] | None,
        *,
        max_bad_chunks: int = 0,
        may_drop: bool = False,
        keeps_by_all: bool = False,
    ) -> StageFields | None:
        """Read the argument; None if it is not given.

        Raises:
            ConfigError: it is no mapping to stages, the mesh has no pipeline dimension or no such stage; or stages
                could come to deliver different samples, since what they read decides on replacements or drops.
        """
        if fields_by_stage is None:
            return None
        if not isinstance(fields_by_stage, Mapping) or not fields_by_stage:
            raise ConfigError(
                f"fields_by_stage={fields_by_stage!r}: must be a mapping, such as "
                "{'tokens': 'first', 'labels': 'last'}"
            )
        if max_bad_chunks:
            raise ConfigError(
                f"fields_by_stage= with max_bad_chunks={max_bad_chunks}: a stage that does not read a damaged field "
                "would not replace its chunk, and stages would train on different samples; leave out one of the two"
            )
        if may_drop or keeps_by_all:
            who = "may_drop=True: a transform" if may_drop else "keep= of all fields: a function"
            raise ConfigError(
                f"fields_by_stage= with {who} that sees different fields on different stages could drop different "
                "samples; leave out one of the two, or drop by keep=Keep([columns], predicate)"
            )
        stage, count = find_place_in_mesh(mesh, data_dims, argument="fields_by_stage=", usual=PIPELINE_DIMS)
        stages = {name: _read_stages(name, given, count) for name, given in fields_by_stage.items()}
        return StageFields(stages=stages, stage=stage, count=count)

    def choose(self, fields: Sequence[str], columns: Sequence[str] | None) -> list[str]:
        """Those of ``columns``, or of all ``fields`` of the data set, that this stage reads; perhaps none.

        Raises:
            ConfigError: a field named by stage is not among them.
        """
        known = [name for name in fields if columns is None or name in columns]
        unknown = [name for name in self.stages if name not in known]
        if unknown:
            where = "the data set's fields" if columns is None else "columns="
            raise ConfigError(
                f"fields_by_stage= names {unknown}, which {where} {sorted(known)} do not hold"
                f"{did_you_mean(unknown, known)}"
            )
        chosen = fields if columns is None else columns
        return [name for name in chosen if self.stage in self.stages.get(name, {self.stage})]


def _read_stages(field: str, given: object, count: int) -> frozenset[int]:
    """The stages of a field, each from 0 to ``count - 1``."""
    several = given if isinstance(given, list | tuple | set | frozenset) else [given]
    found = set()
    for one in several:
        number = _NAMED.get(one, one) if isinstance(one, str) else one
        if not isinstance(number, int) or isinstance(number, bool):
            raise ConfigError(
                f"fields_by_stage[{field!r}]={given!r}: stages are 'first', 'last' or whole numbers"
                f"{did_you_mean(number, _NAMED)}"
            )
        if not -count <= number < count:
            raise ConfigError(
                f"fields_by_stage[{field!r}]={given!r}: the mesh has {count} stages, 0 to {count - 1}; -1 is the last"
            )
        found.add(number % count)
    if not found:
        raise ConfigError(f"fields_by_stage[{field!r}]={given!r}: no stage reads it; leave it out with columns=")
    return frozenset(found)
