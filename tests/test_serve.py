"""The server as clients meet it: the openai package unchanged, real sockets, answers equal to LLM.generate's."""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletionChunk
from openai.types.shared import ErrorObject
from prometheus_client.parser import text_string_to_metric_families
from serving import check_chunk, check_shape, client_of, events, running
from test_llm import BEGINNING, EOS, PIECES, SIZES, golden
from text_model import text_model

from jspark import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=11, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(n=3, seed=7, max_tokens=12)
LOGPROBS = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=2, echo=True)
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def llm(goldens, tmp_path_factory) -> LLM:
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("serve") / "model", PIECES, EOS)
    return LLM(str(model), str(goldens / "dspark_qwen3_tiny_vanilla_trained"), **SIZES)


@pytest.fixture(scope="module")
def prompts(goldens) -> list[list[int]]:
    return golden(goldens, "dspark_qwen3_tiny_vanilla_trained")[0]


@pytest.fixture(scope="module")
def wanted(llm, prompts):
    """What LLM.generate answers, before the server owns the engine."""
    return {
        "greedy": llm.generate(prompts, GREEDY),
        "seeded": llm.generate(["abc", "b"], SEEDED),
        "sampled": llm.generate(prompts, SAMPLED),
        "logprobs": llm.generate("abc", LOGPROBS)[0],
        "chat": llm.chat(CHAT, GREEDY)[0],
    }


@pytest.fixture(scope="module")
def server(llm, wanted, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "access.jsonl"
    with running(llm, access_log=str(log)) as run:
        yield run
        run.assert_free()


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def post(server, path: str, **body) -> httpx.Response:
    return httpx.post(f"{server.address}{path}", json=body, timeout=120)


def stream(server, path: str, **body) -> list[dict]:
    """The chunks of a stream, checked for its end."""
    with httpx.stream("POST", f"{server.address}{path}", json=body | {"stream": True}, timeout=120) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        data = events(response)
    assert data[-1] == "[DONE]"
    return [json.loads(d) for d in data[:-1]]


def greedy(prompt, **more) -> dict:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True} | more


def test_answers_under_load_are_those_of_generate(server, wanted, prompts):
    """Greedy and seeded ones, streamed and whole, more than there are slots."""
    greedy_ids = [o.output_ids for o in wanted["greedy"]]
    seeded_ids = [o.output_ids for o in wanted["sampled"]]

    def ask(i: int) -> list[int]:
        body = greedy(prompts[i % 4], return_token_ids=True)
        if i % 3 == 0:
            body |= {"temperature": 0.8, "seed": 11, "max_tokens": 12}
        if i % 2:
            chunks = stream(server, "/v1/completions", **body)
            return [t for c in chunks for choice in c["choices"] for t in choice["token_ids"]]
        return post(server, "/v1/completions", **body).json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(24)))
    assert answers == [(greedy_ids if i % 3 else seeded_ids)[i % 4] for i in range(24)]


def test_seeded_continuations_are_those_of_generate(client, wanted):
    done = client.completions.create(model="model", prompt=["abc", "b"], n=3, seed=7, max_tokens=12)
    assert [c.index for c in done.choices] == list(range(6))
    assert [c.text for c in done.choices] == [o.text for o in wanted["seeded"]]
    assert [c.finish_reason for c in done.choices] == [o.finish_reason for o in wanted["seeded"]]
    assert done.usage
    assert done.usage.completion_tokens == sum(o.completion_tokens for o in wanted["seeded"])
    assert done.usage.prompt_tokens == 4
    pieces = [""] * 6
    for chunk in client.completions.create(
        model="model", prompt=["abc", "b"], n=3, seed=7, max_tokens=12, stream=True
    ):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [o.text for o in wanted["seeded"]]


