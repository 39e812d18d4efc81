"""Keys, what tenants may ask for, their limits, and a file that changes while serving."""

import asyncio
import os
from dataclasses import replace

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scripted import Gateway, RawCall, byte_ids, until
from stepserve.cli.main import main
from stepserve.core.config import ControlConfig, ServeConfig
from stepserve.core.errors import FieldError
from stepserve.core.frontend import RequestRejected
from stepserve.core.request import Family, Request
from stepserve.gateway.errors import APIError
from stepserve.gateway.keys import KeyRing, bearer, hash_of, new_key
from stepserve.gateway.limits import Limits
from stepserve.gateway.tenants import LOOK_EVERY_S, Tenant, Tenants, read_tenants, with_weights

HELLO = [byte_ids("hello")]
CLASSES = ServeConfig().slo_classes
SAME = f'keys = ["{hash_of("x")}"]'
KEY, OTHER_KEY, OPERATOR_KEY = "sk-acme", "sk-bolt", "sk-operator"


def written(path, acme="", bolt=""):
    path.write_text(
        f'[tenants.acme]\nkeys = ["{hash_of(KEY)}"]\n{acme}\n'
        f'[tenants.bolt]\nkeys = ["{hash_of(OTHER_KEY)}"]\n{bolt}\n'
        f'[operator]\nkeys = ["{hash_of(OPERATOR_KEY)}"]\n'
    )
    return path


class TenantGateway(Gateway):
    """A gateway with a tenants file; ``acme``: lines of that tenant's table."""

    def __init__(self, folder, acme="", script=HELLO, **config):
        path = written(folder / "tenants.toml", acme)
        super().__init__(script, ServeConfig(tenants=str(path), **config))

    def http(self, key=KEY):
        client = super().http()
        if key is not None:
            client.headers["authorization"] = f"Bearer {key}"
        return client

    async def ask(self, key=KEY, headers=None, **body):
        async with self.http(key) as client:
            body = {"prompt": "ab", **body}
            return await client.post("/v1/completions", json=body, headers=headers)


# -- who is there


@pytest.mark.parametrize("key", [None, "sk-nobody", "", "é".encode()])
async def test_without_a_known_key_nothing_is_served(tmp_path, key):
    gateway = TenantGateway(tmp_path)
    async with Gateway.http(gateway) as client:
        headers = {} if key is None else {"authorization": b"Bearer " + _bytes(key)}
        reply = await client.post("/v1/completions", json={"prompt": "ab"}, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (401, "invalid_api_key")
    assert error.keys() == {"message", "type", "param", "code"}
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "x-request-id" in reply.headers
    assert not gateway.frontend.submitted


def _bytes(key):
    return key if isinstance(key, bytes) else key.encode()


async def test_a_request_is_its_tenants(tmp_path):
    gateway = TenantGateway(tmp_path)
    assert (await gateway.ask()).status_code == 200
    assert (await gateway.ask(OTHER_KEY)).status_code == 200
    assert [r.tenant for r, _ in gateway.frontend.submitted] == ["acme", "bolt"]


async def test_without_a_file_there_is_one_tenant_that_may_do_anything():
    gateway = Gateway(HELLO)
    assert (await gateway.complete()).status_code == 200
    ((request, _),) = gateway.frontend.submitted
    assert request.tenant == "default"


async def test_the_official_client_says_what_is_wrong(tmp_path):
    gateway = TenantGateway(tmp_path, 'classes = ["batch"]')
    client = openai.AsyncOpenAI(
        api_key=KEY, base_url="http://gateway/v1", http_client=gateway.http(None), max_retries=0
    )
    with pytest.raises(openai.PermissionDeniedError):
        await client.completions.create(
            model="tiny", prompt="ab", extra_body={"service_tier": "priority"}
        )
    client.api_key = "sk-nobody"
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/health", None, 200),
        ("/ready", None, 200),
        ("/version", None, 200),
        ("/v1/models", None, 401),
        ("/v1/models", KEY, 200),
        ("/metrics", None, 401),
        ("/metrics", KEY, 401),
        ("/metrics", OPERATOR_KEY, 200),
        ("/v1/models", OPERATOR_KEY, 401),
        ("/openapi.json", None, 401),
    ],
)
async def test_what_takes_which_key(tmp_path, path, key, status):
    async with TenantGateway(tmp_path).http(key) as client:
        assert (await client.get(path)).status_code == status


