"""The table of options of autoregressive models has them all, with the defaults they have."""

import dataclasses
import re
import tomllib
from pathlib import Path

from stepserve.core.config import TokenConfig

TEXT = (Path(__file__).parent.parent.parent / "docs" / "operations.md").read_text()


def test_every_key_of_control_tokens_is_documented_with_its_default():
    table = TEXT.split("`[control.tokens]`", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|(?: `?([^|`]*)`? ?)\| \S", table, flags=re.M)
    told = {key: tomllib.loads(f"value = {default}")["value"] for key, default, _ in rows}
    assert told == dataclasses.asdict(TokenConfig())
    published = {key: tomllib.loads(f"value = {paper}")["value"] for key, _, paper in rows if paper}
    assert TokenConfig(**published).budget == "fixed", "what is published can be configured"
