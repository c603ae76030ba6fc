"""The ``config.json`` of a model that knows its own, kept beside its checkpoints, so that exports are whole folders."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from torch import nn

from ...storage.errors import StorageError
from ...storage.files import write_whole
from ...storage.resolve import open_store
from .run_folder import CONFIG_NAME
from .stored_run import is_url


def keep_model_config(model: nn.Module, folder: str) -> str | None:
    """Write what ``model.config.to_json_string()`` returns, as models of transformers have it, if there is such.

    ``folder`` has the checkpoints, or is the URL of a store that does. Returns what people should know if that fails,
    which stops no training.
    """
    to_text = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_text):
        return None
    try:
        data = str(to_text()).encode()
        if is_url(folder):
            with closing(open_store(folder)) as store:
                store.put(CONFIG_NAME, data)
        else:
            write_whole(Path(folder) / CONFIG_NAME, data)
    except Exception as exc:  # noqa: BLE001 - the method is the model's own
        why = exc if isinstance(exc, (OSError, StorageError)) else f"{type(exc).__name__}: {exc}"
        return f"{CONFIG_NAME} of the model cannot be written to {folder} ({why}), so exports will lack it"
    return None
