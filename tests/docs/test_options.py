"""The table of options of autoregressive models has them all, with the defaults they have."""

import dataclasses
import re
import tomllib
from pathlib import Path

from stepserve.core.config import Choice, ControlConfig, from_table
from stepserve.families.autoregressive import AUTOREGRESSIVE
from stepserve.families.registry import load

TEXT = (Path(__file__).parent.parent.parent / "docs" / "operations.md").read_text()
EVERYBODY = ("tbt_s", "chunk_tokens", "push_pages")


def value(text):
    return tomllib.loads(f"value = {text}")["value"]


def test_every_option_is_documented_with_its_default():
    table = TEXT.split("Options of a policy stand in", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(
        r"^\| `([\w.]+)` \| `?([^|`]+)`? \|(?: `?([^|`]*)`? ?)\| \S", table, flags=re.M
    )
    expected = {name: getattr(ControlConfig(), name) for name in EVERYBODY}
    for kind in ("batching", "placement", "segment_cost"):
        part = load(kind, AUTOREGRESSIVE.defaults[kind].use)
        options = dataclasses.asdict(part.Options())
        expected |= {f"{kind}.{key}": v for key, v in options.items() if v is not None}
    assert {key: value(default) for key, default, _ in rows} == expected
    published = {key: value(paper) for key, _, paper in rows if paper}
    for kind, name in (("batching", "tbt_budget"), ("placement", "tandem_split")):
        options = {k.split(".")[1]: v for k, v in published.items() if k.startswith(kind)}
        control = from_table(ControlConfig, {kind: {"use": name, **options}})
        assert getattr(control, kind) == Choice(name, options)
        from_table(load(kind, name).Options, options)
