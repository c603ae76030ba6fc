"""Training steps: consumes any iterable of batches, checkpoints it and resumes it."""

from .arrays import ArrayLoader
from .config import TrainerConfig
from .errors import TrainerError
from .evaluate import Evaluation
from .ranks.world import World, close_world, open_world
from .report.progress import Summary
from .trainer import DistributedTrainer
from .watch.watchdog import EXIT_STALLED

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
