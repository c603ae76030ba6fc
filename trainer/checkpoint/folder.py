"""Checkpoints as files: names, the manifest with its checksums, what is whole, what may go. No tensors, no ranks.

A checkpoint is a folder ``step-N``. It is written as ``step-N.tmp`` and renamed when every byte and the manifest are on
disk, so a folder without the suffix is whole unless the disk itself lost something, which the checksums tell.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import xxhash

from ...storage.files import sync_folder, write_whole
from ..errors import CheckpointError
from .retention import UNKNOWN, Measure, Retention
from .traffic import TRAFFIC

MANIFEST_NAME = "manifest.json"
EXTRA_NAME = "extra.json"
METADATA_NAME = ".metadata"
MANIFEST_VERSION = 1
_FOLDER_NAME = re.compile(r"step-(\d+)")
_LEFTOVER_NAME = re.compile(r"step-\d+(\.replaced|\.removed(-\d+)?)?\.tmp|\.probe-\w+\.tmp")
_BLOCK_BYTES = 4 << 20
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FileSeal:
    """Seal of a checkpoint's file: its size in bytes and the xxh3-64 of its content in hex."""

    size: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint: the seal of each file by name, and where and when in training it was taken."""

    step: int
    world_size: int
    metric: float | None
    torch_version: str
    files: Mapping[str, FileSeal]
    measure: Measure = UNKNOWN
    """What ``metric`` is; older manifests do not tell."""

    def metric_by(self, measure: Measure) -> float | None:
        """The metric, unless it is known to be of another measure."""
        return self.metric if self.measure.fits(measure) else None


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def list_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint here, newest first; what is not one by name is left out."""
    found = [_FOLDER_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]) for match in found if match), reverse=True)


def remove_leftovers(folder: Path, *, with_probes: bool = False) -> tuple[list[str], list[str]]:
    """Delete what killed saves left behind, and what was hidden; whole checkpoints and foreign files stay.

    ``with_probes``: at a run's start. A later probe belongs to another run that starts, and will be refused.

    Returns the names of what is gone, and a sentence for what could not be deleted, which is left for another time. A
    step whose replacement was interrupted between two renames is brought back first: the new save if it is whole, else
    the old one.
    """
    for replaced in folder.glob("step-*.replaced.tmp"):
        final = replaced.with_name(replaced.name.removesuffix(".replaced.tmp"))
        if not final.exists():
            _finish_replacement(final, replaced)
    gone, failures = [], []
    for path in [path for path in folder.iterdir() if _LEFTOVER_NAME.fullmatch(path.name)]:
        if path.name.startswith(".probe") and not with_probes:
            continue
        try:
            if path.name.endswith(".replaced.tmp"):
                path = hide_folder(path)  # if it cannot be deleted, it must not be brought back when the step has gone
            _delete(path)
            gone.append(path.name)
        except OSError as exc:
            failures.append(f"{path.name} ({exc.strerror or exc})")
    return sorted(gone), sorted(failures)


def describe_left(folder: Path, failures: Sequence[str]) -> str:
    """In words, what could not be deleted."""
    return f"old checkpoints could not be deleted from {folder}: {'; '.join(failures)}; the next save tries again"


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def hide_folder(folder: Path) -> Path:
    """Take a folder of a step out of sight, by one rename to a name that ``remove_leftovers`` deletes; returns that.

    So a deleted checkpoint leaves no half one, and one with a file that cannot be deleted does no harm.
    """
    stem = folder.name.split(".")[0]
    names = chain([f"{stem}.removed.tmp"], (f"{stem}.removed-{number}.tmp" for number in count(1)))
    hidden = next(path for name in names if not (path := folder.with_name(name)).exists())
    return folder.rename(hidden)


def _finish_replacement(final: Path, replaced: Path) -> None:
    for candidate in (final.with_name(f"{final.name}.tmp"), replaced):
        if _is_whole(candidate):
            candidate.rename(final)
            sync_folder(final.parent)
            return


def _is_whole(folder: Path) -> bool:
    try:
        return not find_damage(folder, read_manifest(folder))
    except CheckpointError:
        return False


