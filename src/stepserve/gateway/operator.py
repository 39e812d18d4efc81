"""The operator's API, beside the clients': the state of the cluster, and changes to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import FastAPI
from pydantic import ConfigDict, Field

from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError, StepserveError
from stepserve.gateway.authentication import Authentication
from stepserve.gateway.errors import APIError, install_error_handlers
from stepserve.gateway.middleware import BodyLimit, HeadAsGet, RequestIds
from stepserve.gateway.tenants import Tenants
from stepserve.gateway.text import TextBody


class Operator(Protocol):
    """What a cluster lets its operator see and do."""

    def state(self) -> dict[str, Any]:
        """Instances, and whether the layout is being changed, as values of JSON."""
        ...

    def change(self, layout: Sequence[int]) -> None:
        """Begin to change to instances of these tensor-parallel degrees.

        Raises FieldError for an impossible layout, StepserveError where none can begin now.
        """
        ...

    def drain(self, name: str) -> None:
        """Begin to stop an instance. Raises as ``change``, and KeyError for an unknown one."""
        ...

    def restart_scheduler(self) -> None:
        """Have a new global scheduler take over; instances and requests go on."""
        ...


class Layout(TextBody):
    """Tensor-parallel degrees, one per instance."""

    model_config = ConfigDict(extra="forbid")

    layout: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]


@contextmanager
def _refusals() -> Iterator[None]:
    """What cannot begin now is a conflict (409); what can never is refused as any bad field is."""
    try:
        yield
    except FieldError:
        raise
    except StepserveError as error:
        raise APIError(409, str(error)) from error


def operator_app(operator: Operator, config: ServeConfig) -> FastAPI:
    """The operator's API alone. With a tenants file it takes a key of the operator's.

    Without one, whoever reaches it may use it: listen where only operators can.
    """
    app = FastAPI(title="stepserve operator", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=2**16)
    if config.tenants:
        tenants = Tenants(Path(config.tenants), config.slo_classes)
        app.add_middleware(Authentication, tenants=tenants)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestIds)
    add_operator(app, operator)
    return app


def add_operator(app: FastAPI, operator: Operator) -> None:
    """Add the routes."""

    async def state() -> dict[str, Any]:
        return operator.state()

    async def change(body: Layout) -> dict[str, Any]:
        with _refusals():
            operator.change(body.layout)
        return operator.state()

    async def drain(name: str) -> dict[str, Any]:
        try:
            with _refusals():
                operator.drain(name)
        except KeyError as error:
            raise APIError(404, f"there is no instance {name!r}", param="instance") from error
        return operator.state()

    async def restart() -> dict[str, Any]:
        operator.restart_scheduler()
        return operator.state()

    app.add_api_route("/cluster", state, methods=["GET"])
    app.add_api_route("/cluster/layout", change, methods=["PUT"], status_code=202)
    app.add_api_route("/cluster/instances/{name}/drain", drain, methods=["POST"], status_code=202)
    app.add_api_route("/cluster/scheduler/restart", restart, methods=["POST"], status_code=202)
