"""Facts shipped with the simulator, and the folder of full data sets when there is one.

The JSON files beside this module hold small tables and fitted numbers, each with its source.
Full data sets are never part of the package: they are read at run time from the folder named
by ``STEPSERVE_DATA``, by default ``../shared/data`` beside a source checkout.
"""

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any


def facts(name: str) -> Any:
    """The content of ``<name>.json``."""
    return json.loads((resources.files(__name__) / f"{name}.json").read_text())


def data_file(name: str) -> Path | None:
    """The path of a file below the data folder; ``None`` where it is absent."""
    beside_checkout = Path(__file__).parent / "../../../../../shared/data"
    folder = Path(os.environ.get("STEPSERVE_DATA", beside_checkout))
    path = folder / name
    return path if path.is_file() else None