def test_chat_streams_role_pieces_reason_usage(server, client, wanted):
    want = wanted["chat"]
    more: dict = {"ignore_eos": True}
    done = client.chat.completions.create(
        model="model", messages=CHAT, temperature=0, max_completion_tokens=24, extra_body=more
    )
    assert (done.choices[0].message.role, done.choices[0].message.content) == ("assistant", want.text)
    assert (done.choices[0].finish_reason, done.choices[0].logprobs) == ("length", None)
    with client.chat.completions.create(
        model="model",
        messages=CHAT,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=more,
    ) as pieces:
        chunks = list(pieces)
    deltas = [c.choices[0].delta for c in chunks[:-1]]
    assert [d.role for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(d.content or "" for d in deltas) == want.text
    assert len(deltas) > 4
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(deltas) - 1) + ["length"]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage
    assert (usage.completion_tokens, usage.prompt_tokens, usage.total_tokens) == (24, 5, 29)
    raw = stream(server, "/v1/chat/completions", messages=CHAT, temperature=0, max_tokens=24, **more)
    assert not any("usage" in c for c in raw)
    more["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    raw = stream(server, "/v1/chat/completions", messages=CHAT, temperature=0, max_tokens=24, **more)
    counts = [c["usage"]["completion_tokens"] for c in raw]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 24)
    for chunk in raw:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_characters_and_stop_strings_are_whole_across_chunks(server, prompts):
    chunks = stream(server, "/v1/completions", **greedy(prompts[3]))
    texts = [choice["text"] for c in chunks for choice in c["choices"]]
    assert "".join(texts).startswith(BEGINNING)
    assert not any("\ufffd" in t for t in texts)
    assert any("€" in t for t in texts)
    cases = [("A311", "A154A216A65€"), ("€", "A154A216A65"), ("6A65€A3", "A154A21")]
    for stop, before in (*cases, (["zzz", "naïve"], "A154A216A65€A311A281d")):
        asked = greedy(prompts[3], stop=stop)
        whole = post(server, "/v1/completions", **asked).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == (before, "stop")
        assert whole["stop_reason"] == (stop if isinstance(stop, str) else stop[1])
        texts = [choice["text"] for c in stream(server, "/v1/completions", **asked) for choice in c["choices"]]
        assert "".join(texts) == before
    server.assert_free()


def test_logprobs_are_those_of_generate(server, client, wanted):
    want = wanted["logprobs"]
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 6, "logprobs": 2, "echo": True}
    done = post(server, "/v1/completions", **body).json()
    choice = done["choices"][0]
    got = choice["logprobs"]
    everything = [*want.prompt_logprobs, *want.logprobs]
    assert choice["text"] == want.text == "".join(got["tokens"])
    assert got["token_logprobs"] == pytest.approx([e and e.logprob for e in everything])
    placed = zip(got["tokens"], got["text_offset"], strict=True)
    assert all(want.text.startswith(token, offset) for token, offset in placed)
    best = [max(top.values()) for top in got["top_logprobs"][3:]]
    assert best == pytest.approx([e.logprob for e in want.logprobs])
    merged: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in stream(server, "/v1/completions", **body):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            merged[name] += values
    assert merged["tokens"] == got["tokens"]
    assert merged["text_offset"] == got["text_offset"]
    assert merged["token_logprobs"][1:] == pytest.approx(got["token_logprobs"][1:])

    chat = client.chat.completions.create(
        model="model", messages=CHAT, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs
    content = chat.choices[0].logprobs.content or []
    assert len(content) == 6
    assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].token == e.token for e in content)
    assert all(bytes(e.bytes or ()).decode() == e.token for e in content)
    chunks = client.chat.completions.create(
        model="model", messages=CHAT, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [e.token for e in streamed] == [e.token for e in content]


def test_bytes_of_half_a_character(server):
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 1, "logprobs": True, "logit_bias": {"299": 1000}}
    half = post(server, "/v1/chat/completions", **body)
    [entry] = half.json()["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] == [0xE2, 0x82]


def test_speculation_is_reported_and_can_be_turned_off(server, prompts, wanted):
    want = wanted["greedy"][0]
    body = greedy(prompts[0], return_spec_tokens_details=True)
    done = post(server, "/v1/completions", **body).json()
    figures = done["metrics"]["speculative_decoding"]
    assert figures["acceptance_histogram"] == want.accepted_histogram
    assert figures["num_spec_steps"] == want.steps
    assert figures["num_draft_tokens"] == 7 * want.steps
    assert figures["num_spec_tokens"] == 7
    accepted = sum(n * c for n, c in enumerate(want.accepted_histogram))
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / want.steps)
    assert figures["num_accepted_draft_tokens"] == accepted
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / (7 * want.steps))
    details = done["sglext"]["spec_tokens_details"]
    assert details["spec_correct_drafts_histogram"] == want.accepted_histogram
    assert (details["spec_cap_length"], details["spec_verify_ct"]) == (7, want.steps)
    chunks = stream(server, "/v1/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["metrics"] == done["metrics"]
    assert chunks[-1]["sglext"] == done["sglext"]
    off = post(server, "/v1/completions", **body, disable_speculative_decoding=True).json()
    assert off["choices"][0]["text"] == want.text
    assert off["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    info = httpx.get(f"{server.address}/server_info").json()
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1


def test_generate_as_sglang_has_it(server, prompts, wanted):
    want = wanted["greedy"][0]
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    body = {"input_ids": prompts[0], "sampling_params": sampling, "lora_path": None, "return_logprob": False}
    body |= {"return_routed_experts": False, "logprob_start_len": -1}
    done = post(server, "/generate", **body, stream=False).json()
    assert (done["text"], done["output_ids"]) == (want.text, want.output_ids)
    meta = done["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompts[0]), 24)
    assert meta["spec_verify_ct"] == want.steps
    chunks = stream(server, "/generate", **body)
    assert [c["text"] for c in chunks] == sorted((c["text"] for c in chunks), key=len)
    assert (chunks[-1]["text"], chunks[-1]["meta_info"]["completion_tokens"]) == (want.text, 24)
    several = post(server, "/generate", text=["abc", "b"], sampling_params=sampling | {"max_new_tokens": 3}).json()
    assert [len(one["output_ids"]) for one in several] == [3, 3]
    stopped = post(server, "/generate", input_ids=prompts[3], sampling_params=sampling | {"stop": "A311"}).json()
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "A311"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "temperature is -1"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p", "above 0"),
        ("/v1/completions", {"prompt": "a", "n": 2, "temperature": 0}, 400, "n", "temperature 0"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "integer"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 500}, 400, "prompt", "the context holds 128"),
        ("/v1/completions", {"prompt": "a" * 130}, 400, "prompt", "130 tokens"),
        ("/v1/completions", {"prompt": ""}, 400, None, "empty"),
        ("/v1/completions", {"prompt": [5000]}, 400, None, "outside the vocabulary"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5000]}, 400, None, "outside the vocabulary"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "token ids"),
        ("/v1/completions", {"prompt": "a", "top_kk": 5}, 400, "top_kk", "unknown"),
        ("/v1/completions", {"prompt": "a", "best_of": 4}, 400, "best_of", "not supported"),
        ("/v1/completions", {"prompt": "a", "suffix": "z"}, 400, "suffix", "not supported"),
        ("/v1/completions", {}, 400, "prompt", "missing"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404, "model", "does not exist"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages", "at least 1"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content", "missing"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs", "logprobs: true"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "logprobs": True, "top_logprobs": 21},
            400,
            "logprobs",
            "0 to 20",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "auto"}, 400, "tool_choice", "without tools"),
        ("/generate", {"text": "a", "stream_options": {}}, 400, "stream_options", "not supported"),
        ("/generate", {"sampling_params": {}}, 400, "text", "must be given"),
        ("/tokenize", {}, 400, "prompt", "must be given"),
        ("/v1/embeddings", {"input": "a"}, 404, None, "does not exist"),
    ],
)
def test_what_cannot_be_served_is_refused(server, path, body, status, param, words):
    answer = post(server, path, **body)
    assert answer.status_code == status
    error = ErrorObject.model_validate(answer.json()["error"], strict=True)
    assert words in error.message
    assert error.param == param
    again = post(server, path, **body | {"stream": True}) if path.startswith("/v1/c") else answer
    assert (again.status_code, again.json()) == (status, answer.json())


