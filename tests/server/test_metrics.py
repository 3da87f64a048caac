"""The numbers, read back by Prometheus' own parser, and what the step log and the queue make of steps."""

import pytest
from live_server import chat, live, long_chat, make_service, slow, until
from prometheus_client.parser import text_string_to_metric_families

from pellucid.inference.records import EngineStats
from pellucid.server.debug import MAP_LETTERS, model_state, page_map, step_lines
from pellucid.server.errors import ApiError
from pellucid.server.limits import Places
from pellucid.server.steps import Running, StepLog


@pytest.fixture(scope="module")
def server():
    with live() as found:
        yield found


def read(server):
    status, headers, data = server.get("/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(data.decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def value(numbers, name, **labels):
    return numbers.get((name, *sorted(labels.items())), 0.0)


def test_each_number_moves_by_what_happened(server):
    asked = chat("the same beginning of two prompts", max_tokens=7, ignore_eos=True)
    before = read(server)
    usage = [server.post("/v1/chat/completions", asked)[2]["usage"] for _ in range(2)]
    server.post("/v1/messages", chat() | {"max_tokens": 0})
    server.post("/v1/embeddings", {"model": "vectors", "input": [[5, 6, 7], [8]]})
    after = read(server)

    def moved(name, **labels):
        return value(after, name, **labels) - value(before, name, **labels)

    assert moved("pellucid_requests_total", route="/v1/chat/completions", status="200") == 2
    assert moved("pellucid_requests_total", route="/v1/messages", status="400") == 1
    assert moved("pellucid_request_seconds_count", route="/v1/chat/completions") == 2
    assert moved("pellucid_request_seconds_sum", route="/v1/chat/completions") > 0
    assert moved("pellucid_first_token_seconds_count", model="tiny") == 2
    assert moved("pellucid_tokens_total", model="tiny", kind="decoded") == 14
    cached = usage[1]["prompt_tokens_details"]["cached_tokens"]
    assert moved("pellucid_tokens_total", model="tiny", kind="reused") == cached > 0
    computed = 2 * usage[0]["prompt_tokens"] - cached
    assert moved("pellucid_tokens_total", model="tiny", kind="prefilled") == computed
    assert moved("pellucid_embedded_tokens_total", model="vectors") == 4
    assert moved("pellucid_engine_events_total", model="tiny", event="step") >= 14
    assert value(after, "pellucid_engine_up", model="tiny") == 1
    assert sum(value(after, "pellucid_blocks", model="tiny", state=s) for s in ("free", "cached", "held")) == (
        server.engine.stats().blocks
    )


def test_paths_that_clients_make_up_are_one_label(server):
    for i in range(30):
        server.get(f"/made/up/{i}")
        server.get(f"/v1/models/{i}")
    routes = {dict(key[1:])["route"] for key in read(server) if key[0] == "pellucid_requests_total"}
    assert {"other", "/v1/models/{id}"} <= routes and len(routes) < 16


def test_two_servers_in_one_process_count_for_themselves(server):
    with live() as other:
        other.post("/v1/chat/completions", chat(max_tokens=1))
        assert value(read(other), "pellucid_first_token_seconds_count", model="tiny") == 1


def test_a_client_that_left_is_counted():
    with live(window=2048) as server:
        slow(server.model)
        sent = server.open("/v1/chat/completions", long_chat(tokens=1500))
        until(lambda: server.engine.stats().decoded > 2)
        sent.close()
        until(lambda: value(read(server), "pellucid_clients_left_total") == 1)


# -- the step log -------------------------------------------------------------------------------------------


def test_the_step_log_tells_speed_and_who_has_begun():
    model = make_service().models["tiny"]
    engine, log = model.front.engine, model.steps
    from pellucid.inference.request import Request, SamplingParams

    waiting = Running("later", 4)
    log.requests["a"], log.requests["later"] = Running("a", 9), waiting
    assert log.tokens_per_s() == 0 == log.busy_tokens_per_s()
    engine.submit(Request("a", tuple(range(5, 14)), SamplingParams(max_tokens=6, temperature=0)))
    while engine.has_work:
        engine.step()
    assert log.requests["a"].begun and not waiting.begun and waiting.state == "waiting"
    assert log.requests["a"].state == "reading"  # nobody told it that there were tokens
    assert len(log.records) == 6 and log.tokens_per_s() == pytest.approx(6 / 5.0)
    seconds = sum(record.seconds for record in list(log.records)[1:])
    assert log.busy_tokens_per_s() == pytest.approx(5 / seconds)
    assert [line["step"] for line in step_lines(log.records, since=4)] == [5, 6]


def test_reuse_is_that_of_the_first_reading_and_forgotten_requests_are_no_trouble():
    model = make_service().models["tiny"]
    engine, log = model.front.engine, model.steps
    from pellucid.inference.request import Request, SamplingParams

    for name in "ab":
        log.requests[name] = Running(name, 20)
        engine.submit(Request(name, tuple(range(5, 25)), SamplingParams(max_tokens=2, temperature=0)))
        while engine.has_work:
            engine.step()
    assert (log.requests["a"].reused, log.requests["b"].reused) == (0, 16)
    log.requests.clear()
    engine.submit(Request("c", (5, 6), SamplingParams(max_tokens=1)))
    engine.step()
    assert log.requests == {}


def test_the_page_map_is_a_letter_a_block_and_shortened_where_there_are_many():
    assert page_map("fch") == ("fch", 1)
    many = "f" * (3 * MAP_LETTERS - 4) + "cfhc"
    letters, per_letter = page_map(many)
    assert per_letter == 3 and len(letters) == MAP_LETTERS
    assert letters[-2:] == "ch" and set(letters[:-2]) == {"f"}


def test_prefix_hits_are_the_share_of_prompt_tokens_that_were_reused():
    stats = EngineStats(
        1, 2, 8, 3, 4, 1, 5, 5, prefilled=30, reused=10, decoded=1, drafted=0, accepted=0, evictions=6, preemptions=7
    )
    state = model_state(stats, 16, 1.234, "hccccfff", [Running("a", 3, reused=2, begun=True, generated=1)])
    assert state["prefix_hits"] == 0.25 and state["tokens_per_s"] == 1.23 and state["map"] == "hccccfff"
    assert state["requests"] == [{"id": "a", "state": "answering", "prompt": 3, "generated": 1, "reused": 2}]


# -- the queue ----------------------------------------------------------------------------------------------


def test_the_time_to_come_back_is_that_in_which_enough_answers_end():
    places = Places(10, lambda: 50.0)
    for tokens in (100, 100):
        places.ended(tokens)
    with places.hold(10):
        for count, seconds in ((1, 2), (3, 6), (10, 20)):
            with pytest.raises(ApiError, match=r"10 of 10 places") as refused, places.hold(count):
                pass
            assert refused.value.status == 429 and refused.value.headers["Retry-After"] == str(seconds)
    assert places.taken == 0 and places.refused == 3


def test_without_experience_or_speed_the_time_is_a_second():
    for speed, tokens in ((0.0, 100), (50.0, 0)):
        places = Places(1, lambda speed=speed: speed)
        places.ended(tokens)
        with places.hold(1), pytest.raises(ApiError) as refused, places.hold(1):
            pass
        assert refused.value.headers["Retry-After"] == "1"


def test_a_request_larger_than_the_queue_is_taken_alone():
    places = Places(4, lambda: 1.0)
    with places.hold(9):
        assert places.taken == 4
        with pytest.raises(ApiError), places.hold(1):
            pass
    with places.hold(1), pytest.raises(ApiError), places.hold(9):
        pass
    assert places.taken == 0


def test_places_come_back_whatever_ends_a_request():
    places = Places(1, lambda: 1.0)
    with pytest.raises(ZeroDivisionError), places.hold(1):
        raise ZeroDivisionError
    assert places.taken == 0


def test_an_idle_log_has_no_speed():
    assert StepLog().busy_tokens_per_s() == 0.0
