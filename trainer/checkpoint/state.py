"""State of a checkpoint: model, optimizer, averaged weights and each rank's own tensors; saving and restoring it.

Keys are those of the bare model, whatever wraps it (DDP, ``fully_shard``, ``torch.compile``), so a checkpoint taken at
one zero stage and world size loads at any other. Reading is not a collective: every rank reads what it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from ...storage.store import ByteRange
from ...storage.suggestions import list_some
from ..errors import CheckpointError, CheckpointMismatchError
from ..parallel.pipeline.names import StageNames
from .groups import collect_groups, describe_differing, describe_saved_groups, find_group
from .optimizer_state import (
    OPTIMIZER,
    describe_frozen,
    describe_optimizer,
    drop_unsaved,
    find_frozen,
    load_optimizer,
)
from .readable import (
    expect_extra_state,
    pack_extra_state,
    refuse_unreadable_keys,
    refuse_unreadable_values,
    unpack_extra_state,
)
from .settings import Settings, copy_settings, pack_settings, settle_settings, unpack_settings
from .traffic import open_reader

MODEL, RANKS, EMA, SETTINGS, UNSTEPPED = "model", "ranks", "ema", "settings", "unstepped"
_NAMED_CONVERTED = 3
_NAMED_DIFFERENCES = 5


def gather_state(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    rank: int,
    rank_state: Mapping[str, Tensor] | None,
    averages: Mapping[str, Tensor] | None = None,
    given: Settings | None = None,
    stages: StageNames | None = None,
    more: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Return the state of model and optimizer as torch.distributed.checkpoint saves it; tensors are not copied.

    ``given`` are the settings that the optimizer was given at first, ``stages`` the names of a pipeline's rank, and
    ``more`` further parts, each of tensors by name.
    An optimizer that has not stepped yet is described by zeros, marked as such, and left unchanged.

    Raises:
        CheckpointError: something in it could not be read back.
    """
    refuse_unreadable_keys(optimizer)
    described = describe_optimizer(model, optimizer)
    refuse_unreadable_values(optimizer, described["state"])
    return {
        MODEL: pack_extra_state(get_model_state_dict(model)),
        OPTIMIZER: described if stages is None else stages.describe_whole(described),
        RANKS: {str(rank): dict(rank_state or {})},
        **({UNSTEPPED: True} if described["state"] and not optimizer.state else {}),
        **({EMA: dict(averages)} if averages else {}),
        **({SETTINGS: pack_settings(given)} if given is not None else {}),
        **{part: dict(tensors) for part, tensors in (more or {}).items() if tensors},
    }


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Notes for people on a restored state, and the saved groups that each group was made of."""

    notes: list[str]
    groups: tuple[tuple[int, ...], ...]


def restore_state(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    given: Settings | None = None,
    stages: StageNames | None = None,
) -> Restored:
    """Read a checkpoint into model and optimizer, whatever its sharding.

    Of the optimizer's settings (its ``defaults``: weight decay, betas, ...) those ``given`` otherwise than in the run
    that saved stay, so that a run can be resumed with others; the rate stays, which the schedule sets. Groups are found
    by their parameters. The notes have one sentence for each setting that the checkpoint had otherwise, except for the
    rate, for formats in which it had the model, and for what was trained then and is frozen now, or the other way.

    Raises:
        CheckpointMismatchError: the checkpoint is of another model or optimizer; nothing was changed.
    """
    metadata = open_reader(folder).read_metadata()
    found = _describe_wanted(folder, model, optimizer, metadata, stages)
    model_state, described = found.wanted[MODEL], found.optimizer_state
    notes = describe_conversions(model_state, f"{MODEL}.", metadata)
    before = copy_settings(optimizer)
    read_state(folder, found.wanted, metadata)
    packed = found.wanted.get(SETTINGS)
    given_then = None if packed is None else unpack_settings(packed)
    saved_groups = collect_groups(found.wanted[OPTIMIZER]["param_groups"], metadata)
    groups = [find_group(group, saved_groups, given_then) for group in described["param_groups"]]
    names = [list(group["params"]) for group in described["param_groups"]]
    described["param_groups"] = [{**group.settings, "params": own} for group, own in zip(groups, names, strict=True)]
    unpack_extra_state(model_state)
    load_model_state(model, model_state)
    never_stepped = found.never_stepped
    if stages is not None:
        described = stages.restore(described)
        names = [group["params"] for group in described["param_groups"]]
        never_stepped = stages.restore({"state": never_stepped, "param_groups": []})["state"]
    load_optimizer(model, optimizer, described, names, never_stepped)
    if UNSTEPPED in metadata.state_dict_metadata:
        optimizer.state.clear()
    known = {name for group in saved_groups for name in group["params"]}
    notes += describe_frozen(found.frozen, [name for name in found.never_stepped if name not in known])
    notes += settle_settings(optimizer, before, given, None if given_then is None else [one.given for one in groups])
    notes += describe_differing(groups, optimizer)
    return Restored(notes=notes, groups=tuple(group.numbers for group in groups))


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Load what ``get_model_state_dict`` returned, with other values."""
    # Not strict: a batch norm of another stage, which has no buffers here, adds one to a state without its version.
    found = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    assert not found.missing_keys, f"{found.missing_keys} are the model's and not in its own state"


