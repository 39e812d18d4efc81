"""The operator's API, beside the clients': the state of the cluster, and changes to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from stepserve.core.errors import FieldError, StepserveError
from stepserve.gateway.errors import APIError


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


class Layout(BaseModel):
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


def add_operator(app: FastAPI, operator: Operator) -> None:
    """Add the routes. Whoever reaches them may use them: listen where only operators can."""

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
