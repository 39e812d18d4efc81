import io

import pytest

from stepserve.cli.chat import cost_line
from stepserve.cli.client import Reply


def test_one_question(stepserve, fake_server, capsys):
    status = stepserve("chat", "Who?", "--deadline-ms", "500", "--threshold", "0.8")
    assert status == 0
    out, err = capsys.readouterr()
    assert out == "Hello.\n"
    assert err == (
        "[900 ms, first text 900 ms, 5 tokens, 8 forwards, mean threshold 0.90, slack 12 ms]\n"
    )
    (body,) = fake_server.bodies
    assert (body["slo"], body["dlm"]) == ({"e2e_ms": 500.0}, {"confidence_threshold": 0.8})


def test_only_standard_fields_unless_asked(stepserve, fake_server):
    assert stepserve("chat", "Who?") == 0
    assert set(fake_server.bodies[0]) == {"model", "messages", "stream", "stream_options"}


def test_a_conversation_remembers_and_ends_with_an_empty_line(
    stepserve, fake_server, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO("One\nTwo\n\nThree\n"))
    assert stepserve("chat") == 0
    assert [m["content"] for m in fake_server.bodies[-1]["messages"]] == ["One", "Hello.", "Two"]
    assert capsys.readouterr().out == "Hello.\nHello.\n"


def test_a_refusal_is_an_error(stepserve, fake_server, capsys):
    fake_server.status = 429
    assert stepserve("chat", "Who?") == 1
    assert "stepserve chat: rejected: HTTP 429: no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "question", "said"),
    [
        ("stepserve-bundled", "What is the capital of France?", True),
        ("stepserve-bundled", "Sort up: 5, 3, 8.", False),
        ("another", "What is the capital of France?", False),
    ],
)
def test_a_question_outside_of_the_bundled_models_tasks(stepserve, capsys, name, question, said):
    assert stepserve("chat", question, "--model", name) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("four tasks" in line for line in lines) is said
    assert len(lines) == 1 + said


def test_an_empty_answer_is_called_so(stepserve, fake_server, capsys):
    fake_server.answers = dict.fromkeys(["Sort up: 5, 3, 8.", "Who?"], "")
    for name, question in (("stepserve-bundled", "Sort up: 5, 3, 8."), ("renamed", "Who?")):
        assert stepserve("chat", question, "--model", name) == 0
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("[the answer is empty")
        assert "four tasks" in last


def test_a_conversation_with_the_bundled_model_begins_with_its_tasks(
    stepserve, fake_server, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO("Sort up: 5, 3, 8.\n"))
    assert stepserve("chat", "--model", "stepserve-bundled") == 0
    lines = capsys.readouterr().err.splitlines()
    assert "four tasks" in lines[0]
    assert len(lines) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert stepserve("chat", "--model", "another") == 0
    assert capsys.readouterr().err == ""


def test_the_cost_of_a_foreign_answer_is_its_time():
    assert cost_line(Reply(sent_s=1.0, ended_s=1.5)) == "[500 ms]"
