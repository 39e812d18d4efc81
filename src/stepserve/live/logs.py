"""Where the server's log goes, and in what form."""

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """One JSON object a line; a record's ``fields`` are keys of it."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def log_to_stderr(level: int, form: str) -> None:
    """Begin to log. ``form``: text or json (``ServeConfig.log_format``)."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)
