"""Parts by name, by entry point and by path; what is wrong is named before anything is built."""

import dataclasses
import inspect
import re
from importlib import metadata

import pytest

from stepserve.core.config import Choice
from stepserve.core.errors import FieldError
from stepserve.core.protocols import Parts
from stepserve.core.request import Family
from stepserve.families import registry
from stepserve.families.programs.diffusion import DiffusionProgram
from stepserve.families.registry import BUILT_IN, build, load, names
from stepserve.policies.threshold.deadline_fit import DeadlineFit
from support.outside import LowEarly, MostLoaded

PARTS = Parts(DiffusionProgram(), cost=None)
OUTSIDE = "support.outside:"


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_built_in_name_leads_to_a_part_with_documented_options(kind):
    for name in BUILT_IN[kind]:
        part = load(kind, name)
        if part is None:
            assert name in ("none", "as_asked")
            continue
        options = part.Options()
        assert part.Options.__doc__
        for field in dataclasses.fields(options):
            told = rf"``{field.name}``|^ +{field.name}: .*  # \w"
            assert re.search(told, _told(part), re.M), f"{name}: {field.name} is not explained"


def _told(part):
    """What is said of a part's options, in its class and those it inherits from, or beside them."""
    of = [text for cls in part.__mro__ if (options := getattr(cls, "Options", None))
          for text in (inspect.getsource(options), cls.__doc__)]  # fmt: skip
    return "\n".join(filter(None, of))


def test_options_reach_the_part_and_the_rest_is_its_default():
    fit = build("threshold", Choice("deadline_fit", {"margin": 0.5}), PARTS)
    assert isinstance(fit, DeadlineFit)
    assert fit._margin == 0.5
    assert build("threshold", Choice("deadline_fit"), PARTS)._margin == PARTS.control.margin


def test_a_path_leads_to_any_class():
    low = build("threshold", Choice(f"{OUTSIDE}LowEarly", {"floor_tokens": 3}), PARTS)
    assert isinstance(low, LowEarly)
    assert low._floor_tokens == 3


@pytest.mark.parametrize(
    ("kind", "choice", "field", "message"),
    [
        ("threshold", Choice("dedline_fit"), "control.threshold", "did you mean deadline_fit?"),
        ("threshold", Choice("nothing_like"), "control.threshold", "known: fixed, deadline_fit"),
        ("threshold", Choice("least_loaded"), "control.threshold", "unknown 'least_loaded'"),
        ("threshold", Choice("no.such:Part"), "control.threshold", "cannot be loaded"),
        ("threshold", Choice(f"{OUTSIDE}Nobody"), "control.threshold", "cannot be loaded"),
        ("threshold", Choice(".x:Y"), "control.threshold", "cannot be loaded"),
        ("threshold", Choice("support.raises:Part"), "control.threshold", "1 is not a policy"),
        ("threshold", Choice(f"{OUTSIDE}Unfinished"), "control.threshold", "needs a dataclass"),
        ("threshold", Choice(f"{OUTSIDE}check"), "control.threshold", "needs a dataclass"),
        (
            "threshold",
            Choice("deadline_fit", {"marjin": 1.0}),
            "control.threshold.marjin",
            "known: margin",
        ),
        ("threshold", Choice("deadline_fit", {"margin": 2.0}), "control.threshold.margin", "0, 1"),
        ("threshold", Choice("deadline_fit", {"margin": "x"}), "control.threshold.margin", "'x'"),
        ("threshold", Choice("fixed", {"margin": 0.9}), "control.threshold.margin", "unknown key"),
        (
            "threshold",
            Choice(f"{OUTSIDE}LowEarly", {"floor_tokens": -1}),
            "control.threshold.floor_tokens",
            "negative",
        ),
        ("migration", Choice("none", {"gain": 0.1}), "control.migration.gain", "no options"),
        ("batching", Choice("age_budget"), "control.batching", "for autoregressive models only"),
        ("batching", Choice(f"{OUTSIDE}Everybody"), "control.batching", "autoregressive"),
        ("placement", Choice("tandem_split"), "control.placement", "autoregressive"),
    ],
)
def test_what_cannot_be_built_is_named(kind, choice, field, message):
    with pytest.raises(FieldError) as error:
        build(kind, choice, PARTS, Family.DIFFUSION)
    assert error.value.field == field
    assert message in error.value.message


@pytest.fixture
def distribution(monkeypatch):
    """Another package that registers a threshold, a placement and a planner."""
    entries = [
        metadata.EntryPoint("threshold.low_early", f"{OUTSIDE}LowEarly", registry.POLICIES),
        metadata.EntryPoint("placement.most_loaded", f"{OUTSIDE}MostLoaded", registry.POLICIES),
        metadata.EntryPoint("threshold.fixed", f"{OUTSIDE}LowEarly", registry.POLICIES),
        metadata.EntryPoint("of_mine", f"{OUTSIDE}LowEarly", registry.GROUPS["planner"]),
    ]
    monkeypatch.setattr(
        registry.metadata, "entry_points", lambda group: [e for e in entries if e.group == group]
    )


@pytest.mark.usefixtures("distribution")
def test_another_package_registers_parts_by_entry_points():
    assert load("threshold", "low_early") is LowEarly
    assert load("placement", "most_loaded") is MostLoaded
    assert load("planner", "of_mine") is LowEarly
    assert "low_early" not in names("placement")
    assert load("threshold", "fixed") is not LowEarly, "what is built in keeps its name"
    with pytest.raises(FieldError, match=r"did you mean low_early\?"):
        load("threshold", "low_earl")
