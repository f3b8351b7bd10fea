"""Chat templates: what transformers gives them, tools, named ones, and hostile ones that cannot do harm."""

import contextlib
import datetime
import json
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from text_model import text_model
from tokenizers import models

from jspark import chat_template
from jspark.chat_template import ChatTemplate
from jspark.checkpoint import gguf_vocabulary
from jspark.errors import UserError
from jspark.llm import LLM
from jspark.loading import load_target
from jspark.tokenizer import Tokenizer, from_folder

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
]
#: In the manner of Qwen's.
TOOL_TEMPLATE = """\
{%- if tools %}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<response>{{ m.content }}</response>
{%- else %}<{{ m.role }}>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}
{%- endif %}
{%- endfor %}"""


def render(template: str, messages=CHAT, **variables) -> str:
    return ChatTemplate({"default": template}, "x", {}).render(messages, **variables)


def test_template_features():
    block = "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    assert render(block) == "hi\n"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}.") == "hi."
    assert render("{{ strftime_now('%Y') }}") == str(datetime.date.today().year)
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert render("{{ {'a': '<é>'} | tojson(indent=1) }}") == '{\n "a": "<é>"\n}'
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{{ 'T' if tools is none else tools[0].type }}") == "T"
    assert render("{{ 'T' if tools is none else tools[0].type }}", tools=TOOLS) == "function"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "\ud83d é\0"}]) == "\ud83d é\0"


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ raise_exception('one\n\x1b[31mtwo' + 'x' * 5000) }}", "one \\u001b[31mtwo"),
        ("{% if %}", "syntax error in line 1"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "nothing"),
    ],
)
def test_templates_that_fail(template, word):
    with pytest.raises(UserError) as e:
        render(template)
    assert word in str(e.value)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) <= 2100


def test_tools_and_their_results_reach_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    text = render(TOOL_TEMPLATE, chat, tools=TOOLS)
    want = (
        f"<tools>{json.dumps(TOOLS[0])}</tools>\n<user>hi<assistant>"
        '<call>{"name": "add", "arguments": {"a": 1}}</call><response>2</response>'
    )
    assert text == want
    assert "<tools>" not in render(TOOL_TEMPLATE, chat, tools=[])


def test_tools_that_the_template_ignores_are_refused():
    for template in ("{{ messages[0].content }}", "{# tools #}your tools", "{% set tools = none %}{{ tools }}"):
        with pytest.raises(UserError, match="no place for them; drop the tools"):
            render(template, tools=TOOLS)
    for tools in ("add", [1], {"type": "function"}, 7):
        with pytest.raises(UserError, match="tools are a list of objects"):
            render(TOOL_TEMPLATE, tools=tools)
    for messages in ([{"role": "user", "content": b"raw"}], [{"role": "user", "content": object()}]):
        with pytest.raises(UserError, match="must be plain data"):
            render(TOOL_TEMPLATE, messages)


def test_named_templates(tmp_path):
    tokenizers.Tokenizer(models.BPE({}, [])).save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"

    def prompts() -> tuple[str, str]:
        made = from_folder(tmp_path)
        assert isinstance(made, Tokenizer)
        return made.apply_chat_template(CHAT), made.apply_chat_template(CHAT, tools=TOOLS)

    named = {"tool_use": "t{{ tools }}", "default": "d{{ tools }}"}
    want = ("dNone", f"t{TOOLS}")
    for written in (named, [{"name": n, "template": t} for n, t in named.items()]):
        config.write_text(json.dumps({"chat_template": written}))
        assert prompts() == want
    # Files come before the configuration.
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T{{ tools }}")
    with pytest.raises(UserError, match="chat templates for tool_use and none for a plain chat"):
        prompts()
    (tmp_path / "chat_template.jinja").write_text("D{{ tools }}")
    assert prompts() == ("DNone", f"T{TOOLS}")
    pairs = {"tokenizer.chat_template": "d{{ tools }}", "tokenizer.chat_template.tool_use": "t{{ tools }}"}
    assert gguf_vocabulary.templates(pairs | {"tokenizer.chat_templates": ["tool_use"]}) == named


def test_a_template_of_ones_own(goldens, tmp_path, capsys):
    from jspark.cli import main

    folder = text_model(goldens / "qwen3_tiny", tmp_path / "model", {})
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %} tools{% endif %}")
    target = load_target(str(folder))
    mine = LLM(target, chat_template=file, context_length=64).target
    assert target.chat_ids(CHAT) == target.text_ids("hi z")
    assert mine.chat_ids(CHAT) == mine.text_ids("hi")
    assert mine.chat_ids(CHAT, TOOLS) == mine.text_ids("hi tools")
    with pytest.raises(UserError, match="no place for them"):
        target.chat_ids(CHAT, TOOLS)
    with pytest.raises(UserError, match=r"gone\.jinja cannot be read"):
        LLM(str(tmp_path / "never looked for"), chat_template=tmp_path / "gone.jinja")
    generate = ["generate", "--model-path", str(folder), "--prompt", "a", "--chat-template", str(file)]
    assert main(generate) == 2
    assert "does nothing without --chat" in capsys.readouterr().err