def find_needs(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    rank: int | None = None,
    averages: Mapping[str, Tensor] | None = None,
    stages: StageNames | None = None,
    parts: Collection[str] = (),
) -> dict[str, list[ByteRange]]:
    """Return which bytes of which files are read: by ``restore_state``, of averages and, with ``rank``, of its tensors.

    Further ``parts`` are read whole. Only the metadata of the checkpoint is read.

    Raises:
        CheckpointMismatchError: the checkpoint is of another model or optimizer.
    """
    metadata = open_reader(folder).read_metadata()
    wanted = _describe_wanted(folder, model, optimizer, metadata, stages).wanted
    found = {name: one for name, one in (averages or {}).items() if f"{EMA}.{name}" in metadata.state_dict_metadata}
    plan = _plan_reading(open_reader(folder), wanted | ({EMA: found} if found else {}), metadata)[0]
    needs = _ranges_of(metadata, [item.storage_index for item in plan.items])
    prefixes = [f"{part}." for part in (*parts, *(() if rank is None else (f"{RANKS}.{rank}",)))]
    own = find_needs_of(folder, *prefixes) if prefixes else {}
    return {name: [*needs.get(name, ()), *own.get(name, ())] for name in {**needs, **own}}


def find_needs_of(folder: Path, *prefixes: str) -> dict[str, list[ByteRange]]:
    """Return in which bytes of which files everything is whose key starts with one of ``prefixes``."""
    metadata = open_reader(folder).read_metadata()
    return _ranges_of(metadata, [index for index in metadata.storage_data or () if index.fqn.startswith(prefixes)])


def find_needs_of_weights(
    folder: Path, tensors: Mapping[str, Tensor], metadata: Metadata, averaged: Collection[str]
) -> dict[str, list[ByteRange]]:
    """Return which bytes of which files ``read_weights`` reads."""
    plan = _plan_reading(open_reader(folder), _split_averages(tensors, averaged), metadata)[0]
    return _ranges_of(metadata, [item.storage_index for item in plan.items])


