import pytest

from stepserve.core.config import (
    Choice,
    ControlConfig,
    ServeConfig,
    SLOClass,
)
from stepserve.core.errors import FieldError
from stepserve.core.request import ThresholdBounds
from stepserve.tables import as_table, from_table


def test_tables_become_frozen_values():
    table = {
        "port": 9000,
        "slo_classes": {"gold": {"e2e_s": 1}},
        "control": {"thresholds": [0.9, 0.5], "margin": 1},
    }
    config = from_table(ServeConfig, table)
    assert config.port == 9000
    assert config.slo_classes["gold"] == SLOClass(e2e_s=1)
    assert "standard" in config.slo_classes, "given classes are added to the defaults"
    assert config.control == ControlConfig(thresholds=(0.9, 0.5), margin=1.0)


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"prot": 1}, "prot"),
        ({"control": {"marjin": 1.0}}, "control.marjin"),
        ({"port": "x"}, "port"),
        ({"port": True}, "port"),
        ({"control": 3}, "control"),
        ({"control": {"thresholds": ["high"]}}, "control.thresholds"),
        ({"slo_classes": {"gold": {"e2e": 1}}}, "slo_classes.gold.e2e"),
        ({"slo_classes": {"gold": {"e2e_s": "1"}}}, "slo_classes.gold.e2e_s"),
        ({"trust_slo_headers": 1}, "trust_slo_headers"),
        ({"cache_mode": "full"}, "cache_mode"),
        ({"default_slo_class": "gold"}, "default_slo_class"),
        ({"instances": 0}, "instances"),
        ({"control": {"margin": 0.0}}, "control.margin"),
        ({"control": {"queue_limit": 0}}, "control.queue_limit"),
        ({"control": {"queue": "fcfs", "infeasible": "preempt"}}, "control.infeasible"),
        ({"control": {"tbt_s": 0}}, "control.tbt_s"),
        ({"control": {"predict_every_tokens": 0}}, "control.predict_every_tokens"),
        ({"control": {"predict_every_tokens": 1.5}}, "control.predict_every_tokens"),
        ({"control": {"threshold": 0.9}}, "control.threshold"),
        ({"control": {"threshold": {"use": 3}}}, "control.threshold.use"),
        ({"slo_classes": {"gold": {"e2e_s": -1}}}, "slo_classes.e2e_s"),
        ({"slo_classes": {"gold": {"weight": 0}}}, "slo_classes.weight"),
    ],
)
def test_a_bad_table_names_the_key(table, field):
    with pytest.raises(FieldError) as error:
        from_table(ServeConfig, table)
    assert error.value.field == field


@pytest.mark.parametrize(("preferred", "floor"), [(0.0, 0.0), (1.1, 0.5), (0.5, 0.6), (0.5, 0.0)])
def test_threshold_bounds_are_checked(preferred, floor):
    with pytest.raises(FieldError):
        ThresholdBounds(preferred, floor)


@pytest.mark.parametrize(
    ("table", "choice"),
    [
        ("fixed", Choice("fixed")),
        ({"use": "fixed"}, Choice("fixed")),
        ({"use": "early_fit", "margin": 0.8}, Choice("early_fit", {"margin": 0.8})),
        ({"margin": 0.8}, Choice("", {"margin": 0.8})),
        ("my.module:Mine", Choice("my.module:Mine")),
    ],
)
def test_a_part_is_chosen_by_a_name_or_a_table(table, choice):
    config = from_table(ControlConfig, {"threshold": table})
    assert config.threshold == choice
    assert from_table(ControlConfig, as_table(config)) == config


@pytest.mark.parametrize(
    ("table", "choice"),
    [
        ({"margin": 0.5}, Choice("early_fit", {"early_margin": 0.6, "margin": 0.5})),
        ("early_fit", Choice("early_fit", {"early_margin": 0.6})),
        ({"use": "deadline_fit", "margin": 0.5}, Choice("deadline_fit", {"margin": 0.5})),
        ("fixed", Choice("fixed")),
    ],
)
def test_a_table_laid_over_another_keeps_the_options_of_the_same_part(table, choice):
    base = ControlConfig(threshold=Choice("early_fit", {"early_margin": 0.6}), margin=0.7)
    config = from_table(ControlConfig, {"threshold": table}, base=base)
    assert config.threshold == choice
    assert config.margin == 0.7
