"""The server's log, as text and as JSON."""

import json
import logging

import pytest

from stepserve.live.logs import log_to_stderr


@pytest.fixture
def log(monkeypatch):
    """Begins to log with a root logger of its own, as a process has it."""
    logger = logging.getLogger()
    level = logger.level

    def begin(form):
        monkeypatch.setattr(logger, "handlers", [])
        log_to_stderr(logging.INFO, form)

    yield begin
    logger.setLevel(level)


def failing(logger):
    try:
        raise ValueError("boom\nbang")
    except ValueError:
        logger.exception("it broke \ud800")


def test_json_lines(log, capsys):
    log("json")
    logger = logging.getLogger("stepserve.requests")
    logger.info("%(id)s ended", {"id": "r"}, extra={"fields": {"id": "r", "e2e_ms": 5.0}})
    logger.debug("not shown")
    failing(logger)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["id"], first["e2e_ms"]) == ("r ended", "r", 5.0)
    assert (first["level"], first["logger"]) == ("INFO", "stepserve.requests")
    assert first["time"].endswith("+00:00")
    assert second["traceback"].endswith("ValueError: boom\nbang")


def test_text_lines(log, capsys):
    log("text")
    logging.getLogger("stepserve").info("serving %s", "m")
    assert capsys.readouterr().err.endswith(" INFO stepserve: serving m\n")
