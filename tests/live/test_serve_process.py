"""The served bundled model as a user meets it: one process, the official client."""

import json
import random
import signal
import socket
import subprocess
import sys

import httpx
import openai
import pytest

from stepserve.cli.main import main
from stepserve.engine.bundled.tasks import correct, sample


def start_server(*options):
    """A server process that is ready: it says so on its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stepserve.cli.main", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "serving stepserve-bundled at" in line or "serving mine at" in line:
            return process, f"http://127.0.0.1:{port}"
    raise AssertionError(f"the server ended with {process.wait()} before it was ready")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    events = tmp_path_factory.mktemp("served") / "events.jsonl.gz"
    process, address = start_server("--events", str(events))
    yield address
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stderr.close()
    assert main(["replay", str(events)]) == 0, "what was served can be replayed"


def ask(client, problem, **options):
    """Stream one chat completion; its text, its chunks' reasons and its last chunk."""
    stream = client.chat.completions.create(
        model="stepserve-bundled",
        messages=[{"role": "user", "content": problem.prompt}],
        stream=True,
        **options,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, [c.choices[0].finish_reason for c in chunks if c.choices], chunks[-1]


def test_streamed_answers_to_generated_problems_are_right(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    rng = random.Random("serve")
    problems = [sample(rng, evaluation=True) for _ in range(12)]
    right = 0
    for problem in problems:
        text, reasons, _ = ask(client, problem)
        assert [r for r in reasons if r] == ["stop"]
        assert text == text.strip()
        right += correct(problem, text)
    assert right >= 9, f"{right} of 12 right; about 11 are expected"


def test_the_deadline_decides_the_threshold(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    problem = sample(random.Random("deadline"), evaluation=True)
    means = []
    for e2e_ms in (60_000, 1):
        _, _, last = ask(client, problem, extra_body={"slo": {"e2e_ms": e2e_ms}})
        means.append(last.model_extra["dlm"]["threshold_mean"])
    assert means == [pytest.approx(0.9), pytest.approx(0.5)]


def test_metrics_count_what_was_served(url):
    body = httpx.get(f"{url}/metrics").text
    assert 'vllm:request_success_total{finished_reason="stop"' in body
    assert 'stepserve:instances{model_name="stepserve-bundled",tp_degree="1"} 2.0' in body


def test_sigterm_finishes_what_was_accepted_and_takes_nothing_new():
    process, address = start_server("--instances", "1", "--served-model-name", "mine")
    body = {
        "model": "mine",
        "prompt": "Sort up: 5, 3, 8.",
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
        "dlm": {"confidence_threshold": 1.0, "min_confidence_threshold": 1.0},
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert (last["model"], last["usage"]["completion_tokens"]) == ("mine", 200)
    assert process.wait(60) == 0
    process.stderr.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "nowhere"), "model: no config.json in nowhere"),
        (("--device", "cuda:99"), "device: 'cuda:99' cannot be used"),
        (("--threshold-policy", "0.8"), "control.threshold: unknown '0.8'"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(options, message):
    command = [sys.executable, "-m", "stepserve.cli.main", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named_at_start():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "stepserve.cli.main", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"port: 127.0.0.1:{port} cannot be used" in done.stderr
