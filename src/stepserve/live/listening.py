"""The port of a server, taken before anything else is done."""

import socket

from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError


def listen(config: ServeConfig) -> socket.socket:
    """Take the port before anything is loaded. Raises FieldError if it cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)  # who connects while the model loads waits instead of failing
    except OSError as error:
        listener.close()
        raise FieldError("port", f"{config.host}:{config.port} cannot be used: {error}") from error
    return listener