async def test_a_browser_asks_without_a_key_whether_it_may_call(tmp_path):
    gateway = TenantGateway(tmp_path, cors_origins=("https://app.example",))
    origin = {"origin": "https://app.example"}
    asked = {"access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization"
    async with gateway.http(None) as client:
        reply = await client.options("/v1/completions", headers=origin | asked)
        assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (200, True)
        reply = await client.post("/v1/completions", json={"prompt": "ab"}, headers=origin)
        assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (401, True)
        assert (await client.head("/v1/models")).status_code == 401


# -- what it may ask for


@pytest.mark.parametrize(
    ("acme", "body", "param"),
    [
        ('classes = ["batch"]', {"slo": {"class": "interactive"}}, "slo.class"),
        ('classes = ["batch"]', {"service_tier": "priority"}, "service_tier"),
        ("e2e_ms = 2000", {"slo": {"e2e_ms": 1999}}, "slo.e2e_ms"),
        ("e2e_ms = 2000", {"slo": {"ttlt_ms": 1999}}, "slo.e2e_ms"),
        ("e2e_ms = 2000", {"slo": {"deadline_unix_ms": 1_001_000}}, "slo.e2e_ms"),
        ("ttft_ms = 100", {"slo": {"ttft_ms": 99}}, "slo.ttft_ms"),
        ("tbt_ms = 200", {"slo": {"tbt_ms": 150}}, "slo.tbt_ms"),
        ("tokens_in_flight = 40", {"max_tokens": 48}, "max_tokens"),
        ("tokens_per_minute = 40", {"max_tokens": 48}, "max_tokens"),
        ("requests_in_flight = 1", {"n": 2, "temperature": 1}, "n"),
    ],
)
async def test_what_is_not_allowed_is_403_and_names_the_field(tmp_path, acme, body, param):
    gateway = TenantGateway(tmp_path, acme)
    reply = await gateway.ask(**body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (403, param, "not_allowed")
    assert gateway.observer.limits == [("acme", "not_allowed")]
    assert not gateway.frontend.submitted
    assert (await gateway.ask(OTHER_KEY, **body)).status_code == 200, "another tenant may"


async def test_a_header_gains_nothing_either(tmp_path):
    gateway = TenantGateway(tmp_path, 'e2e_ms = 2000\nclasses = ["standard"]')
    assert (await gateway.ask(headers={"x-slo-e2e-ms": "500"})).status_code == 403
    assert (await gateway.ask(headers={"x-slo-class": "interactive"})).status_code == 403
    assert (await gateway.ask(headers={"x-slo-e2e-ms": "2000"})).status_code == 200


async def test_what_a_class_fills_in_is_allowed_with_the_class(tmp_path):
    gateway = TenantGateway(tmp_path, "e2e_ms = 9000")
    assert (await gateway.ask(slo={"class": "interactive"})).status_code == 200
    assert (await gateway.ask(slo={"class": "interactive", "e2e_ms": 5000})).status_code == 403


async def test_a_tenant_without_the_default_class_gets_its_first(tmp_path):
    gateway = TenantGateway(tmp_path, 'classes = ["batch", "interactive"]')
    assert (await gateway.ask()).status_code == 200
    assert (await gateway.ask(slo={"e2e_ms": 70_000})).status_code == 200
    assert {r.slo.slo_class for r, _ in gateway.frontend.submitted} == {"batch"}
    assert gateway.frontend.submitted[1][0].slo.e2e_s == 70.0


# -- how much


async def test_requests_in_flight_are_bounded_and_counted_down(tmp_path):
    gate = asyncio.Event()
    gateway = TenantGateway(tmp_path, "requests_in_flight = 2", [byte_ids("a"), gate])
    first = [asyncio.create_task(gateway.ask()) for _ in range(2)]
    await until(lambda: len(gateway.frontend.submitted) == 2)
    reply = await gateway.ask()
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert reply.headers["x-should-retry"] == "true"
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert reply.json()["error"]["message"] == "requests_in_flight: 2 of 2 are in flight"
    assert gateway.observer.limits == [("acme", "requests_in_flight")]
    gate.set()
    assert [(await task).status_code for task in first] == [200, 200]
    assert (await gateway.ask()).status_code == 200


async def test_a_client_that_hangs_up_is_counted_down(tmp_path):
    gateway = TenantGateway(tmp_path, "requests_in_flight = 1", [byte_ids("a"), asyncio.Event()])
    app = gateway.app

    async def keyed(scope, receive, send):
        scope["headers"] = [*scope["headers"], (b"authorization", f"Bearer {KEY}".encode())]
        await app(scope, receive, send)

    for _ in range(3):
        call = RawCall(keyed, "/v1/completions", {"prompt": "ab", "stream": True})
        await call.until("text")
        call.hang_up()
        await call.task
        await until(lambda: not gateway.frontend.running)
    assert len(gateway.frontend.submitted) == 3


async def test_what_the_cluster_refuses_costs_nothing(tmp_path):
    gateway = TenantGateway(
        tmp_path, "requests_per_minute = 1", [RequestRejected(1.0, "queue is full")]
    )
    for _ in range(3):
        reply = await gateway.ask()
        assert reply.json()["error"]["code"] == "saturated", "not a limit of the tenant's"


async def test_a_minute_of_requests_flows_off(tmp_path):
    gateway = TenantGateway(tmp_path, "requests_per_minute = 6")
    assert [(await gateway.ask()).status_code for _ in range(6)] == [200] * 6
    gateway.frontend.clock_s += 3.0
    reply = await gateway.ask()
    assert reply.status_code == 429
    wait_s = int(reply.headers["retry-after"])
    assert 1 <= wait_s <= 10
    gateway.frontend.clock_s += wait_s
    assert (await gateway.ask()).status_code == 200, "it said the truth"


async def test_tokens_that_were_not_needed_are_given_back(tmp_path):
    gateway = TenantGateway(tmp_path, "tokens_per_minute = 60")
    spent = []
    while (reply := await gateway.ask(max_tokens=48)).status_code == 200:
        usage = reply.json()["usage"]
        spent.append(usage["total_tokens"])
    assert len(spent) >= 2, "48 at once fit only once into 60"
    assert sum(spent) + usage["prompt_tokens"] + 48 > 60
    assert reply.json()["error"]["message"].startswith("tokens_per_minute: more than 60")


def request(prompt=10, output=20, tenant="t"):
    base = Request("r", Family.DIFFUSION, "m", prompt, output, 0.0)
    return replace(base, tenant=tenant)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 30.0)), max_size=60),
    st.integers(50, 200),
)
def test_no_more_than_the_limit_goes_through_in_any_minute(asked, limit):
    now_s, let_in = 0.0, []
    limits = Limits(lambda: now_s)
    tenant = Tenant("t", tokens_per_minute=limit)
    for tokens, gap_s in asked:
        now_s += gap_s
        try:
            limits.admit(tenant, [request(1, tokens - 1)])
        except APIError:
            continue
        let_in.append((now_s, tokens))
        for start_s, _ in let_in:
            within = sum(n for at_s, n in let_in if at_s >= start_s)
            assert within <= limit * (1.0 + (now_s - start_s) / 60.0) + 1e-6


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20), st.booleans()), max_size=40))
def test_what_ends_is_no_longer_in_flight(rows):
    limits, tenant = Limits(lambda: 0.0), Tenant("t", tokens_per_minute=10**9)
    for count, output, refused in rows:
        requests = [request() for _ in range(count)]
        limits.admit(tenant, requests)
        for one in requests:
            limits.end(one, output, refused)
    use = limits.use("t")
    assert (use.requests, use.tokens) == (0, 0)
    ran = sum(count * (10 + output) for count, output, refused in rows if not refused)
    assert use.tokens_spent.amount == ran


