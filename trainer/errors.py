"""The trainer's errors. All descend from TrainerError."""

from __future__ import annotations

from ..storage.errors import PenstockError


class TrainerError(PenstockError):
    """Base of every error that the trainer raises on purpose."""

    is_on_all_ranks = False
    """Whether all ranks raise it at the same step, so that none needs to hear of it from another."""


class TrainerConfigError(TrainerError, ValueError):
    """An option, or a pair of options, cannot work; the message names the key, its value and what would work."""


class RecipeError(TrainerConfigError):
    """A recipe cannot be resolved: an unknown key, an import path that does not exist, an argument that is refused."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be written, read or trusted; the message names the folder, the cause and the cure."""


class CheckpointRoomError(CheckpointError):
    """The disk under the checkpoints, or a quota on it, is full or too small."""


class CheckpointTakenError(CheckpointError):
    """Another run holds the folder; every rank raises this by itself, and nothing is written there."""


class CheckpointUploadError(CheckpointError):
    """The object store does not take a checkpoint, or cannot be reached, however often it was tried."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is of another model or optimizer; the message names the first keys and shapes that differ."""


class CompressionError(TrainerConfigError):
    """A scheme of gradient compression cannot work as configured, or not with this kind of sharding."""


class StallError(TrainerError):
    """A rank stalled, failed or died; the message names it, what it was doing and for how long."""


class NonFiniteLossError(TrainerError):
    """The loss became NaN or infinite; the message names the step, the rank and the samples if they are known."""

    is_on_all_ranks = True


class LossSpikeError(TrainerError):
    """The loss spiked, and training cannot be rewound, or was rewound too often; the message names step and limit."""

    is_on_all_ranks = True


class WorldError(TrainerError):
    """The ranks cannot be brought together, or the environment describes no possible world."""


class ServerError(TrainerError):
    """A parameter server, or the way to it, failed; the message names the shard and what to do."""


class ServerRefusedError(ServerError):
    """A shard refused a request, and applied nothing of it; the message names what was sent and what is held."""


class NotJoinedError(ServerRefusedError):
    """A shard does not know this incarnation of a worker, which has to join first."""


class NotHeldError(ServerRefusedError):
    """A shard does not hold a bucket, which lies on another by now."""


class ShardUnreachableError(ServerError):
    """A shard gave no answer; a request to it may have been applied or not, and may be sent again."""


class NoQuorumError(ServerError):
    """Too few workers pushed within the time allowed; the message names how many did, and the limit."""


class LeaseError(ServerError):
    """A lease of positions is not held by who uses it, or a journal of leases is damaged."""
