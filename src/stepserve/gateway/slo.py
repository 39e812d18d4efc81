"""Latency targets of a request, out of its body, its headers and its class.

Targets are kept as they are asked for, and judged by: where less is worked for, both are in the
reply. Time that is over is a target that has passed, never none.

A header takes precedence over the body when peers are trusted (``trust_slo_headers``);
otherwise the looser of the two holds, so a client gains nothing by sending one. A bad header
is ignored and reported; a bad body field is an error.
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.request import SLO, OnMiss
from stepserve.gateway.schemas import SLOFields

_E2E = ("x-slo-e2e-ms",)
_TTFT = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
_TPOT = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
_TBT = ("x-slo-tbt-ms",)
_CLASS = ("x-slo-class", "x-llm-d-inference-objective")
_DEADLINE = ("x-request-deadline-unix-ms",)
_TIME_LEFT = (_E2E, _TTFT, _DEADLINE)  # not positive: the time is over
# Understood by others, without a meaning here: counted so that their senders can be found.
_WITHOUT_EFFECT = ("x-dynamo-request-priority", "x-llm-d-inference-fairness-id")

TIERS = {
    "priority": "interactive",
    "fast": "interactive",
    "default": "standard",
    "scale": "standard",
    "flex": "batch",
}


T = TypeVar("T")


class SLOReader:
    """Reads the latency targets of requests.

    ``ignored`` is told the name of each header that could not be used.
    """

    def __init__(self, config: ServeConfig, weighs: bool, ignored: Callable[[str], None]) -> None:
        """``weighs``: see ``ModelCard``; ``ignored`` is told of headers."""
        self._config = config
        self._weighs = weighs
        self._ignored = ignored

    def read(
        self,
        fields: SLOFields | None,
        tier: str | None,
        headers: Mapping[str, str],
        unix_ms: float,
    ) -> SLO:
        """The targets in seconds from now; ``unix_ms`` is now on the wall clock.

        A deadline that has passed gives an ``e2e_s`` that is not positive: ``on_miss`` handles it.
        Raises FieldError for an unknown class and for aliases that contradict.
        """
        fields = fields or SLOFields()
        if fields.weight not in (None, 1.0) and not self._weighs:
            raise FieldError("slo.weight", "no policy of this server weighs requests; only 1")
        for name in _WITHOUT_EFFECT:
            if name in headers:
                self._ignored(name)
        slo_class = self._class(fields.slo_class, tier, headers)
        defaults = self._config.slo_classes[slo_class]

        asked_ms = one_of({"slo.e2e_ms": fields.e2e_ms, "slo.ttlt_ms": fields.ttlt_ms})
        e2e_s = _seconds(self._target(asked_ms, headers, _E2E))
        deadline_ms, fixed = self._target(fields.deadline_unix_ms, headers, _DEADLINE), False
        if deadline_ms is not None:
            left_s = (deadline_ms - unix_ms) / 1e3
            fixed = e2e_s is None or left_s < e2e_s
            e2e_s = left_s if e2e_s is None else min(e2e_s, left_s)
        ttft_s = _seconds(self._target(fields.ttft_ms, headers, _TTFT))
        tpot_s = _seconds(self._target(fields.tpot_ms, headers, _TPOT))
        tbt_s = _seconds(self._target(fields.tbt_ms, headers, _TBT))
        e2e_s = defaults.e2e_s if e2e_s is None else e2e_s
        on_miss = OnMiss(fields.on_miss or OnMiss.DEGRADE)
        if on_miss is OnMiss.REJECT and e2e_s is None:
            raise FieldError("slo.on_miss", "'reject' needs slo.e2e_ms or slo.deadline_unix_ms")
        return SLO(
            slo_class=slo_class,
            e2e_s=e2e_s,
            ttft_s=defaults.ttft_s if ttft_s is None else ttft_s,
            tpot_s=defaults.tpot_s if tpot_s is None else tpot_s,
            tbt_s=defaults.tbt_s if tbt_s is None else tbt_s,
            least_tbt_s=defaults.tbt_s or self._config.control.tbt_s,
            fixed_deadline=fixed,
            on_miss=on_miss,
            weight=min(fields.weight or defaults.weight, defaults.weight),
        )

    def _class(self, asked: str | None, tier: str | None, headers: Mapping[str, str]) -> str:
        classes = self._config.slo_classes
        param = "slo.class" if asked else "service_tier"
        body = asked or TIERS.get(tier or "", self._config.default_slo_class)
        if body not in classes:
            raise FieldError(param, f"unknown class {body!r}; known: {', '.join(classes)}")
        for name in _CLASS:
            value = headers.get(name)
            if value is None:
                continue
            if value not in classes:
                self._ignored(name)
            elif self._config.trust_slo_headers:
                return value
            else:
                return max(body, value, key=lambda known: classes[known].e2e_s or math.inf)
        return body

    def _target(
        self, body_ms: float | None, headers: Mapping[str, str], names: tuple[str, ...]
    ) -> float | None:
        header_ms = self._header_ms(headers, names)
        if header_ms is None:
            return body_ms
        if self._config.trust_slo_headers:
            return header_ms
        return None if body_ms is None else max(body_ms, header_ms)

    def _header_ms(self, headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
        for name in names:
            if name not in headers:
                continue
            try:
                value = float(headers[name])
            except ValueError:
                value = math.nan
            if math.isfinite(value) and (value > 0 or names in _TIME_LEFT):
                return value
            self._ignored(name)
        return None


def one_of(values: Mapping[str, T | None]) -> T | None:
    """The value given under any of several names. Raises FieldError if they contradict."""
    given = {name: value for name, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        raise FieldError(list(given)[-1], f"contradicts {next(iter(given))}")
    return next(iter(given.values()), None)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
