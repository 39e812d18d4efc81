"""A served model with tenants, TLS and the operator's port: who reaches what."""

import shutil
import ssl
import subprocess

import httpx
import pytest

from live.test_serve_process import start_server
from stepserve.cli.main import main
from stepserve.core.config import ServeConfig
from stepserve.core.errors import FieldError
from stepserve.gateway.keys import hash_of
from stepserve.live import listening
from stepserve.live.listening import check_tls, listen_for_operator

KEY, OPERATOR_KEY = "sk-acme", "sk-operator"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Of this machine, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    names = folder / "server.pem", folder / "server.key"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    files = ["-out", names[0], "-keyout", names[1]]
    extension = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words.split(), *extension, *files], check=True, capture_output=True)
    return names


@pytest.fixture(scope="module")
def served(certificate, tmp_path_factory):
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(
        f'[tenants.acme]\nkeys = ["{hash_of(KEY)}"]\nclasses = ["batch"]\nweight = 2.0\n'
        f'[operator]\nkeys = ["{hash_of(OPERATOR_KEY)}"]\n'
    )
    events = path.with_name("events.jsonl.gz")
    words = ["--tenants", path, "--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1]]
    words += ["--operator-api", "--events", events, "--instances", "1"]
    process, url = start_server(*map(str, words))
    port = int(url.rpartition(":")[2])
    yield port, ssl.create_default_context(cafile=certificate[0]), path
    process.terminate()
    assert process.wait(60) == 0
    process.stderr.close()
    assert main(["replay", str(events)]) == 0, "weights are in the log's header"


def ask(served, method, path, key=None, operator=False, **options):
    port, context, _ = served
    url = f"https://127.0.0.1:{port + operator}{path}"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(verify=context, timeout=60.0, headers=headers) as client:
        return client.request(method, url, **options)


def test_a_tenant_is_served_over_tls_and_others_are_not(served):
    body = {"prompt": "Sort up: 5, 3, 8.", "max_tokens": 32}
    assert ask(served, "POST", "/v1/completions", json=body).status_code == 401
    reply = ask(served, "POST", "/v1/completions", KEY, json=body)
    assert (reply.status_code, reply.json()["slo"]["class"]) == (200, "batch")
    refused = ask(served, "POST", "/v1/completions", KEY, json=body | {"service_tier": "priority"})
    assert refused.json()["error"]["param"] == "service_tier"
    text = ask(served, "GET", "/metrics", OPERATOR_KEY).text
    labels = 'model_name="stepserve-bundled",outcome="stop",tenant="acme"'
    assert f"stepserve:tenant_requests_total{{{labels}}} 1.0" in text


def test_the_operators_api_is_on_its_own_port_and_takes_its_own_key(served):
    assert ask(served, "GET", "/cluster", OPERATOR_KEY).status_code == 404, "not on the clients'"
    for key in (None, KEY):
        assert ask(served, "GET", "/cluster", key, operator=True).status_code == 401
    reply = ask(served, "GET", "/cluster", OPERATOR_KEY, operator=True)
    assert reply.json()["layout"] == [1]
    assert ask(served, "GET", "/v1/models", KEY, operator=True).status_code == 404


def test_the_command_sends_its_key_from_a_file(served, certificate, monkeypatch, capsys, tmp_path):
    port, *_ = served
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    words = ["cluster", "--url", f"https://127.0.0.1:{port + 1}"]
    assert main(words) == 1
    assert "no API key" in capsys.readouterr().err
    key = tmp_path / "key"
    key.write_text(f"{OPERATOR_KEY}\n")
    assert main([*words, "--key-file", str(key)]) == 0
    monkeypatch.setenv("STEPSERVE_OPERATOR_KEY", OPERATOR_KEY)
    assert main(words) == 0
    assert main([*words, "--key-file", str(tmp_path / "nowhere")]) == 2


def test_a_certificate_that_cannot_be_used_is_named_before_anything_is_loaded(
    certificate, tmp_path
):
    check_tls(ServeConfig())
    check_tls(ServeConfig(ssl_certfile=str(certificate[0]), ssl_keyfile=str(certificate[1])))
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for options, field in [
        ({"ssl_certfile": "nowhere.pem"}, "ssl_certfile"),
        ({"ssl_certfile": str(certificate[0]), "ssl_keyfile": "nowhere.key"}, "ssl_keyfile"),
        ({"ssl_certfile": str(broken)}, "ssl_certfile"),
        ({"ssl_certfile": str(certificate[0])}, "ssl_certfile"),
    ]:
        with pytest.raises(FieldError) as error:
            check_tls(ServeConfig(**options))
        assert error.value.field == field


def test_the_operators_port_is_taken_only_where_it_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(listening, "listen", lambda c: asked.append((c.host, c.port)))
    assert listen_for_operator(ServeConfig(port=9000)) is None
    listen_for_operator(ServeConfig(port=9000, operator_api=True))
    listen_for_operator(ServeConfig(port=0, operator_api=True))
    listen_for_operator(ServeConfig(operator_port=7, operator_api=True))
    assert asked == [("127.0.0.1", 9001), ("127.0.0.1", 0), ("127.0.0.1", 7)]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"operator_port": 9001}, "operator_port"),
        ({"operator_port": 70000, "operator_api": True}, "operator_port"),
        ({"operator_api": True, "operator_host": "0.0.0.0"}, "operator_host"),
        ({"ssl_keyfile": "x"}, "ssl_certfile"),
    ],
)
def test_options_that_would_be_unsafe_or_without_effect_are_refused(options, field):
    config = ServeConfig(**options)
    with pytest.raises(FieldError) as error:
        check_tls(config) or listen_for_operator(config)
    assert error.value.field == field