def _ranges_of(metadata: Metadata, indices: Sequence[MetadataIndex]) -> dict[str, list[ByteRange]]:
    ranges: dict[str, list[ByteRange]] = {}
    for index in indices:
        info = metadata.storage_data[index]
        ranges.setdefault(info.relative_path, []).append(ByteRange(info.offset, info.offset + info.length))
    return ranges


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Target to read a checkpoint into, for an optimizer that is described by ``optimizer_state``.

    ``never_stepped`` is the state of parameters that have none in the checkpoint; ``frozen`` are those with a state
    there alone, because they are no longer trained.
    """

    wanted: dict[str, Any]
    optimizer_state: dict[str, Any]
    never_stepped: dict[str, Any]
    frozen: list[str]


def _describe_wanted(
    folder: Path, model: nn.Module, optimizer: Optimizer, metadata: Metadata, stages: StageNames | None
) -> _Wanted:
    saved = metadata.state_dict_metadata
    model_state = dict(get_model_state_dict(model))
    expect_extra_state(model_state, {key: saved.get(f"{MODEL}.{key}") for key in model_state})
    optimizer_state = describe_optimizer(model, optimizer)
    elsewhere: Collection[str] = ()
    state_elsewhere: Collection[str] = ()
    if stages is not None:
        optimizer_state = stages.describe(optimizer_state)
        elsewhere, state_elsewhere = stages.elsewhere, stages.state_elsewhere
    paths = metadata.planner_data or {}
    stepped = dict.fromkeys(path[2] for path in paths.values() if path[:2] == (OPTIMIZER, "state"))
    stepped = {name: None for name in stepped if name not in state_elsewhere}
    never_stepped = drop_unsaved(optimizer_state, stepped)
    frozen = find_frozen(optimizer, optimizer_state, stepped)
    _refuse_other(folder, MODEL, {f"{MODEL}.{key}": value for key, value in model_state.items()}, metadata, elsewhere)
    state = {
        f"{OPTIMIZER}.state.{parameter}.{name}": value
        for parameter, tensors in optimizer_state["state"].items()
        for name, value in tensors.items()
    }
    _refuse_other(folder, OPTIMIZER, state, metadata, but_of=[*frozen, *state_elsewhere])
    settings = {name for group in optimizer_state["param_groups"] for name in group}
    groups = describe_saved_groups(metadata, settings)
    return _Wanted(
        wanted={
            MODEL: model_state,
            OPTIMIZER: {"state": optimizer_state["state"], "param_groups": groups},
            **({SETTINGS: b""} if SETTINGS in saved else {}),  # checkpoints of before have none
        },
        optimizer_state=optimizer_state,
        never_stepped=never_stepped,
        frozen=frozen,
    )


def restore_averages(
    folder: Path, averages: Mapping[str, Tensor], stages: StageNames | None = None
) -> tuple[list[str], list[str]]:
    """Fill averaged weights by name from a checkpoint, whatever its sharding.

    Returns the names that the checkpoint lacks, whose tensors are left alone, and those that it alone has.
    """
    lacking, alone = restore_part(folder, EMA, averages)
    return lacking, sorted(set(alone) - (frozenset() if stages is None else stages.elsewhere))


def restore_part(folder: Path, part: str, tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Fill tensors by name from a part of a checkpoint, whatever their sharding.

    Returns the names that the checkpoint lacks, whose tensors are left alone, and those that it alone has.
    """
    metadata = open_reader(folder).read_metadata()
    prefix = f"{part}."
    saved = {key.removeprefix(prefix) for key in metadata.state_dict_metadata if key.startswith(prefix)}
    found = {name: tensor for name, tensor in tensors.items() if name in saved}
    if found:
        read_state(folder, {part: found}, metadata)
    return [name for name in tensors if name not in saved], sorted(saved - set(tensors))


def list_averages(folder: Path | str, metadata: Metadata, names: Collection[str]) -> list[str]:
    """Return the names, of the model's ``names``, whose moving averages a checkpoint holds.

    Raises:
        CheckpointError: it holds none, or others.
    """
    prefix = f"{EMA}."
    found = [key.removeprefix(prefix) for key in metadata.state_dict_metadata if key.startswith(prefix)]
    if not found or not set(found) <= set(names):
        what = "averages of other parameters than the model's" if found else "no averaged weights"
        raise CheckpointError(f"weights='ema': {folder} holds {what}; train with ema.decay, or take weights='model'")
    return found


def restore_rank_state(folder: Path, rank: int) -> dict[str, Tensor]:
    """Return the tensors that this rank alone put into the checkpoint, on the CPU."""
    metadata = open_reader(folder).read_metadata()
    prefix = f"{RANKS}.{rank}."
    names = [key.removeprefix(prefix) for key in metadata.state_dict_metadata if key.startswith(prefix)]
    tensors = {name: allocate(metadata, prefix + name) for name in names}
    read_state(folder, {RANKS: {str(rank): tensors}}, metadata)
    return tensors


def read_state(folder: Path, state: dict[str, Any], metadata: Metadata) -> None:
    """Fill the tensors of ``state`` in place, and replace its other values, from a checkpoint in the folder."""
    reader = open_reader(folder)
    plan, planner = _plan_reading(reader, state, metadata)
    reader.read_data(plan, planner).wait()


def read_weights(folder: Path, tensors: Mapping[str, Tensor], metadata: Metadata, averaged: Collection[str]) -> None:
    """Fill tensors by name in place from a checkpoint's model; those that are ``averaged``, from its averages."""
    for part, found in _split_averages(tensors, averaged).items():
        read_state(folder, {part: found}, metadata)


