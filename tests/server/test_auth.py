"""Keys on every path but three, and which hosts and web pages a server answers to."""

import pytest
from live_server import chat, live
from starlette.datastructures import Headers

from pellucid.errors import ConfigError
from pellucid.serve_config import ServeConfig
from pellucid.server.auth import KEY_VARIABLE, Keys, host_name, load_keys
from pellucid.server.routes import make_routes

KEY, OTHER = "sk-right-key", "sk-other-key"
OPEN = {"/health", "/ready", "/"}


@pytest.fixture(scope="module")
def server():
    with live(keys=(KEY, OTHER)) as found:
        yield found


def every_path(server):
    paths = [(method, route.path) for route in make_routes(server.service) for method in route.methods - {"HEAD"}]
    assert len(paths) > 12
    made_up = [
        "/v1",
        "/v1/",
        "//v1/models",
        "/V1/models",
        "/health/",
        "/health/../v1/models",
        "/%2e/metrics",
        "/nope",
        "/docs",
    ]
    return [(method, path.replace("{id:path}", "tiny")) for method, path in paths] + [("GET", path) for path in made_up]


def test_every_path_but_three_needs_a_key_whether_it_exists_or_not(server):
    for method, path in every_path(server):
        for more in ("", "?beta=true"):
            status, headers, body = server.request(method, path + more, b"{}" if method == "POST" else None)
            if path in OPEN:
                assert status in (200, 404), path
                continue
            assert status == 401 and headers["www-authenticate"] == "Bearer", path
            assert body["error"]["type"] == ("authentication_error" if "messages" in path else "invalid_request_error")


def test_open_paths_are_open_for_reading_only(server):
    for path in OPEN:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert server.request(method, path)[0] == 401


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_either_header_brings_either_key_to_either_vendors_routes(server, key):
    for path in ("/v1/chat/completions", "/v1/messages"):
        for header in ({"authorization": f"Bearer {key}"}, {"x_api_key": key}, {"authorization": f"bearer  {key} "}):
            assert server.post(path, chat(max_tokens=1), **header)[0] == 200


def test_one_right_header_is_enough(server):
    both = {"authorization": "Bearer wrong-key", "x_api_key": KEY}
    assert server.post("/v1/messages", chat(max_tokens=1), **both)[0] == 200


def test_what_is_almost_a_key_is_none(server):
    for value in (
        "",
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY} x",
    ):
        status, _, body = server.get("/v1/models", authorization=value)
        assert status == 401
        given = value.startswith("Bearer ") and value != "Bearer "
        assert body["error"]["code"] == ("invalid_api_key" if given else None)
    assert server.get("/v1/models", x_api_key="\xff\xfe")[0] == 401


def test_a_request_without_a_key_is_refused_before_its_body_is_read(server):
    sent = server.open("/v1/chat/completions", chat(), more=b"x" * 1000)  # which never comes
    assert b" 401 " in sent.recv(4096)
    sent.close()


def test_the_owner_of_a_key_is_named_without_telling_it():
    keys = Keys([KEY, OTHER])
    mine, others = (keys.owner(Headers({"x-api-key": key})) for key in (KEY, OTHER))
    assert mine and others and mine != others and KEY not in mine
    assert keys.owner(Headers({})) is None and Keys([]).owner(Headers({})) == ""


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\n  {OTHER}  # hers\n")
    monkeypatch.setenv(KEY_VARIABLE, "sk-environment")
    keys = load_keys(ServeConfig(api_key_file=str(file)))
    assert all(keys.owner(Headers({"x-api-key": key})) for key in (KEY, OTHER, "sk-environment"))
    assert keys.owner(Headers({"x-api-key": "# ours"})) is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "cannot be read"),
        ("# nothing\n", "holds no key"),
        ("short\n", "5 characters"),
        ("has a space\n", "spaces"),
    ],
)
def test_files_without_a_usable_key_are_refused(tmp_path, text, match):
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_keys(ServeConfig(api_key_file=str(file)))


def test_an_address_that_others_reach_needs_a_key_or_a_clear_word(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="--allow-anonymous"):
            load_keys(ServeConfig(host=host))
        assert not load_keys(ServeConfig(host=host, allow_anonymous=True))
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        assert not load_keys(ServeConfig(host=host))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert load_keys(ServeConfig(host="0.0.0.0"))


# -- hosts and origins --------------------------------------------------------------------------------------


def test_a_name_that_points_here_is_no_way_in():
    with live(allowed_hosts=("chat.internal",)) as server:
        for host in (
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "",
            "[::2]",
            "localhost.evil.example",
        ):
            assert server.get("/v1/models", host=host)[0] == 403
            assert server.get("/health", host=host)[0] == 403
        for host in (
            "localhost",
            f"localhost:{server.port}",
            "127.0.0.1",
            "[::1]:80",
            "chat.internal:443",
            "CHAT.internal",
        ):
            assert server.get("/v1/models", host=host)[0] == 200


@pytest.mark.parametrize("host", ["[::1]:8000", "[::1]"])
def test_a_host_header_loses_its_port_only(host):
    assert host_name(host) == "[::1]" and host_name("A.example:1") == "a.example"


def test_pages_of_other_origins_may_not_ask_even_without_asking_first(server):
    own = {"host": f"localhost:{server.port}", "origin": f"http://localhost:{server.port}"}
    assert server.post("/v1/messages", chat(max_tokens=1), key=KEY, **own)[0] == 200
    for origin in ("https://evil.example", "null", f"http://localhost:{server.port + 1}", ""):
        status, headers, _ = server.post("/v1/messages", chat(max_tokens=1), key=KEY, **(own | {"origin": origin}))
        assert status == 403 and "access-control-allow-origin" not in headers
    preflight = {"origin": "https://evil.example", "access_control_request_method": "POST"}
    assert server.request("OPTIONS", "/v1/messages", **preflight)[0] == 403


def test_an_allowed_origin_may_ask_and_no_other():
    with live(keys=(KEY,), cors_origins=("https://chat.example",)) as server:
        asked = {
            "origin": "https://chat.example", "access_control_request_method": "POST",
            "access_control_request_headers": "authorization,content-type",
        }  # fmt: skip
        status, headers, _ = server.request("OPTIONS", "/v1/chat/completions", **asked)
        assert status == 200 and headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in headers["access-control-allow-headers"].lower()
        good = {"origin": "https://chat.example"}
        status, headers, _ = server.post("/v1/chat/completions", chat(max_tokens=1), key=KEY, **good)
        assert status == 200 and headers["access-control-allow-origin"] == "https://chat.example"
        assert "access-control-allow-credentials" not in headers
        assert server.post("/v1/chat/completions", chat(max_tokens=1), **good)[0] == 401
        assert (
            server.request("OPTIONS", "/v1/chat/completions", **(asked | {"origin": "https://evil.example"}))[0] == 403
        )
