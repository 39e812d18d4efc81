"""Instances as Ray actors, one each: on this machine, or wherever a Ray cluster has room.

Ray starts them, places them, counts CPUs and GPUs, and notices their end. Messages do not go
through it: a call of an actor costs 1.9 ms of CPU where a message of ``wire`` costs 0.1
(``benchmarks/transport.py``).
"""

import dataclasses
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.instance import InstanceSpec
from stepserve.core.protocols import StepPredictor
from stepserve.families.profiles import cores_per_share

from .connections import Address, connect
from .instance_factory import InstanceFactory
from .recording import Listener
from .remote import RemoteInstance
from .transport import OutputSink
from .transport_remote import RemoteTransport
from .wire import Carrier

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""How long the head of a Ray cluster may take to accept a connection."""

OBJECT_STORE_BYTES = 100 << 20
"""The least that Ray takes, nearly: nothing is kept in it."""

START_S = 120.0
"""How long room for an actor, and then its process, may take to come."""

PATIENCE_S = 10
"""After so long without room for an actor the log says so."""

PLACED_S = 1
"""How often a start that waits for room looks whether it was given up: Ray wants an integer."""


class RayCluster:
    """The Ray cluster that instances live in, from ``__enter__`` to ``__exit__``.

    ``config.cluster`` says which: ``ray``: one is started on this machine, and stopped;
    ``ray://auto``: the one that this machine is a node of; ``ray://HOST:PORT``: the same, by the
    address of its head. Ray's client is not used: the server takes part in the cluster. A
    process that is connected to Ray already uses that, and leaves it.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self._address = config.cluster.partition("://")[2]
        self._connected = False

    def __enter__(self) -> Self:
        """Raises FieldError if there is no cluster there or it cannot hold the instances."""
        if not ray.is_initialized():
            self._connect()
            self._connected = True
        try:
            self.config = self._fitted()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _connect(self) -> None:
        if self._address:
            options: dict[str, Any] = {"address": self._address}
            _check_head(self._address)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported anywhere
            options = {
                "address": "local",
                "num_cpus": cores_per_share(self.config) * sum(self.config.degrees),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_system_config": {"worker_niceness": 0},  # Ray's 15 would starve the instances
            }
        try:
            ray.init(**options)
        except Exception as error:  # Ray raises anything here, plain Exceptions among them
            ray.shutdown()
            what = (
                f"Ray at {options['address']} cannot be joined (RAY_AUTH_MODE=token, if it has one)"
            )
            raise FieldError("cluster", f"{what}: {error}") from error
        logger.info("Ray at %s", ray.get_runtime_context().gcs_address)

    def _fitted(self) -> ServeConfig:
        """The configuration with the CPU threads that instances get on the nodes there are."""
        nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        config = self.config
        if config.control.plans and len(nodes) > 1:
            raise FieldError("control.planner", "layouts are planned for a single node only")
        degrees, field = config.degrees, "layout" if config.layout else "instances"
        control = config.control
        if len(nodes) > 1:
            if len(set(degrees)) > 1:
                raise FieldError("layout", "unlike degrees fit together on a single node only")
            control = dataclasses.replace(control, tp_degrees=degrees[:1])
        threads = config.threads_per_instance or fair_share(nodes, degrees)
        if not fits(nodes, degrees, threads or 1):
            shares = ", ".join(str(degree * (threads or 1)) for degree in degrees)
            raise FieldError(field, f"instances of {shares} CPUs do not fit on nodes of {nodes}")
        return dataclasses.replace(config, threads_per_instance=threads, control=control)

    def transport(
        self,
        factory: InstanceFactory,
        sink: OutputSink,
        listeners: Sequence[Listener],
        predictor: StepPredictor,
    ) -> RemoteTransport:
        """A ``deploy.HostInstances``, of what ``config`` describes."""

        def launch(spec: InstanceSpec, incarnation: int) -> InstanceActor:
            return InstanceActor(factory, spec, incarnation)

        return RemoteTransport(launch, sink, listeners, predictor, factory.config.hang_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._connected:
            ray.shutdown()
            self._connected = False


def fair_share(nodes: Sequence[float], degrees: Sequence[int]) -> int:
    """Most CPUs that every share of an instance can get, all its shares on one node; 0: not one."""
    shares = range(int(max(nodes, default=0)), 0, -1)
    return next((threads for threads in shares if fits(nodes, degrees, threads)), 0)


def fits(nodes: Sequence[float], degrees: Sequence[int], threads: int) -> bool:
    """Whether there is room on some node for each instance, with so many CPUs for each share.

    Of equal degrees on any nodes, or of any on a single node.
    """
    if len(nodes) == 1:
        return sum(degrees) * threads <= nodes[0]
    return sum(int(cpus // (degrees[0] * threads)) for cpus in nodes) >= len(degrees)


def _check_head(address: str) -> None:
    """Raises FieldError if nobody listens there: Ray itself would ask for ever."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise FieldError("cluster", f"nothing answers at {address}: {error}") from error


class InstanceActor:
    """A ``Process`` that is a Ray actor in a placement group of its own."""

    def __init__(self, factory: InstanceFactory, spec: InstanceSpec, incarnation: int) -> None:
        self._factory = factory
        self._spec = spec
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._killed = self._ended = False
        self._undo: list[Callable[[], None]] = []

    def connect(self) -> Carrier:
        """See ``Process.connect``."""
        config, spec = self._factory.config, self._spec
        needs = {"CPU": float(cores_per_share(config) * spec.tp_degree)}
        if config.device.startswith("cuda"):
            needs["GPU"] = float(spec.tp_degree)
        # One node for all of it: workers of a tensor-parallel group are the actor's own processes.
        group = self._held(
            lambda: placement_group([needs], strategy="STRICT_PACK"), remove_placement_group
        )
        self._wait_for(group, needs)
        actor = self._held(lambda: self._start(group, needs), ray.kill)
        address: Address = ray.get(actor.address.remote(), timeout=START_S)
        actor.run.remote().future().add_done_callback(self._note_end)
        return connect(address)

    def _held(self, make: Callable[[], Any], undo: Callable[[Any], None]) -> Any:
        """Make something that ``kill`` undoes."""
        with self._lock:
            if self._killed:
                raise StepserveError("it was given up while it started")
            made = make()
            self._undo.append(lambda: undo(made))
        return made

    def _wait_for(self, group: Any, needs: dict[str, float]) -> None:
        for waited in range(math.ceil(START_S / PLACED_S)):
            if group.wait(PLACED_S):
                return
            if self._killed:
                break
            if waited == PATIENCE_S:
                logger.warning("instance %s waits: no node has %s free", self._spec.id, needs)
        raise StepserveError(f"no node has {needs} free")

    def _start(self, group: Any, needs: dict[str, float]) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor = _Actor.options(  # type: ignore[attr-defined]
            name=f"stepserve-{self._spec.id}.{self._incarnation}",
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0.0),
            scheduling_strategy=place,
        )
        return actor.remote(self._factory, self._spec, self._incarnation)

    def _note_end(self, _: object) -> None:
        self._ended = True

    def lives(self) -> bool:
        """See ``Process.lives``."""
        return not self._ended

    def kill(self) -> None:
        """See ``Process.kill``."""
        self._killed = True
        with self._lock:
            while self._undo:
                try:
                    self._undo.pop()()
                except Exception:  # of Ray, of any kind: what else there is must be undone, too
                    logger.exception(
                        "of %s.%d something may stay", self._spec.id, self._incarnation
                    )


@ray.remote(max_restarts=0, max_task_retries=0)
class _Actor:
    """The instance beside its executor, on whatever node it was placed."""

    def __init__(self, factory: InstanceFactory, spec: InstanceSpec, incarnation: int) -> None:
        node = ray.get_runtime_context().get_node_id()
        host = get_node_ip_address()
        self._instance = RemoteInstance(factory, spec, incarnation, node, host)

    def address(self) -> Address:
        return self._instance.address

    def run(self) -> None:
        self._instance.run()
