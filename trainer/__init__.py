"""Training steps: consumes any iterable of batches, checkpoints it and resumes it."""

from .arrays import ArrayLoader
from .config import TrainerConfig
from .errors import TrainerError
from .evaluate import Evaluation
from .progress import Summary
from .trainer import DistributedTrainer
from .watchdog import EXIT_STALLED
from .world import World, close_world, open_world

__all__ = [
    "EXIT_STALLED",
    "ArrayLoader",
    "DistributedTrainer",
    "Evaluation",
    "Summary",
    "TrainerConfig",
    "TrainerError",
    "World",
    "close_world",
    "open_world",
]
