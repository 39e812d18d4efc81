"""Writes docs/configuration.md: every configuration key and its default, from the code.

python tools/config_reference.py --write     # after a change
python tools/config_reference.py --check     # exits with 1 if the page is old
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepserve.core.config import Choice, ControlConfig, ServeConfig, SLOClass
from stepserve.families.assemble import FAMILIES
from stepserve.families.registry import BUILT_IN, load

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

`tools/config_reference.py` makes this page from the code, so it is complete. Keys are those of a
file in TOML, for `stepserve serve --config FILE`. An unknown key is an error that names it.

A part (a policy, an engine, a planner, a forecast) is named by a string, or by a table with its
options:

```toml
max_running_requests = 16
predictor = "mean"

[control.threshold]
use = "deadline_fit"           # or package.module:Class, or a name that your package registers
margin = 0.9
```

A table without `use` changes options of the default. An option that means nothing to the model's
family is an error.
"""

KINDS = {"forecast": "predictor", "engine": "engine"}
"""Kinds of parts that a server's own table names; all others are keys of ``control``."""


def comments(cls: type[Any]) -> dict[str, str]:
    """What the comment behind each field says."""
    found = re.findall(r"^    (\w+): [^#\n]*# (.+)$", inspect.getsource(cls), re.MULTILINE)
    return dict(found)


def shown(value: Any) -> str:
    """A default as it stands in TOML."""
    if isinstance(value, Choice):
        return f'`"{value.use}"`'
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return "see below"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value!r}`".replace("'", '"')


def documentation(cls: type[Any]) -> str:
    """A class's docstring as paragraphs of Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", inspect.getdoc(cls) or "")


def table(cls: type[Any]) -> Iterator[str]:
    """The keys of a configuration class."""
    said, fields = comments(cls), dataclasses.fields(cls)
    if not fields:
        return
    yield "| key | default | |" if said else "| key | default |"
    yield "|---|---|---|" if said else "|---|---|"
    for field in fields:
        default = getattr(cls(), field.name)
        cells = [f"`{field.name}`", shown(default), *([said.get(field.name, "")] if said else [])]
        yield f"| {' | '.join(cells)} |"
    yield ""


def first_paragraph(cls: type[Any]) -> str:
    """What a part's module says first."""
    module = sys.modules[cls.__module__]
    text = ast.get_docstring(ast.parse(inspect.getsource(module))) or ""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split("\n\n")[0].split()))


def parts() -> Iterator[str]:
    """Every built-in part, kind by kind."""
    for kind, names in BUILT_IN.items():
        yield f"## `{KINDS.get(kind, f'control.{kind}')}`\n"
        used = [(f, f.defaults[kind].use) for f in FAMILIES.values() if kind in f.defaults]
        if used:
            yield "By default: " + ", ".join(f"`{use}` ({f.name})" for f, use in used) + ".\n"
        for name in names:
            cls = load(kind, name)
            if cls is None:
                yield f"### `{name}`\n\nDoing without.\n"
                continue
            yield f"### `{name}`\n\n{first_paragraph(cls)}\n"
            if dataclasses.fields(cls.Options):
                yield documentation(cls.Options) + "\n"
                yield from table(cls.Options)


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## The server\n", *table(ServeConfig)]
    lines += ["## `slo_classes.NAME`\n", documentation(SLOClass) + "\n", *table(SLOClass)]
    lines += ["## `control`\n", documentation(ControlConfig) + "\n", *table(ControlConfig)]
    return "\n".join([*lines, *parts()]).rstrip() + "\n"


def main() -> int:
    """Write or check the page; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true", help="write the page")
    group.add_argument("--check", action="store_true", help="exit with 1 if the page is old")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(page())
        return 0
    fresh = PAGE.is_file() and PAGE.read_text() == page()
    print(
        "docs/configuration.md is what the code says" if fresh else "docs/configuration.md is old"
    )
    return 0 if fresh else 1


if __name__ == "__main__":
    sys.exit(main())
