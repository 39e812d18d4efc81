"""Facts shipped with the simulator, and the folder of full data sets when there is one.

The JSON files beside this module hold small tables and fitted numbers, each with its source.
Full data sets are never part of the package: they are read at run time from the folder named
by ``STEPSERVE_DATA``, by default ``../shared/data`` beside a source checkout.
"""

import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from stepserve.core.errors import FieldError
from stepserve.files import content_of


def facts(name: str) -> Any:
    """The content of ``<name>.json``."""
    return json.loads((resources.files(__name__) / f"{name}.json").read_text())


def data_file(name: str) -> Path | None:
    """The path of a file below the data folder; ``None`` where it is absent."""
    beside_checkout = Path(__file__).parent / "../../../../../shared/data"
    folder = Path(os.environ.get("STEPSERVE_DATA", beside_checkout))
    path = folder / name
    return path if path.is_file() else None


@contextmanager
def rows_of(path: Path) -> Iterator[Iterator[dict[str, str]]]:
    """Rows of a table in CSV, gzipped or not. What fails while they are read is its fault.

    Raises FieldError (``STEPSERVE_DATA``) then.
    """
    try:
        with content_of(path, "STEPSERVE_DATA", "table as it was published"):
            zipped = path.suffix == ".gz"
            opened = gzip.open if zipped else open
            with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
                yield csv.DictReader(file)
    except (OSError, EOFError, csv.Error, zlib.error) as error:
        raise FieldError("STEPSERVE_DATA", f"cannot read {path}: {error}") from error
