"""Where the configuration of ``stepserve serve`` comes from."""

import argparse

import pytest

from stepserve.cli import serve
from stepserve.cli.main import main
from stepserve.core.config import Choice
from stepserve.core.errors import FieldError


def configured(*words):
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.configuration(parser.parse_args(["serve", *words]))


def test_options_override_the_file_and_the_file_the_defaults(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text('port = 9000\ninstances = 3\n[control]\nthreshold = "fixed"\nmargin = 0.8\n')
    config = configured("--config", str(path), "--port", "9001", "--batching-policy", "all_running")
    assert (config.port, config.instances) == (9001, 3)
    assert config.control.threshold == Choice("fixed")
    assert (config.control.batching, config.control.margin) == (Choice("all_running"), 0.8)


def test_planning_and_logs_are_options():
    words = ["--planner", "greedy", "--plan-every", "20", "--events", "e.gz", "--log-steps", "s.gz"]
    config = configured(*words, "--predictor", "mean", "--migration", "none")
    assert (config.control.planner, config.control.plan_every_s) == (Choice("greedy"), 20.0)
    assert (config.events, config.log_steps, config.predictor.use) == ("e.gz", "s.gz", "mean")
    assert config.control.migration == Choice("none")
    assert not configured().control.plans


def test_what_the_gateway_is_told(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text('cors_origins = ["https://a.example"]\nstrict_limits = true\n')
    config = configured("--config", str(path), "--log-format", "json")
    assert (config.cors_origins, config.strict_limits) == (("https://a.example",), True)
    assert config.log_format == "json"
    with pytest.raises(FieldError, match="log_format"):
        configured("--log-format", "xml")


def test_a_layout_is_a_list_of_degrees():
    assert configured("--instances", "3").degrees == (1, 1, 1)
    assert configured("--layout", "2, 1,4", "--instances", "9").degrees == (2, 1, 4)
    for wrong in ("2,", "0", "-1", "two"):
        with pytest.raises(FieldError, match=r"layout: .* is not a list of degrees"):
            configured(f"--layout={wrong}")


@pytest.mark.parametrize(
    ("text", "field"),
    [("prot = 1", "prot"), ("port = ", "config"), ("[control]\nmargin = 2.0", "control.margin")],
)
def test_a_bad_file_names_the_field(tmp_path, text, field):
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(FieldError) as error:
        configured("--config", str(path))
    assert error.value.field == field


def test_a_missing_file_is_one_line_and_status_2(capsys):
    assert main(["serve", "--config", "nowhere.toml"]) == 2
    assert capsys.readouterr().err.startswith("stepserve serve: config: cannot read nowhere.toml")
