"""Tenants: who may ask for what, read from a file that is looked at again while serving.

Whose a request is, is decided here, in the gateway, before anything is submitted: schedulers see
a name. Without a file there is one tenant, ``default``, that may do anything.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepserve.core.config import ServeConfig, SLOClass
from stepserve.core.errors import FieldError, check
from stepserve.core.request import SLO
from stepserve.files import read_toml
from stepserve.gateway.errors import APIError
from stepserve.gateway.keys import KeyRing, is_hash
from stepserve.tables import from_table

_LOG = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TARGETS = ("e2e", "ttft", "tbt")
_LIMITS = ("requests_in_flight", "tokens_in_flight", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one tenant may do. Limits are of one gateway process; 0: none."""

    name: str = ""  # its table's: no key of the file
    keys: tuple[str, ...] = ()  # hashes: `stepserve key new` makes them
    classes: tuple[str, ...] = ()  # SLO classes that it may have; none: all
    e2e_ms: float | None = None  # the tightest target that it may ask for
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    weight: float = 1.0  # its share of the machines under overload, relative to others'
    requests_in_flight: int = 0  # samples: n of a request count as n
    tokens_in_flight: int = 0  # of prompts, and of output limits
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # what an answer did not need of its limit is given back

    def __post_init__(self) -> None:
        """Raises FieldError naming the value that makes no sense."""
        for name in ("e2e_ms", "ttft_ms", "tbt_ms", "weight"):
            value = getattr(self, name)
            check(value is None or 0.0 < value < 1e9, name, "must be positive")
        for name in _LIMITS:
            check(getattr(self, name) >= 0, name, "must not be negative")
        check(all(map(is_hash, self.keys)), "keys", "must be hashes: sha256: and 64 hex digits")


DEFAULT = Tenant("default")


@dataclass(frozen=True, slots=True)
class OperatorKeys:
    """Who may use ``/cluster``, and read ``/metrics``."""

    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """A tenants file."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    operator: OperatorKeys = OperatorKeys()

    @property
    def weights(self) -> dict[str, float]:
        """By tenant."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}


def read_tenants(path: Path, classes: Collection[str]) -> TenantsFile:
    """Read a tenants file; ``classes``: those that there are.

    Raises FieldError naming the key at fault.
    """
    read = from_table(TenantsFile, read_toml(path, "tenants"))
    check(all(map(is_hash, read.operator.keys)), "operator.keys", "must be hashes")
    seen = dict.fromkeys(read.operator.keys, "operator")
    for name, tenant in read.tenants.items():
        where = f"tenants.{name}"
        check(_NAME.fullmatch(name) is not None, where, "letters, digits, . _ -, at most 64")
        check(not tenant.name, f"{where}.name", "is that of the table")
        unknown = sorted(set(tenant.classes) - set(classes))
        check(not unknown, f"{where}.classes", f"no such SLO class: {', '.join(unknown)}")
        for one in tenant.keys:
            check(one not in seen, f"{where}.keys", f"a key of {seen.get(one)}, too")
            seen[one] = name
    named = {name: replace(tenant, name=name) for name, tenant in read.tenants.items()}
    return replace(read, tenants=named)


def with_weights(config: ServeConfig) -> ServeConfig:
    """The configuration with the weights of its tenants file, which schedulers begin with."""
    if not config.tenants:
        return config
    weights = read_tenants(Path(config.tenants), config.slo_classes).weights
    weights |= config.control.tenant_weights
    return replace(config, control=replace(config.control, tenant_weights=weights))


class Tenants:
    """The tenants of a file, as it is now: it is looked at again, at most once a second.

    A file that cannot be read leaves everything as it was, and is said once. Weights are those
    of the start: they are part of what schedulers are made of.
    """

    def __init__(
        self,
        path: Path,
        classes: Mapping[str, SLOClass],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises FieldError for a file that cannot be read."""
        self._path, self._classes, self._clock = path, classes, clock
        self._seen, self._looked_s = self._stamp(), clock()
        self._take(read_tenants(path, classes))
        self._first_weights = self._file.weights

    def tenant(self, key: str) -> Tenant | None:
        """Whose key it is."""
        self._look()
        owner = self._ring.owner(key)
        return None if owner is None else self._file.tenants[owner]

    def is_operator(self, key: str) -> bool:
        """Whether it is a key of the operator's."""
        self._look()
        return self._operators.owner(key) is not None

    def _look(self) -> None:
        if self._clock() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = self._clock()
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._take(read_tenants(self._path, self._classes))
        except FieldError as error:
            _LOG.error("the tenants file cannot be used, all stays as it was: %s", error)
            return
        _LOG.info("%d tenants, read anew from %s", len(self._file.tenants), self._path)
        if self._file.weights != self._first_weights:
            _LOG.warning("weights of tenants act from the next start of the server")

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _take(self, read: TenantsFile) -> None:
        self._file = read
        self._ring = KeyRing({name: tenant.keys for name, tenant in read.tenants.items()})
        self._operators = KeyRing({"operator": read.operator.keys})


def check_allowed(tenant: Tenant, slo: SLO, classes: Mapping[str, SLOClass], param: str) -> None:
    """Raises APIError (403) for a class, or a target, that the tenant may not ask for.

    ``param``: the field that said the class. What a class fills in is allowed with the class.
    """
    if tenant.classes and slo.slo_class not in tenant.classes:
        allowed = ", ".join(tenant.classes)
        raise APIError(403, f"class {slo.slo_class!r} is not yours; {allowed}", param=param)
    filled = classes[slo.slo_class]
    for name in _TARGETS:
        asked_s, least_ms = getattr(slo, f"{name}_s"), getattr(tenant, f"{name}_ms")
        if asked_s is None or least_ms is None or asked_s == getattr(filled, f"{name}_s"):
            continue
        if 0.0 < asked_s * 1e3 < least_ms:  # one that has passed takes nothing from others
            what = f"{asked_s * 1e3:g} ms is tighter than you may ask for: {least_ms:g} ms"
            raise APIError(403, what, param=f"slo.{name}_ms")
