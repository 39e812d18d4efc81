"""The ports of a server, taken before anything else is done, and its certificate."""

import socket
import ssl
from dataclasses import replace
from pathlib import Path

from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError, check


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


def scheme(config: ServeConfig) -> str:
    """Of the server's addresses."""
    return "https" if config.ssl_certfile else "http"


def listen_for_operator(config: ServeConfig) -> socket.socket | None:
    """Take the operator's port, if there is to be one. Raises FieldError if it cannot be had."""
    check(0 <= config.operator_port < 65536, "operator_port", "must be in 0 .. 65535")
    check(config.operator_api or not config.operator_port, "operator_port", "needs operator_api")
    here = config.operator_host in ("127.0.0.1", "::1", "localhost")
    check(here or config.tenants != "", "operator_host", "needs a tenants file, with [operator]")
    if not config.operator_api:
        return None
    port = config.operator_port or (config.port and config.port + 1)
    try:
        return listen(replace(config, host=config.operator_host, port=port))
    except FieldError as error:
        raise FieldError("operator_port", error.message) from error


def check_tls(config: ServeConfig) -> None:
    """Raises FieldError for a certificate or key that is not there, or not usable."""
    check(bool(config.ssl_certfile or not config.ssl_keyfile), "ssl_certfile", "is missing")
    for name in ("ssl_certfile", "ssl_keyfile"):
        file = getattr(config, name)
        if file and not Path(file).is_file():
            raise FieldError(name, f"no file {file}")
    certificate, key = config.ssl_certfile, config.ssl_keyfile or None
    try:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        raise FieldError("ssl_certfile", f"{certificate} cannot be used: {error}") from error
