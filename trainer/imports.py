"""Import paths: how recipes and options name Python objects."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

from .errors import TrainerConfigError
from .options import suggest


def import_name(key: str, path: str) -> object:
    """The object that ``package.module:name`` names.

    Raises:
        TrainerConfigError: the path is malformed, or its module or name does not exist; naming ``key``.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise TrainerConfigError(f"{key}={path!r} is not an import path; write it as 'package.module:name'")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as exc:
        raise TrainerConfigError(
            f"{key}={path!r}: module {module_name!r} cannot be imported ({exc}); is it installed, or its folder on "
            "PYTHONPATH?"
        ) from exc
    except Exception as exc:
        raise TrainerConfigError(f"{key}={path!r}: importing {module_name!r} raised {describe_error(exc)}") from exc
    for part in name.split("."):
        if not hasattr(found, part):
            public = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            raise TrainerConfigError(f"{key}={path!r}: {module_name!r} has no {name!r}; {suggest(part, public)}")
        found = getattr(found, part)
    return found


def describe_error(error: Exception) -> str:
    """An error of foreign code in one line: its type, its message, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
