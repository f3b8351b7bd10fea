"""Tools and structured outputs: how calls are read from text, and both over HTTP with a tiny model."""

import json

import openai
import pytest
from openai.types.chat import ChatCompletion
from serving import client_of, running
from test_llm import SIZES
from test_structured import EOS, PIECES
from text_model import text_model

from jspark import LLM
from serve.tools import reader

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} <tool_call> {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}"
    "{% endfor %} {% endfor %}z"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["abc", "bc"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "rest", "parameters": NOTHING}},
]
CHAT = [{"role": "user", "content": "abc"}]
#: Left to itself the tiny model writes little else where JSON may have them.
SPACES = ["26", *(str(i) for i, piece in PIECES.items() if piece == b"\n")]


@pytest.fixture(scope="module")
def client(goldens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    model = text_model(goldens / "qwen3_tiny", folder / "model", PIECES, EOS)
    (folder / "template.jinja").write_text(TEMPLATE)
    drafter = str(goldens / "dspark_qwen3_tiny_vanilla_trained")
    llm = LLM(str(model), drafter, chat_template=folder / "template.jinja", **SIZES)
    with running(llm) as run, client_of(run) as client:
        yield client
        run.assert_free()


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def named(tool: str) -> dict:
    return {"type": "function", "function": {"name": tool}}


CALL = '{"name": "add", "arguments": {"a": 1, "b": "<x>"}}'
OTHER = '{"name": "rest", "arguments": {}}'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("kind", "text", "content", "names"),
    [
        ("hermes", "no call < here <tool", "no call < here <tool", []),
        ("hermes", f"First.\n<tool_call>\n{CALL}\n</tool_call>", "First.\n", ["add"]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>\n", "", ["add", "rest"]),
        ("hermes", f"<tool_call>\n{CALL}", "", ["add"]),
        ("hermes", '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
        ("hermes", "<tool_call>not json</tool_call> so", "<tool_call>not json</tool_call> so", []),
        ("mistral", f"Well[TOOL_CALLS] [{CALL}, {OTHER}]", "Well", ["add", "rest"]),
        ("mistral", "[TOOL", "[TOOL", []),
        ("llama3_json", f"<|python_tag|>{CALL}", "", ["add"]),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", ["add"]),
        ("llama3_json", '{"a": 1}', '{"a": 1}', []),
        ("llama3_json", "plain {text}", "plain {text}", []),
        ("llama3_json", "[1, 2] is a list", "[1, 2] is a list", []),
    ],
)
def test_calls_are_read_from_text_in_any_pieces(kind, text, content, names, size):
    made = reader(kind)
    got, calls = "", []
    for piece in pieces(text, size):
        more, found = made.push(piece)
        got += more
        calls += found
    more, found = made.finish()
    assert got + more == content
    assert [c.name for c in [*calls, *found]] == names
    assert len({c.id for c in [*calls, *found]}) == len(names)
    for call in [*calls, *found]:
        assert isinstance(json.loads(call.arguments), dict)


def test_a_named_tool_must_be_called(client):

    done = client.chat.completions.create(
        model="model", messages=CHAT, tools=TOOLS, tool_choice=named("add"), temperature=0, max_tokens=60
    )
    ChatCompletion.model_validate(done.model_dump(), strict=True)
    [call] = done.choices[0].message.tool_calls
    assert (call.function.name, done.choices[0].message.content) == ("add", None)
    if done.choices[0].finish_reason == "stop":
        assert set(json.loads(call.function.arguments)) == {"a", "b"}
    chunks = client.chat.completions.create(
        model="model",
        messages=CHAT,
        tools=TOOLS,
        tool_choice=named("add"),
        temperature=0,
        max_tokens=60,
        stream=True,
    )
    deltas = [c.choices[0].delta for c in chunks]
    streamed = [t for d in deltas for t in d.tool_calls or ()]
    [whole] = streamed
    assert (whole.index, whole.function.name) == (0, "add")
    assert whole.function.arguments == call.function.arguments
    assert not "".join(d.content or "" for d in deltas)


def test_some_tool_must_be_called(client):
    done = client.chat.completions.create(
        model="model",
        messages=CHAT,
        tools=TOOLS[1:],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
        logit_bias=dict.fromkeys(SPACES, -1000),
    )
    assert done.choices[0].finish_reason == "tool_calls"
    [call] = done.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("rest", "{}")


def test_tools_may_be_left_alone(client):
    done = client.chat.completions.create(model="model", messages=CHAT, tools=TOOLS, temperature=0, max_tokens=5)
    plain = client.chat.completions.create(
        model="model", messages=CHAT, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=5
    )
    assert done.choices[0].message.content
    assert done.choices[0].message.tool_calls is None
    # Only where they may be called are they part of the prompt.
    assert done.usage.prompt_tokens > plain.usage.prompt_tokens


def test_calls_go_back_into_the_prompt(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": "bcbc"}'}}
    turns = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "bb"}]})
    done = client.chat.completions.create(model="model", messages=turns, temperature=0, max_tokens=2)
    assert done.usage.prompt_tokens == len("abc" + " " + "bcbc" + " " + "bb" + " " + "z")
    call["function"]["arguments"] = "[1"
    with pytest.raises(openai.BadRequestError, match="JSON object"):
        client.chat.completions.create(model="model", messages=turns)


def test_answers_fit_their_format(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": ["abc", "bc"]}}}
    done = client.chat.completions.create(
        model="model", messages=CHAT, response_format=form, temperature=0, max_tokens=40
    )
    assert json.loads(done.choices[0].message.content) in ("abc", "bc")
    for outputs, fits in (
        ({"regex": "(ab|bc)+"}, {"a", "b", "c"}),
        ({"choice": ["abc", "abd"]}, set("abcd")),
    ):
        got = client.completions.create(
            model="model", prompt="abc", temperature=0, max_tokens=20, extra_body={"structured_outputs": outputs}
        )
        assert got.choices[0].text
        assert set(got.choices[0].text) <= fits
    for wrong, words in (
        ({"structured_outputs": {"regex": "("}}, "expression"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "both given"),
        ({"response_format": {"type": "json_schema"}}, "schema is missing"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"tools": TOOLS[1:], "tool_choice": named("add")}, "not among the tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="model", messages=CHAT, extra_body=wrong)