# -- keys and their file


def test_keys_are_hashed_random_and_found():
    keys = {new_key() for _ in range(50)}
    assert len(keys) == 50
    assert min(map(len, keys)) >= 40, "256 random bits"
    ring = KeyRing({"a": [hash_of(k) for k in keys], "b": []})
    assert all(ring.owner(key) == "a" for key in keys)
    assert ring.owner("") is None
    assert ring.owner(hash_of(next(iter(keys)))) is None, "a hash is no key"
    assert (bearer("bearer  x "), bearer("Basic x"), bearer("")) == ("x", "", "")


@pytest.mark.parametrize(("words", "table"), [(["acme"], "tenants"), (["--operator"], "operator")])
def test_a_key_is_made_and_its_lines_are_a_file(tmp_path, capsys, words, table):
    assert main(["key", "new", *words]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    path = tmp_path / "tenants.toml"
    path.write_text("\n".join(lines))
    read = read_tenants(path, CLASSES)
    key = first.split()[-1]
    keys = read.operator.keys if table == "operator" else read.tenants["acme"].keys
    assert keys == (hash_of(key),)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[tenants.a]\nkeys = ['sk-plain']", "keys"),
        ("[tenants.a]\nwieght = 1.0", "tenants.a.wieght"),
        ("[tenants.a]\nname = 'b'", "tenants.a.name"),
        ("[tenants.a]\nweight = 0.0", "weight"),
        ("[tenants.a]\nrequests_in_flight = -1", "requests_in_flight"),
        ("[tenants.a]\nclasses = ['gold']", "tenants.a.classes"),
        ("[tenants.'a b']", "tenants.a b"),
        (f"[tenants.a]\n{SAME}\n[tenants.b]\n{SAME}", "tenants.b.keys"),
        (f"[operator]\n{SAME}\n[tenants.b]\n{SAME}", "tenants.b.keys"),
        ("[operator]\nkeys = ['x']", "operator.keys"),
        ("tenants = ", "tenants"),
    ],
)
def test_a_bad_file_names_the_key_at_fault(tmp_path, text, field):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(FieldError) as error:
        read_tenants(path, CLASSES)
    assert error.value.field == field


