"""The chat page in a real browser, against a scripted server and against our own."""

import json
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from browser import browser
from page_server import CODE, MARKUP, SCRIPTS, STATE, PageServer

from pellucid.server.routes import PAGE

LIMIT_MS = 20_000


@pytest.fixture(scope="module")
def chrome():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def scripted():
    running = PageServer()
    yield running
    running.stop()


@pytest.fixture
def server(scripted):
    scripted.asked.clear()
    scripted.fail_next = None
    return scripted


@pytest.fixture
def visit(chrome):
    """Opens the page; what it complains about, or asks of anybody else, fails the test."""
    contexts, complaints, elsewhere = [], [], []

    def open_page(url, **options):
        context = chrome.new_context(viewport={"width": 1280, "height": 860}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith(url) else elsewhere.append(request.url))
        page.goto(url)
        return page

    open_page.complaints = complaints
    yield open_page
    for context in contexts:
        context.close()
    assert complaints == [] and elsewhere == []


def say(page, text):
    """Say it and wait for the answer; the answer's article."""
    page.fill("#say", text)
    page.press("#say", "Enter")
    page.wait_for_selector("#send", state="visible")
    return page.locator("article.assistant").last


def until(condition):
    """Wait for it. The page's policy forbids playwright's own way, which evaluates text inside the page."""
    end = time.monotonic() + LIMIT_MS / 1000
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_turns_and_settings_reach_the_server(visit, server):
    page = visit(server.url)
    page.fill("#system", "Be kind.")
    for name, value in {
        "temperature": "0",
        "top_p": "0.5",
        "top_k": "7",
        "min_p": "0.1",
        "max_tokens": "9",
        "seed": "3",
    }.items():
        page.fill(f"#{name}", value)
    page.fill("#stop-strings", "END\n\n STOP")
    assert say(page, "hello").locator(".text").inner_text() == "You said: hello"
    say(page, "again")
    first, second = server.asked
    system, hello = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}
    assert first["messages"] == [system, hello]
    said = {"role": "assistant", "content": "You said: hello"}
    assert second["messages"] == [system, hello, said, {"role": "user", "content": "again"}]
    assert {name: first[name] for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop")} == {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 9, "seed": 3, "stop": ["END", " STOP"],
    }  # fmt: skip
    assert (first["model"], first["stream"], first["logprobs"], first["top_logprobs"]) == ("tiny", True, True, 5)
    page.select_option("#model", "other/model")
    page.uncheck("#logprobs")
    page.fill("#temperature", "")
    say(page, "third")
    assert server.asked[2]["model"] == "other/model"
    assert not {"logprobs", "top_logprobs", "temperature"} & set(server.asked[2])


def test_what_a_model_writes_is_text_and_never_markup(visit, server):
    page = visit(server.url)
    assert say(page, "markup").locator(".text").inner_text() == MARKUP * 2
    say(page, "<b>mine</b>")
    assert page.locator("article.user .text").last.inner_text() == "<b>mine</b>"
    assert page.locator("#requests").inner_text().count("<b>req</b>") == 1
    assert page.locator("article img, article b, article script, #requests b").count() == 0
    assert page.evaluate("window.hacked") is None


def test_fences_become_code(visit, server):
    text = say(visit(server.url), "code").locator(".text")
    assert text.locator("pre").inner_text().strip() == "print('<hi>')"
    assert text.inner_text().split() == CODE.replace("```python", "").replace("```", "").split()


CUTS = """async () => {
  const text = ": hi\\n\\ndata: {\\"a\\": \\"é 👩🏽‍🚀\\"}\\r\\n\\r\\nid: 1\\ndata:x\\ndata: y\\n\\ndata: [DONE]\\n\\ndata: half";
  const bytes = new TextEncoder().encode(text), found = new Set();
  const read = async (pieces) => {
    const body = new ReadableStream({ start(to) { pieces.forEach((piece) => to.enqueue(piece)); to.close(); } }), told = [];
    for await (const data of events({ body })) told.push(data);
    found.add(JSON.stringify(told));
  };
  for (let i = 0; i <= bytes.length; i++) await read([bytes.slice(0, i), bytes.slice(i)]);
  await read([...bytes].map((byte) => Uint8Array.of(byte)));
  return [...found];
}"""


def test_a_stream_cut_at_every_byte_is_read_the_same(visit, server):
    page = visit(server.url)
    (found,) = page.evaluate(CUTS)
    assert json.loads(found) == ['{"a": "é 👩🏽\u200d🚀"}', "x\ny", "[DONE]"]
    assert say(page, "carriage returns").locator(".text").evaluate("node => node.textContent") == SCRIPTS


