"""Where the configuration of ``stepserve serve`` comes from."""

import argparse
import subprocess
import sys

import pytest

from stepserve.cli import serve
from stepserve.cli.main import main
from stepserve.core.config import Choice
from stepserve.core.errors import FieldError
from stepserve.engine.hub import BUNDLED
from stepserve.live.deploy import model_card
from stepserve.live.instance_factory import make_engine


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


def test_a_model_is_served_under_the_name_that_is_given():
    for words, name in (((), "stepserve-bundled"), (("--served-model-name", "mine"), "mine")):
        config = configured(*words)
        assert model_card(config, make_engine(config).facts).id == name


@pytest.mark.parametrize("option", ["--events", "--log-steps", "--keep-profile"])
@pytest.mark.parametrize(("path", "said"), [("no/run.gz", "no folder no"), (".", "is a folder")])
def test_what_is_written_is_checked_before_anything_is_started(
    tmp_path, monkeypatch, capsys, option, path, said
):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--port", "0", option, path]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stepserve serve: {option[2:].replace('-', '_')}: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("cluster", "name"), [("local", "tokenizer.json"), ("threads", "tokenizer_config.json")]
)
def test_a_tokenizer_is_read_before_the_model_is(tmp_path, cluster, name):
    for file in BUNDLED.iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    words = ["serve", "--port", "0", "--cluster", cluster, "--model", str(tmp_path)]
    command = [sys.executable, "-m", "stepserve", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"stepserve serve: model: cannot read {tmp_path / name}: ")