def test_the_file_is_read_anew_and_a_broken_one_changes_nothing(tmp_path, caplog):
    path, now_s, looked = written(tmp_path / "tenants.toml"), 0.0, []
    tenants = Tenants(path, CLASSES, lambda: now_s)

    def change(text, mtime_s):
        path.write_text(text)
        os.utime(path, (mtime_s, mtime_s))

    assert tenants.tenant(KEY).name == "acme"
    assert tenants.tenant("sk-new") is None
    change(path.read_text() + f'\n[tenants.new]\nkeys = ["{hash_of("sk-new")}"]', 1e9)
    assert tenants.tenant("sk-new") is None, "looked at once a second at most"
    now_s += LOOK_EVERY_S
    assert tenants.tenant("sk-new").name == "new"
    change("[tenants.acme]\nkeys = 5", 1.1e9)
    for _ in range(5):
        now_s += LOOK_EVERY_S
        looked.append(tenants.tenant(KEY).name)
    assert looked == ["acme"] * 5
    told = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(told) == 1
    assert "tenants.acme.keys" in told[0]
    path.unlink()
    now_s += LOOK_EVERY_S
    assert tenants.tenant(KEY).name == "acme"
    change(f'[tenants.bolt]\nweight = 2.0\nkeys = ["{hash_of(KEY)}"]', 1.2e9)
    now_s += LOOK_EVERY_S
    assert tenants.tenant(KEY).name == "bolt"
    assert "weights of tenants act from the next start" in caplog.text


def test_schedulers_begin_with_the_weights_of_the_file(tmp_path):
    path = written(tmp_path / "tenants.toml", "weight = 3.0", "weight = 0.5")
    control = ControlConfig(tenant_weights={"bolt": 2.0})
    config = with_weights(ServeConfig(tenants=str(path), control=control))
    assert config.control.tenant_weights == {"acme": 3.0, "bolt": 2.0}
    assert with_weights(ServeConfig()) == ServeConfig()


async def test_a_file_that_cannot_be_read_is_refused_at_start(tmp_path):
    with pytest.raises(FieldError, match="tenants: "):
        Gateway(HELLO, ServeConfig(tenants=str(tmp_path / "nowhere.toml")))


async def test_a_key_in_a_body_of_any_size_is_asked_for_first(tmp_path):
    """Nobody without a key has a body read."""

    async def body():
        raise AssertionError("read")
        yield b""

    gateway = TenantGateway(tmp_path)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(gateway.app), base_url="http://gateway"
    ) as client:
        reply = await client.post("/v1/completions", content=body())
    assert reply.status_code == 401