def test_stop_ends_the_answer_at_the_server_too(visit, server):
    page = visit(server.url)
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        left = server.left
        page.fill("#say", "endless")
        page.press("#say", "Enter")
        answer = page.locator("article.assistant").last
        until(
            lambda: page.evaluate(
                "[...document.querySelectorAll('article.assistant .text')].at(-1).textContent.length > 8"
            )
        )
        stop()
        page.wait_for_selector("#send", state="visible")
        until(lambda left=left: server.left == left + 1)
        assert "stopped" in answer.locator(".foot").inner_text()
    said = say(page, "after it") and server.asked[-1]["messages"]
    assert said[1]["role"] == "assistant" and said[1]["content"].startswith("and and ")


def test_reasoning_is_folded_and_given_back(visit, server):
    page = visit(server.url)
    answer = say(page, "think")
    fold = answer.locator("details")
    assert fold.get_attribute("open") is None and answer.locator("> .text").inner_text() == "Yes."
    fold.locator("summary").click()
    assert fold.locator(".text").inner_text() == "<i>hm</i>, well"
    say(page, "next")
    assert server.asked[1]["messages"][1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "<i>hm</i>, well",
    }


def test_a_tool_is_told_called_and_its_result_goes_back(visit, server):
    page = visit(server.url)
    page.click("summary:text-is('Tools')")
    page.click("#example-tool")
    page.select_option("#tool_choice", "required")
    answer = say(page, "tool")
    assert server.asked[0]["tool_choice"] == "required"
    assert server.asked[0]["tools"][0]["function"]["name"] == "get_weather"
    answer.locator("summary").click()
    assert answer.locator("summary").inner_text() == "Calls get_weather"
    assert answer.locator("pre").inner_text() == '{"city": "Oslo"}'
    page.fill("#result-call_1", "12 degrees")
    answer.locator("button:text-is('Send back')").click()
    page.locator("text=It is mild.").wait_for()
    *_, said, result = server.asked[1]["messages"]
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert said == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"}


def test_tokens_show_how_sure_the_model_was(visit, server):
    page = visit(server.url)
    answer = say(page, "tokens")
    answer.locator("button:text-is('Tokens')").click()
    tokens = answer.locator(".tokens span")
    assert [tokens.nth(i).evaluate("node => node.textContent") for i in range(4)] == ["The", " fox", "⟨c3⟩", "⟨a9⟩"]
    colours = [tokens.nth(i).evaluate("node => node.style.background") for i in range(2)]
    alphas = [float(colour.rpartition(",")[2].strip(" )")) for colour in colours]
    assert alphas[0] < 0.1 < 0.3 < alphas[1]
    tokens.nth(1).hover()
    assert page.locator("#tip").inner_text().split() == [
        "·fox", "10", "%,", "-2.300", "nats", "·hen", "67", "%", "·fox", "10", "%", "⏎", "5.0", "%",
    ]  # fmt: skip
    assert page.locator("#tip .drawn").count() == 1
    tokens.nth(0).focus()
    assert page.locator("#tip b").inner_text() == "The"
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip b").inner_text() == "·fox"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#tip b").inner_text() == "The"


def test_what_failed_is_said_and_can_be_tried_again(visit, server):
    page = visit(server.url)
    server.fail_next = "the <b>queue</b> is full"
    page.fill("#say", "hello")
    page.press("#say", "Enter")
    alert = page.locator("[role=alert]")
    alert.wait_for()
    assert alert.inner_text().startswith("the <b>queue</b> is full (503)")
    visit.complaints.clear()  # the browser's own note of the 503
    alert.locator("button").click()
    page.locator("text=You said: hello").wait_for()
    assert alert.count() == 0
    assert server.asked[0]["messages"] == server.asked[1]["messages"]


@pytest.mark.parametrize(("text", "message"), [("broken", "the engine failed"), ("cut", "The stream ended before")])
def test_a_stream_that_breaks_off_is_no_answer(visit, server, text, message):
    page = visit(server.url)
    answer = say(page, text)
    assert message in answer.locator("[role=alert]").inner_text()
    say(page, "after it")
    assert [m["role"] for m in server.asked[-1]["messages"]] == ["user", "user"]


def test_a_new_chat_forgets_even_what_is_being_said(visit, server):
    page = visit(server.url)
    say(page, "hello")
    page.fill("#say", "endless")
    page.press("#say", "Enter")
    page.wait_for_selector("#stop", state="visible")
    page.click("#clear")
    page.wait_for_selector("#send", state="visible")
    assert page.locator("article").count() == 0 and page.locator("#empty").is_visible()
    say(page, "fresh")
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "fresh"}]


def test_the_key_stays_in_this_tab(visit):
    guarded = PageServer(key="secret-key")
    try:
        page = visit(guarded.url)
        until(lambda: page.evaluate("document.getElementById('server').textContent === 'needs a key'"))
        page.fill("#key", "secret-key")
        page.press("#key", "Enter")
        until(lambda: page.evaluate("document.getElementById('server').textContent === 'ready'"))
        assert say(page, "hello").locator(".text").inner_text() == "You said: hello"
        assert page.evaluate("Object.values(sessionStorage).includes('secret-key')")
        assert page.evaluate("localStorage.length") == 0 and page.evaluate("document.cookie") == ""
        assert "secret-key" not in page.url and page.get_attribute("#key", "type") == "password"
        visit.complaints[:] = [
            text for text in visit.complaints if "401" not in text
        ]  # the browser's notes of the refusals
    finally:
        guarded.stop()