# ── hostile templates ─────────────────────────────────────────────────────────────────────────────────────────

BOUND = "was stopped, because it"
HOSTILE = {
    "escape through the class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "escape through format": ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "SecurityError"),
    "escape through attr": ("{{ messages|attr('__class__') }}", ""),
    "escape through a macro": ("{% macro m() %}{% endmacro %}{{ m.__globals__ }}", ""),
    "a change of the messages": ("{{ messages.append(1) }}", "SecurityError"),
    "a file": ("{% include '/etc/passwd' %}", "TypeError"),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    "loops in loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", BOUND),
    "a recursive loop": (
        "{% for i in [1] recursive %}{% for j in range(9) %}{{ loop(range(99999)) }}{% endfor %}{% endfor %}",
        "",
    ),
    "a long text": ("{{ 'a' * 10**9 }}", BOUND),
    "a longer text": ("{{ 'a' * 10**15 }}", BOUND),
    "a long list": ("{{ [0] * 10**9 }}", BOUND),
    "a text that doubles": (
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        BOUND,
    ),
    "many small pieces": ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", "writes more than"),
    "pieces in a macro": (
        "{% macro m() %}{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endmacro %}{{ m() }}",
        BOUND,
    ),
    "center": ("{{ 'a'|center(10**9) }}", BOUND),
    "ljust": ("{{ 'a'.ljust(10**10) }}", BOUND),
    "format": ("{{ '%1000000000d' % 1 }}", BOUND),
    "format of its own": ("{{ '{:1000000000}'.format(1) }}", BOUND),
    "indent": ("{{ 'a\na'|indent(10**9) }}", BOUND),
    "batch": ("{{ [1]|batch(10**9, 0)|list }}", BOUND),
    "slice": ("{{ [1]|slice(10**9)|list }}", BOUND),
    "lipsum": ("{{ lipsum(n=10**6) }}", BOUND),
    "tojson": ("{{ [[[[1]]]]|tojson(indent=10**8) }}", BOUND),
    "a large power": ("{{ 9**(9**9) }}", BOUND),
    "a power of powers": ("{{ (2**99999999) % 7 }}", ""),
    "a list of itself, doubled": (
        "{% set a = [1,1] %}" + "{% set a = [a,a] %}" * 60 + "{{ a }}",
        BOUND,
    ),
    "lists compared": (
        "{% set a = [1,1] %}{% set b = [1,1] %}" + "{% set a = [a,a] %}{% set b = [b,b] %}" * 60 + "{{ a == b }}",
        BOUND,
    ),
    "a macro without end": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "brackets": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", ""),
    "lists in lists": ("{{ " + "[" * 5000 + "]" * 5000 + " }}", ""),
    "ifs in ifs": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, ""),
    "additions": ("{{ 1" + "+1" * 100_000 + " }}", ""),
    "a slow pattern": ("{{ ('<' * 200000)|striptags|urlize }}", ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    template, word = HOSTILE[name]
    monkeypatch.setattr(chat_template, "_WALL_SECONDS", 1.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if word:
        with pytest.raises(UserError) as e:
            render(template)
        assert word in str(e.value)
        assert "\n" not in str(e.value)
    else:  # harmless, or refused by one part or another
        with contextlib.suppress(UserError):
            assert "class" not in render(template)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB
    assert render("{{ messages[0].content }}") == "hi"


def test_the_rendering_process_can_write_and_start_nothing(tmp_path):
    """What an escape from the sandbox would find."""
    import subprocess
    import sys

    code = (
        "import os, sys\nfrom jspark import template_worker as w\n"
        "w.receive = lambda pipe, limit=None: probe()\n"
        "def probe():\n"
        "    try: os.write(os.open('file', os.O_CREAT | os.O_WRONLY), b'x')\n"
        "    except OSError: sys.stderr.write('held back')\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "w.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, env=os.environ)
    assert done.stderr == b"held back"
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size == 0


def test_threads_share_the_process_and_a_hostile_one_costs_the_others_nothing(monkeypatch):
    monkeypatch.setattr(chat_template, "_WALL_SECONDS", 1.5)

    def good(i: int) -> str:
        return render("{{ messages[0].content }}", [{"role": "user", "content": str(i)}])

    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(render, "{{ 9**(9**9) }}") for _ in range(2)]
        assert list(pool.map(good, range(200))) == [str(i) for i in range(200)]
        assert all(isinstance(b.exception(), UserError) for b in bad)


def test_an_interrupted_rendering_leaves_no_answer_behind(monkeypatch):
    assert render("1") == "1"
    receive = chat_template.template_worker.receive

    def interrupted(*args):
        monkeypatch.setattr(chat_template.template_worker, "receive", receive)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_template.template_worker, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render("2")
    assert render("3") == "3"
    assert threading.active_count() < 20


def test_a_forked_process_has_a_renderer_of_its_own():
    assert render("1") == "1"
    mine = chat_template._worker
    assert mine is not None
    mine.owner = -1  # as a child finds it
    assert render("2") == "2"
    assert mine.process.poll() is None
    mine.close()
