"""The page of configuration keys is what the code says, and its published settings exist."""

import importlib.util
import tomllib
from pathlib import Path

from stepserve.core.config import ControlConfig
from stepserve.families.registry import BUILT_IN, chosen
from stepserve.tables import from_table

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/config_reference.py"
spec = importlib.util.spec_from_file_location("config_reference", SCRIPT)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


def test_the_page_is_what_the_code_says():
    fresh = reference.page()
    assert reference.PAGE.read_text() == fresh, "python tools/config_reference.py --write"
    for names in BUILT_IN.values():
        assert all(f"### `{name}`\n" in fresh for name in names)


def test_the_published_settings_of_micro_requests_can_be_configured():
    text = (ROOT / "docs/micro-requests.md").read_text()
    (block,) = text.split("## The published settings")[1].split("```toml\n")[1:]
    control = from_table(ControlConfig, tomllib.loads(block.split("```")[0])["control"])
    assert (control.batching.use, control.placement.use) == ("tbt_budget", "tandem_split")
    assert control.placement.options["gain"] == 0.05
    for kind in ("batching", "placement"):
        chosen(kind, getattr(control, kind))