def test_clients_raise_what_they_should(client):
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="model", messages=CHAT, stop=[""], stream=True)
    assert (refused.value.param, refused.value.code) == ("stop", None)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="model", prompt="a" * 200)
    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "seed": 1e400}',
    ],
)
def test_bodies_that_are_no_json_are_refused(server, body):
    answer = httpx.post(f"{server.address}/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_neutral_values_of_unsupported_fields_pass(server):
    body = {"prompt": "a", "max_tokens": 1, "stop": None, "best_of": 1, "suffix": None, "user": "me", "seed": None}
    body |= {"repetition_penalty": 1.0, "ignore_eos": True, "store": False, "logprobs": None, "stream": False}
    assert post(server, "/v1/completions", **body).status_code == 200


def test_text_and_tokens(server):
    answer = post(server, "/tokenize", prompt="abc ", return_token_strs=True).json()
    assert (answer["count"], answer["max_model_len"]) == (4, 128)
    assert (answer["tokens"], answer["token_strs"]) == ([0, 1, 2, 26], ["a", "b", "c", " "])
    assert post(server, "/detokenize", tokens=[0, 1, 2, 26]).json() == {"prompt": "abc "}
    assert post(server, "/tokenize", messages=CHAT).json()["tokens"] == [0, 1, 2, 26, 25]


def test_the_server_tells_of_itself(server, client):
    [model] = client.models.list()
    assert model.id == "model"
    Model.model_validate(httpx.get(f"{server.address}/v1/models/model").json(), strict=True)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{server.address}/health").status_code == 200
    assert httpx.get(f"{server.address}/model_info").json()["is_generation"] is True
    assert re.fullmatch(r"\d+\.\d+\.\d+", httpx.get(f"{server.address}/version").json()["version"])
    wrong = httpx.get(f"{server.address}/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    document = httpx.get(f"{server.address}/openapi.json").json()
    for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in document["components"]["schemas"]


def test_metrics_have_vllms_names(server, prompts):
    assert post(server, "/v1/completions", **greedy(prompts[0])).status_code == 200
    page = httpx.get(f"{server.address}/metrics")
    families = {f.name: f for f in text_string_to_metric_families(page.text)}
    stems = "num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens generation_tokens"
    stems += " request_success time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds"
    stems += " request_queue_time_seconds spec_decode_num_drafts spec_decode_num_draft_tokens"
    stems += " spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos"
    for stem in stems.split():
        assert f"jspark:{stem}" in families, stem
    value = {s.name: s.value for f in families.values() for s in f.samples if "position" not in s.labels}
    positions = families["jspark:spec_decode_num_accepted_tokens_per_pos"].samples
    assert sum(s.value for s in positions) == value["jspark:spec_decode_num_accepted_tokens_total"] > 0
    assert value["jspark:generation_tokens_total"] >= 24
    assert value["jspark:time_to_first_token_seconds_count"] > 0


def test_the_prefix_cache_is_reported_and_flushed(server, prompts):
    body = {"prompt": (prompts[0] * 50)[:50], "temperature": 0, "max_tokens": 2}
    assert httpx.post(f"{server.address}/flush_cache").json()["success"] is True
    cached = []
    for _ in range(2):
        usage = post(server, "/v1/completions", **body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    # Whole pages of 16, without the last token, which is the first anchor.
    assert cached == [0, (len(body["prompt"]) - 1) // 16 * 16]
    again = post(server, "/generate", input_ids=body["prompt"], sampling_params={"max_new_tokens": 2}).json()
    assert again["meta_info"]["cached_tokens"] == cached[1] > 0
    assert httpx.post(f"{server.address}/flush_cache").json()["pages_freed"] >= cached[1] // 16
    assert post(server, "/v1/completions", **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    page = httpx.get(f"{server.address}/metrics").text
    hits = re.search(r"^jspark:prefix_cache_hits_total.* (\S+)$", page, re.MULTILINE)
    assert hits
    assert float(hits[1]) >= 2 * cached[1]


def test_requests_are_logged_without_their_text(server):
    log = server.server.flags.access_log
    answer = httpx.post(
        f"{server.address}/v1/completions",
        json=greedy("hidden words"),
        headers={"x-request-id": "my-own-id"},
        timeout=60,
    )
    assert answer.headers["x-request-id"] == "my-own-id"

    def lines() -> list[dict]:
        return [json.loads(line) for line in Path(log).read_text(encoding="utf-8").splitlines()]

    server.wait(lambda: any(line["id"] == "my-own-id" for line in lines()))
    [line] = [line for line in lines() if line["id"] == "my-own-id"]
    assert (line["status"], line["path"], line["completion_tokens"]) == (200, "/v1/completions", 24)
    assert (line["prompt_tokens"], line["finish_reason"]) == (12, "length")
    assert "hidden" not in Path(log).read_text(encoding="utf-8")


LOGGED: dict = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT} | LOGGED),
        ("/v1/chat/completions", {"messages": CHAT, "n": 2, "temperature": 1, "seed": 1}),
        ("/v1/chat/completions", {"messages": CHAT, "stop": "A", "return_spec_tokens_details": True}),
        ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 2, "return_token_ids": True}),
        ("/v1/completions", {"prompt": ["abc", "b"], "n": 2, "temperature": 1, "seed": 1}),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "return_spec_tokens_details": True}),
    ],
)
def test_every_answer_fits_the_clients_types(server, path, body):
    body = {"temperature": 0, "max_tokens": 4} | body
    check_shape(post(server, path, **body).json())
    for options in ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        chunks = stream(server, path, **body, stream_options=options)
        for chunk in chunks:
            check_chunk(chunk)
            if "continuous_usage_stats" in options:
                assert chunk["usage"]["total_tokens"] > 0
        assert ("metrics" in chunks[-1]) == ("include_usage" in options)


def test_errors_fit_the_clients_types(server):
    for path, body in (("/v1/completions", {}), ("/v1/completions", {"prompt": 1}), ("/nowhere", {})):
        check_shape(post(server, path, **body).json())
    check_shape(httpx.get(f"{server.address}/v1/chat/completions").json())


def test_curl_reads_a_stream(server, wanted):
    """The README's client, as it is."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stream": True}
    words = ["-sSN", f"{server.address}/v1/chat/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run(
        [curl, *words, "-d", json.dumps(body)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line for line in done.stdout.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == wanted["chat"].text


def test_flags_are_checked():
    from jspark import UserError
    from serve.settings import ServerFlags

    for wrong, words in (
        ({"port": 70000}, "--port"),
        ({"metrics_prefix": "a b"}, "--metrics-prefix"),
        ({"api_key": ("",)}, "--api-key"),
        ({"max_queued_requests": -1}, "--max-queued-requests"),
        ({"request_timeout": float("nan")}, "--request-timeout"),
    ):
        with pytest.raises(UserError, match=words):
            replace(ServerFlags(), **wrong)
