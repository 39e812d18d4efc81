"""Workloads and hardware of other packages, by name or as ``package.module:Class``.

Each is a class with ``Options`` and the constructor ``(options, parts)``, as policies are
(``families/registry``); here ``options`` are the defaults, and ``parts`` is ``None``. What it has:

- a workload: ``lengths(count, seed)``, the prompt and output tokens of the first so many requests;
- hardware: ``profile(model, degree)``, a ``StepProfile`` (diffusion) or a ``BatchProfile``.
"""

from typing import Any

from stepserve.core.config import Choice
from stepserve.families.registry import build, names


def is_outside(kind: str, name: str) -> bool:
    """Whether a name is not one of ours."""
    return ":" in name or (bool(name) and name in names(kind))


def outside(kind: str, name: str, field: str) -> Any:
    """What a name of another package stands for. Raises FieldError (``field``) if it is nothing."""
    return build(kind, Choice(name), None, field=field)
