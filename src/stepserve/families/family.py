"""What distinguishes one model family from another, as a value."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stepserve.core.config import Choice, ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.protocols import StepProgram
from stepserve.core.request import Family
from stepserve.cost.forecast_parts import ForecastParts

from .registry import chosen, inside


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A step program and the policies that go with it.

    ``defaults``: the policy of each kind; ``predict_every_tokens``: see ``ControlConfig``.
    ``without_effect``: what of ``ControlConfig`` changes nothing here, and why.
    ``request_fields``: what its requests may say that those of others may not. ``forecast``: the
    name of the one to use where there are such parts.
    """

    name: Family
    program: Callable[[ControlConfig], StepProgram]
    defaults: Mapping[str, Choice]
    predict_every_tokens: int
    without_effect: Mapping[str, str]
    request_fields: frozenset[str]
    forecast: Callable[[ForecastParts], str]

    def resolved(self, control: ControlConfig) -> ControlConfig:
        """The configuration with this family's defaults in place of what it leaves open.

        Raises FieldError for what is configured without an effect.
        """
        for name, why in self.without_effect.items():
            given = getattr(control, name)
            if given not in (getattr(ControlConfig(), name), self.defaults.get(name)):
                what = f"has no effect on {self.name} models: {why}"
                raise FieldError(f"control.{name}", what)
        every = control.predict_every_tokens or self.predict_every_tokens
        filled: dict[str, Any] = {"predict_every_tokens": every}
        for kind, default in self.defaults.items():
            given = getattr(control, kind)
            filled[kind] = default if given is None else given.over(default)
        return dataclasses.replace(control, **filled)

    def check(self, control: ControlConfig, instances: int) -> list[Any]:
        """The options of each part that is chosen, for a cluster of so many instances.

        Raises FieldError for a part that there is not, and for an option that makes no sense; what
        makes none on so few instances, ``Options.check_instances`` says.
        """
        options = []
        control = self.resolved(control)
        if control.plans and self.name is not Family.DIFFUSION:
            raise FieldError("control.planner", "layouts are planned for diffusion models only")
        for kind in self.defaults:
            part = chosen(kind, getattr(control, kind), self.name)
            if part is not None:
                options.append(part[1])
                with inside(f"control.{kind}"):
                    getattr(part[1], "check_instances", lambda _: None)(instances)
        return options

    def weighs(self, control: ControlConfig) -> bool:
        """Whether a policy makes use of ``slo.weight``: its options say so with ``weighs``."""
        kinds = (chosen(kind, getattr(self.resolved(control), kind)) for kind in self.defaults)
        return any(getattr(part[1], "weighs", False) for part in kinds if part is not None)
