"""Where a model's files are: bundled, in a folder, or of the hub through its own client."""

import re
from functools import cache
from pathlib import Path

import huggingface_hub  # what it needs itself it imports when it is used

from stepserve.core.errors import FieldError

BUNDLED = Path(__file__).parent / "bundled" / "model"

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Code that comes with a checkpoint is never run, so it is not fetched.
_FILES = ("*.json", "*.jinja", "*.safetensors")


def model_folder(name: str) -> Path:
    """The folder of a model: ``bundled``, a checkpoint's in Hugging Face layout, or of the hub.

    Raises FieldError (field ``model``) if there is none.
    """
    folder = snapshot(name) if is_hub_name(name) else BUNDLED if name == "bundled" else Path(name)
    if not (folder / "config.json").is_file():
        raise FieldError("model", f"no config.json in {folder}; give 'bundled' or a model folder")
    return folder


def is_hub_name(name: str) -> bool:
    """Whether a model is given as ``organisation/name``, and not as a folder that exists."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


@cache
def snapshot(name: str) -> Path:
    """Folder of a model of the hub, downloaded if it is not in the client's cache.

    The client's own settings hold (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``). Raises
    FieldError (field ``model``) with the client's reason.
    """
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES)))
    except (OSError, ValueError) as error:  # among them: no such name, no network, offline mode
        reason = " ".join(str(error).split())
        raise FieldError(
            "model", f"there is no folder {name}, and the hub has not given it: {reason}"
        ) from error
