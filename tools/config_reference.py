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

from stepserve.core.bounds import bounds
from stepserve.core.config import Choice, ControlConfig, ServeConfig, SLOClass
from stepserve.families.assemble import FAMILIES
from stepserve.families.registry import BUILT_IN, load

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

`tools/config_reference.py --write` makes this page from the code, and a test fails where it is
stale. The keys are those of the TOML file that `stepserve serve --config FILE` reads. An unknown
key is an error that names it. [operations.md](operations.md) says what the keys are for.

A *part* is anything that the file names: a policy, an engine, a planner or a forecast. A string
names a part. A table names it with `use`, and gives its options beside:

```toml
max_running_requests = 16
predictor = "mean"                      # a name of this page
engine = "my_package.engine:MyEngine"   # or package.module:Class

[control.threshold]
use = "deadline_fit"
margin = 0.9
```

A table without `use` changes options of the default part. A key that has no effect on the model's
family is an error when the server starts. Words that are ours are in the
[vocabulary](vocabulary.md); names such as *DiLaServe B5* lead to [papers.md](papers.md).
"""

KINDS = {"forecast": "predictor", "engine": "engine"}
"""Kinds of parts that a server's own table names; all others are keys of ``control``."""


def comments(cls: type[Any]) -> dict[str, str]:
    """What the comment behind each field says."""
    sources = "".join(inspect.getsource(c) for c in cls.__mro__ if dataclasses.is_dataclass(c))
    return dict(re.findall(r"^ +(\w+): [^#\n]*# (.+)$", sources, re.MULTILINE))


def shown(value: Any) -> str:
    """A default as it stands in TOML."""
    if isinstance(value, Choice):
        return f'`"{value.use}"`'
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return "see below"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value!r}`".replace("'", '"')


def documentation(cls: type[Any]) -> str:
    """A class's docstring, after those of the classes it extends, as paragraphs of Markdown."""
    texts = [c.__doc__ for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c) and c.__doc__]
    return re.sub(r"``(.+?)``", r"`\1`", "\n\n".join(inspect.cleandoc(text) for text in texts))


def table(cls: Any) -> Iterator[str]:
    """The keys of a configuration class."""
    said, fields = comments(cls), dataclasses.fields(cls)
    if not fields:
        return
    limits = bounds(cls)
    heads = ["key", "default", *["must be"] * bool(limits), *[""] * bool(said)]
    yield f"| {' | '.join(heads)} |".replace("  ", " ")
    yield f"|{'---|' * len(heads)}"
    for field in fields:
        default = getattr(cls(), field.name)
        by_family = "Choice" in str(field.type) and default is None
        cells = [f"`{field.name}`", "by family, see below" if by_family else shown(default)]
        if limits:
            cells.append(limits[field.name].text if field.name in limits else "")
        cells += [said.get(field.name, "")] if said else []
        yield f"| {' | '.join(cells)} |"
    yield ""


def first_paragraph(cls: type[Any], alone: bool) -> str:
    """What a part's module says first; its class, if it is not the module's only one."""
    module = sys.modules[cls.__module__]
    text = ast.get_docstring(ast.parse(inspect.getsource(module))) if alone else cls.__doc__
    return re.sub(r"``(.+?)``", r"`\1`", " ".join((text or "").split("\n\n")[0].split()))


def parts() -> Iterator[str]:
    """Every built-in part, kind by kind."""
    for kind, names in BUILT_IN.items():
        yield f"## `{KINDS.get(kind, f'control.{kind}')}`\n"
        used = [(f, f.defaults[kind].use) for f in FAMILIES.values() if kind in f.defaults]
        if used:
            yield "By default: " + ", ".join(f"`{use}` ({f.name})" for f, use in used) + ".\n"
        modules = [path.partition(":")[0] for path in names.values()]
        for name in names:
            cls = load(kind, name)
            if cls is None:
                yield f"### `{name}`\n\nNothing does this.\n"
                continue
            yield f"### `{name}`\n\n{first_paragraph(cls, modules.count(cls.__module__) == 1)}\n"
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