COLOURS = """(name) => {
  const canvas = document.getElementById(name), {width, height} = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data, counts = {};
  for (let i = 0; i < data.length; i += 4) {
    const key = [data[i], data[i + 1], data[i + 2]].join();
    if (data[i + 3] === 255) counts[key] = (counts[key] || 0) + 1;
  }
  return counts;
}"""


def test_the_inspector_draws_what_the_engine_holds(visit, server):
    page = visit(server.url)
    page.wait_for_selector("#numbers b")
    figures = dict(zip(page.locator("#numbers div").all_inner_texts(), range(6), strict=True))
    assert [text.split("\n")[0] for text in figures] == ["57.3", "2", "1", "42 %", "3", "5"]
    rows = page.locator("#requests tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["chatcmpl-a", "answering", "120", "64", "17"],
        ["<b>req</b>", "waiting", "9", "0", "0"],
    ]
    held, cached, free = (
        page.evaluate(COLOURS, "map").get(colour, 0) for colour in ("42,99,201", "143,180,242", "227,231,238")
    )
    assert held and (cached / held, free / held) == (STATE["cached"] / STATE["held"], STATE["free"] / STATE["held"])
    assert len(page.evaluate(COLOURS, "steps")) > 3
    assert "step 60" in page.inner_text("#last-step")


def test_everything_has_a_name_and_works_from_the_keyboard(visit, server):
    page = visit(server.url)
    page.wait_for_selector("#numbers b")
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, textarea, select')].filter(e => !e.labels.length).map(e => e.id)"
        ".concat([...document.querySelectorAll('button')].filter(b => !b.textContent.trim()).map(b => b.id))"
        ".concat([...document.querySelectorAll('canvas')].filter(c => !c.getAttribute('aria-label')).map(c => c.id))"
    )
    assert nameless == []
    assert page.evaluate("document.activeElement.id") == "say"
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    page.locator("article.assistant .foot").wait_for()
    assert server.asked[0]["messages"][0]["content"] == "hello\nthere"
    assert page.evaluate("document.activeElement.id") == "say"
    assert page.get_attribute("#log", "aria-busy") == "false"


CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement), probe = document.createElement("canvas").getContext("2d");
  const light = (name) => {
    probe.fillStyle = style.getPropertyValue(name).trim();
    const parts = [1, 3, 5].map((at) => parseInt(probe.fillStyle.slice(at, at + 2), 16) / 255);
    const [r, g, b] = parts.map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const pairs = ["ink page", "ink card", "soft page", "soft card", "ink mine", "ink tint", "on-accent accent", "ink bad-tint"];
  return Object.fromEntries(pairs.map((pair) => {
    const [low, high] = pair.split(" ").map((name) => light("--" + name)).sort((a, b) => a - b);
    return [pair, (high + 0.05) / (low + 0.05)];
  }));
}"""


def test_light_and_dark_can_be_read(visit, server):
    pages = {scheme: visit(server.url, color_scheme=scheme) for scheme in ("light", "dark")}
    grounds = {
        scheme: page.evaluate("getComputedStyle(document.body).backgroundColor") for scheme, page in pages.items()
    }
    assert grounds == {"light": "rgb(246, 247, 249)", "dark": "rgb(18, 21, 27)"}
    for page in pages.values():
        ratios = page.evaluate(CONTRAST)
        assert min(ratios.values()) >= 4.5, ratios


def test_a_narrow_window_scrolls_only_downwards(visit, server):
    page = visit(server.url)
    page.set_viewport_size({"width": 380, "height": 700})
    say(page, "long")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_the_page_needs_nothing_from_elsewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert not [word for word in ("http:", "https:", "@import", "src=", "innerHTML", "eval(") if word in text]


def test_a_conversation_with_our_own_server(visit):
    from live_server import live

    with live(keys=("a-good-key",)) as ours:
        page = visit(ours.url)
        page.fill("#key", "a-good-key")
        page.press("#key", "Enter")
        until(lambda: page.evaluate("document.getElementById('model').value === 'tiny'"))
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "12")
        first = say(page, "the fox asked")
        answer = ours.post(
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "the fox asked"}],
                "temperature": 0,
                "max_tokens": 12,
            },
            key="a-good-key",
        )[2]["choices"][0]["message"]["content"]
        assert first.locator("> .text").evaluate("node => node.textContent") == answer
        first.locator("button:text-is('Tokens')").click()
        assert first.locator(".tokens span").count() > 3
        say(page, "and the hen?")
        until(lambda: page.evaluate("+document.getElementById('cached').textContent > 0"))
        assert "from the cache" in page.locator(".foot").last.inner_text()
        assert len(page.evaluate(COLOURS, "steps")) > 1
        visit.complaints[:] = [text for text in visit.complaints if "401" not in text]
