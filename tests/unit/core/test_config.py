import pytest

from stepserve.core.config import ControlConfig, ServeConfig, SLOClass, from_table
from stepserve.core.errors import FieldError
from stepserve.core.request import ThresholdBounds


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