def _split_averages(tensors: Mapping[str, Tensor], averaged: Collection[str]) -> dict[str, Any]:
    own = {name: one for name, one in tensors.items() if name not in averaged}
    averages = {name: one for name, one in tensors.items() if name in averaged}
    return {part: found for part, found in ((MODEL, own), (EMA, averages)) if found}


def _plan_reading(
    reader: FileSystemReader, state: dict[str, Any], metadata: Metadata
) -> tuple[LoadPlan, DefaultLoadPlanner]:
    planner = DefaultLoadPlanner()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    return planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan())), planner


def estimate_bytes(model: nn.Module) -> int:
    """Estimate the bytes of a checkpoint of the whole model with an optimizer that keeps two moments.

    The number of ranks does not matter.
    """
    trained = sum(2 * one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
    return trained + sum(one.numel() * one.element_size() for one in [*model.parameters(), *model.buffers()])


def allocate(metadata: Metadata, key: str) -> Tensor:
    """Return an uninitialised tensor on the CPU for one that a checkpoint holds."""
    kind = metadata.state_dict_metadata[key]
    if not isinstance(kind, TensorStorageMetadata):
        raise CheckpointError(f"{key} is not a tensor in this checkpoint; penstock did not write it")
    return torch.empty(kind.size, dtype=kind.properties.dtype)


def _refuse_other(
    folder: Path, part: str, wanted: Mapping[str, Any], metadata: Metadata, but_of: Collection[str] = ()
) -> None:
    prefix = f"{part}.state." if part == OPTIMIZER else f"{part}."
    at = 2 if part == OPTIMIZER else 1
    others = frozenset(but_of)
    left_out = {key for key, path in (metadata.planner_data or {}).items() if len(path) > at and path[at] in others}
    saved = {
        key: kind
        for key, kind in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and key not in left_out
    }
    differences = []
    for key in sorted({*saved, *wanted}):
        name = key.removeprefix(prefix)
        if key not in wanted:
            differences.append(f"{name} is in the checkpoint only")
        elif key not in saved:
            differences.append(f"{name} is not in the checkpoint")
        else:
            kind, value = saved[key], wanted[key]
            if not isinstance(kind, TensorStorageMetadata) or not isinstance(value, Tensor):
                continue
            if kind.size != value.shape:
                differences.append(f"{name} has shape {tuple(kind.size)} there and {tuple(value.shape)} here")
            elif part == MODEL and is_other_kind(value.dtype, kind.properties.dtype):
                differences.append(f"{name} is of {kind.properties.dtype} there and {value.dtype} here")
    if differences:
        more = f" (and {len(differences) - _NAMED_DIFFERENCES} more)" if len(differences) > _NAMED_DIFFERENCES else ""
        raise CheckpointMismatchError(
            f"{folder} is of another {part}: {'; '.join(differences[:_NAMED_DIFFERENCES])}{more}; "
            f"build the {part} that was saved, or give another checkpoint folder"
        )


def describe_conversions(model_state: Mapping[str, object], prefix: str, metadata: Metadata) -> list[str]:
    """One sentence for each pair of formats between which reading converts, with the names of what is converted.

    ``prefix`` stands before the names of ``model_state`` in the checkpoint.
    """
    converted: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, here, there in _dtype_pairs(model_state, prefix, metadata):
        if here != there:
            converted.setdefault((there, here), []).append(name)
    sentences = []
    for (there, here), names in converted.items():
        sentences.append(
            f"{list_some(names, _NAMED_CONVERTED)}: {_dtype_name(here)} in this model, "
            f"{_dtype_name(there)} in the checkpoint; values are converted, so the run differs from an unbroken one"
        )
    return sentences


def is_other_kind(here: torch.dtype, there: torch.dtype) -> bool:
    """Return whether only one is complex, floating or integral, so that a conversion would lose values."""
    return _kind_of_dtype(here) != _kind_of_dtype(there)


def _dtype_pairs(
    model_state: Mapping[str, object], prefix: str, metadata: Metadata
) -> Iterator[tuple[str, torch.dtype, torch.dtype]]:
    for name, value in model_state.items():
        saved = metadata.state_dict_metadata.get(prefix + name)
        if isinstance(value, Tensor) and isinstance(saved, TensorStorageMetadata):
            yield name, value.dtype, saved.properties.dtype


def _kind_of_dtype(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_complex, dtype.is_floating_point


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
