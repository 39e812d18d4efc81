"""The how-to pages' policy and experiment files are accepted."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from stepserve.core.config import Choice, ControlConfig, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.protocols import Parts
from stepserve.families.programs.diffusion import DiffusionProgram
from stepserve.families.registry import build
from stepserve.gateway.tenants import Tenant, read_tenants
from stepserve.sim.experiment import read_experiments, read_table
from stepserve.tables import from_table

DOCS = Path(__file__).parents[2] / "docs"
POLICY, TRACE, TENANTS = (
    (DOCS / f"howto-{name}.md").read_text() for name in ("policy", "simulate-own-trace", "tenants")
)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (source,) = blocks(POLICY, "python")
    (tmp_path / "low_early.py").write_text(source)
    table, trace = blocks(TRACE, "")[:2]
    (tmp_path / "requests.csv").write_text(table)
    (tmp_path / "trace.jsonl").write_text(trace)
    return tmp_path


def test_the_policy_is_made_from_its_table(written):
    table = tomllib.loads(blocks(POLICY, "toml")[1])
    control = from_table(ControlConfig, table["control"])
    parts = Parts(DiffusionProgram(), cost=None)
    assert build("threshold", control.threshold, parts)._early == 0.5
    with pytest.raises(FieldError, match=r"control.threshold.early: must be in \(0, 1\]"):
        build("threshold", Choice("low_early:LowEarly", {"early": 2.0}), parts)


@pytest.mark.parametrize("text", [blocks(POLICY, "toml")[0], *blocks(TRACE, "toml")])
def test_experiment_files_are_read(written, text):
    (written / "experiment.toml").write_text(text)
    (experiment,) = read_experiments(
        read_table(written / "experiment.toml", quick=False, changes=())
    )
    assert experiment.systems


@pytest.mark.parametrize("text", blocks(TENANTS, "toml"))
def test_tenants_files_are_read(tmp_path, text):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    assert "acme" in read_tenants(path, ServeConfig().slo_classes).tenants


def test_every_key_of_a_tenant_is_explained():
    (table,) = re.findall(r"^\| key \|.*?\n\n", TENANTS, flags=re.M | re.S)
    named = set(re.findall(r"`(\w+)`", "".join(r.split("|")[1] for r in table.split("\n") if r)))
    assert named == {field.name for field in dataclasses.fields(Tenant)} - {"name"}
