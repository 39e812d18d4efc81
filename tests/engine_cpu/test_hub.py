"""Models by their names on the hub, with the hub's own client replaced by a scripted one."""

from types import SimpleNamespace

import pytest

from stepserve.core.errors import FieldError
from stepserve.engine import hub
from stepserve.engine.hub import BUNDLED, model_folder


@pytest.fixture
def client(monkeypatch):
    """A client that gives what ``give`` says, and what it was asked for."""
    asked = []

    def install(give):
        def snapshot_download(name, allow_patterns):
            asked.append((name, allow_patterns))
            return give()

        scripted = SimpleNamespace(snapshot_download=snapshot_download)
        monkeypatch.setattr(hub, "huggingface_hub", scripted)
        hub.snapshot.cache_clear()
        return asked

    yield install
    hub.snapshot.cache_clear()


def test_a_name_is_fetched_once_and_without_code(client, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    asked = client(lambda: str(tmp_path))
    assert model_folder("JetLM/SDAR-1.7B-Chat") == model_folder("JetLM/SDAR-1.7B-Chat") == tmp_path
    ((name, patterns),) = asked
    assert name == "JetLM/SDAR-1.7B-Chat"
    assert not any(pattern.endswith((".py", "*")) for pattern in patterns)


def test_folders_and_the_bundled_model_need_no_hub(client, tmp_path, monkeypatch):
    asked = client(lambda: pytest.fail("asked"))
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert model_folder("org/model").name == "model"
    assert model_folder("bundled") == BUNDLED
    with pytest.raises(FieldError, match=r"no config\.json in nothing"):
        model_folder("nothing")
    with pytest.raises(FieldError, match=r"no config\.json"):
        model_folder("/models/nothing")
    assert asked == []


@pytest.mark.parametrize("error", [ConnectionError("offline\n  mode"), ValueError("bad name")])
def test_what_the_hub_says_is_passed_on_in_one_line(client, error):
    def refuse():
        raise error

    client(refuse)
    with pytest.raises(FieldError, match=r"org/name, .*: (offline mode|bad name)$"):
        model_folder("org/name")
