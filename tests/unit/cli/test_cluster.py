"""``stepserve cluster`` against the operator's API of a scripted cluster."""

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from stepserve.cli import cluster, main
from stepserve.core.errors import FieldError, StepserveError
from stepserve.gateway.errors import install_error_handlers
from stepserve.gateway.operator import add_operator

INSTANCE = {"id": "node0-gpu0", "state": "up", "tp_degree": 1, "node": 0, "gpus": [0]}
INSTANCE |= {"running": 3, "max_running": 32, "pages": 64, "pages_free": 10}


class Scripted:
    def __init__(self):
        self.asked, self.restarts = [], 0

    def state(self):
        counts = {"running": 3, "waiting": 1, "losses": 0, "changing": bool(self.asked)}
        counts |= {"scheduler_restarts": self.restarts, "recovering": bool(self.restarts)}
        return counts | {"instances": [INSTANCE]}

    def change(self, layout):
        if sum(layout) > 2:
            raise FieldError("layout", "does not fit")
        if self.asked:
            raise StepserveError("the layout is being changed already")
        self.asked.append(layout)

    def restart_scheduler(self):
        self.restarts += 1

    def drain(self, name):
        if name != INSTANCE["id"]:
            raise KeyError(name)
        self.asked.append(name)


@pytest.fixture
def operator(monkeypatch):
    operator, app = Scripted(), FastAPI()
    install_error_handlers(app)
    add_operator(app, operator)
    monkeypatch.setattr(httpx, "Client", lambda **_: TestClient(app))
    return operator


def test_the_state_is_a_line_per_instance(operator, capsys):
    assert main.main(["cluster"]) == 0
    told, _, row = capsys.readouterr().out.splitlines()
    assert told == "3 running, 1 waiting, 0 losses"
    assert row.split() == ["node0-gpu0", "up", "1", "3", "of", "32", "10", "of", "64"]


def test_a_layout_and_a_drain_are_asked_for(operator, capsys):
    assert main.main(["cluster", "--layout", "1,1"]) == 0
    assert "layout changing" in capsys.readouterr().out
    assert main.main(["cluster", "--drain", "node0-gpu0"]) == 0
    assert operator.asked == [[1, 1], "node0-gpu0"]


def test_a_new_scheduler_is_asked_for(operator, capsys):
    assert main.main(["cluster", "--restart-scheduler"]) == 0
    told = capsys.readouterr().out.splitlines()[0]
    assert told.endswith("scheduler restarted 1 times, asking instances what they hold")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--layout", "two"], 2, "layout: 'two' is not like 2,1,1"),
        (["--layout", "2,1"], 1, "layout: does not fit"),
        (["--drain", "nobody"], 1, "there is no instance 'nobody'"),
    ],
)
def test_what_is_refused_is_said_in_one_line(operator, capsys, words, status, said):
    assert main.main(["cluster", *words]) == status
    assert capsys.readouterr().err == f"stepserve cluster: {said}\n"


def test_a_server_without_the_api_says_how_to_get_it(monkeypatch, capsys):
    app = FastAPI()
    install_error_handlers(app)
    monkeypatch.setattr(httpx, "Client", lambda **_: TestClient(app))
    assert main.main(["cluster"]) == 1
    assert "serve with --operator-api" in capsys.readouterr().err
    assert cluster.degrees("2,1,1") == [2, 1, 1]
