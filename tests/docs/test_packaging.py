"""What the package says about itself holds together."""

import importlib.resources
import re
import tomllib
from pathlib import Path

import stepserve
from stepserve.cli.main import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENT = re.compile(r"([\w.-]+)(\[[\w,]+\])?(.*)")


def requirements():
    """By name of a package: the releases that are accepted."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    matches = [REQUIREMENT.fullmatch(line) for group in groups for line in group]
    return {match[1]: match[3] for match in matches if match[1] != "stepserve"}


def test_the_version_is_that_of_the_change_log():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1]
    assert stepserve.__version__.partition(".dev")[0] == newest
    assert PROJECT["dynamic"] == ["version"], "it is written down once"


def test_users_get_ranges_and_development_the_releases_within_them():
    ranges = requirements()
    assert all(re.fullmatch(r">=[\d.]+,<[\d.]+", wanted) for wanted in ranges.values()), ranges
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    pinned = dict(line.split("==") for line in lines)
    assert set(pinned) == set(ranges)
    for name, wanted in ranges.items():
        least, below = (numbers(part.strip("<>=")) for part in wanted.split(","))
        assert least <= numbers(pinned[name]) < below, name


def numbers(version):
    return [int(part) for part in version.split(".")]


def test_every_extra_that_is_proposed_brings_its_package():
    for package, extra in EXTRAS.items():
        lines = PROJECT["optional-dependencies"][extra]
        assert any(line.startswith(package.replace("_", "-") + ">") for line in lines), package


def test_types_are_for_users_too():
    assert importlib.resources.files(stepserve).joinpath("py.typed").is_file()