def probe_folder(folder: Path) -> None:
    """Make the folder if it is not there, and show that it can be written to.

    Raises:
        CheckpointError: it cannot be made, is no folder, is read-only or full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}.tmp"
        probe.mkdir(exist_ok=True)
        try:
            write_whole(probe / "probe", bytes(_PROBE_BYTES), durable=True)
        finally:
            shutil.rmtree(probe)
    except OSError as exc:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {exc.strerror or exc}; give a folder that exists or can be "
            "made, may be written to and has room"
        ) from exc


def seal_file(path: Path) -> FileSeal:
    """Read the file and return its size and checksum; the hash runs outside the interpreter lock."""
    digest = xxhash.xxh3_64()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            TRAFFIC.add(len(block))
    return FileSeal(size=size, xxh3=digest.hexdigest())


def write_text_durably(path: Path, text: str) -> None:
    write_whole(path, text.encode(), durable=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_text_durably(folder / MANIFEST_NAME, encode_manifest(manifest))


def encode_manifest(manifest: Manifest, more: Mapping[str, Any] | None = None) -> str:
    """Encode the manifest as JSON, with additional entries, and a checksum over itself."""
    body: dict[str, Any] = {
        **(more or {}),
        "version": MANIFEST_VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "metric": manifest.metric,
        **({} if manifest.metric is None else {"measure": asdict(manifest.measure)}),
        "torch_version": manifest.torch_version,
        "files": {name: {"size": seal.size, "xxh3": seal.xxh3} for name, seal in sorted(manifest.files.items())},
    }
    body["checksum"] = _checksum(body)
    return json.dumps(body, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check it against its own checksum.

    Raises:
        CheckpointError: it is missing, not JSON, of a version that is not known here, or was changed.
    """
    path = folder / MANIFEST_NAME
    try:
        return decode_manifest(path.read_bytes(), str(path))[0]
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {type(exc).__name__}: {exc}") from exc


def decode_manifest(data: bytes, name: str) -> tuple[Manifest, dict[str, Any]]:
    """The manifest and all that its JSON holds, checked against its own checksum; ``name`` is for messages.

    Raises:
        CheckpointError: it is not JSON, of a version that is not known here, or was changed.
    """
    try:
        body = json.loads(data)
        stated = body.pop("checksum")
        if _checksum(body) != stated:
            raise CheckpointError(
                f"{name} was changed after it was written: its checksum is not the one that it states"
            )
        if body["version"] != MANIFEST_VERSION:
            raise CheckpointError(
                f"{name} has version {body['version']}, this release reads version {MANIFEST_VERSION}; "
                "load it with the release that wrote it"
            )
        manifest = Manifest(
            step=body["step"],
            world_size=body["world_size"],
            metric=body["metric"],
            torch_version=body["torch_version"],
            files={name: FileSeal(**seal) for name, seal in body["files"].items()},
            measure=Measure(**body.get("measure", {})),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{name} cannot be read: {type(exc).__name__}: {exc}") from exc
    for file in manifest.files:
        if file in {"", ".", ".."} or "/" in file or "\0" in file:
            raise CheckpointError(f"{name} names {file[:100]!r}, which is no file inside a checkpoint")
    return manifest, body


def find_damage(folder: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> list[str]:
    """Return one sentence for each file that is not as the manifest says, of the ``share``-th of ``shares`` shares.

    The shares divide the files, largest first, so that the ranks read them all together and none twice.
    """
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))[share::shares]
    damage = []
    for name in names:
        stated = manifest.files[name]
        try:
            found = seal_file(folder / name)
        except OSError as exc:
            damage.append(f"{name} cannot be read: {exc.strerror or exc}")
            continue
        if found.size != stated.size:
            damage.append(f"{name} has {found.size} bytes instead of {stated.size}")
        elif found.xxh3 != stated.xxh3:
            damage.append(f"{name} has checksum {found.xxh3} instead of {stated.xxh3}")
    return damage


def publish_folder(written: Path, final: Path) -> None:
    """Give a complete folder its final name so that it survives a loss of power.

    A folder that has that name is replaced, and left to ``remove_leftovers``.
    """
    sync_folder(written)
    if final.exists():
        final.rename(final.with_name(f"{final.name}.replaced.tmp"))
    written.rename(final)
    sync_folder(final.parent)


def prune_folder(folder: Path, retention: Retention, *, damaged: Iterable[int] = ()) -> list[str]:
    """Hide the checkpoints that need not stay; damaged ones neither count nor go. Returns a sentence for each failure.

    What is hidden is left to ``remove_leftovers``.
    """
    metrics: dict[int, float | None] = {}
    for step in set(list_steps(folder)) - set(damaged):
        try:
            metrics[step] = read_manifest(step_folder(folder, step)).metric_by(retention.measure)
        except CheckpointError:
            continue  # unreadable: neither counted as kept nor deleted, for a person may want to look
    failures = []
    for step in sorted(set(metrics) - retention.choose(metrics)):
        try:
            hide_folder(step_folder(folder, step))
        except OSError as exc:
            failures.append(f"step-{step} ({exc.strerror or exc})")
    return failures


def _checksum(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())
