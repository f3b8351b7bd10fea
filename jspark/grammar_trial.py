"""The trial of a grammar, in a process of its own: run as a script by grammar.py, imports nothing of jspark.

Knows: how a constraint becomes a grammar of llguidance, and limits on a process. A hostile grammar can overflow
the stack or run for hours inside llguidance, which nothing can interrupt; here it takes down a process that
nobody misses.

Lines of JSON: first {"tokenizer", "vocab", "eos"} in; then {"kind", "text"} in, {"grammar"} or {"error"} out.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

#: Processor seconds and bytes that a trial may take. What passes is compiled again by the caller.
SECONDS = 3
MEMORY = 1 << 31
#: The caller's threads have several times this stack.
STACK = 1 << 20
#: A space, or a line break with some indentation: a model that only repeats whitespace comes to its end.
WHITESPACE = r"( |\t|\r?\n[ \t]{0,40})"


def limits() -> LLParserLimits:
    """Limits on the size of a grammar and on the work of a step, in llguidance's own units."""
    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def definition(kind: str, text: str) -> str:
    """llguidance's form of a constraint. Raises what its converters raise."""
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in json.loads(text)))
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def attempt(tokenizer: LLTokenizer, kind: str, text: str) -> dict[str, str]:
    """The grammar in llguidance's form, or why it cannot be used."""
    try:
        grammar = definition(kind, text)
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as e:  # converters raise what they like
        return {"error": str(e) or type(e).__name__}
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_error() and matcher.get_error().startswith("NoExtension"):
            return {"error": "no text can satisfy it"}
    return {"error": _reason(matcher.get_error())} if matcher.is_error() else {"grammar": grammar}


def _reason(message: str) -> str:
    """The line of a message that tells the reason."""
    unknown = re.match(r'Unimplemented keys: \["(.*)"\]', message)
    if unknown:
        return f"{unknown[1].replace('", "', ', ')} is not supported"
    inner = re.search(r"^\s*error: (.*)$", message, re.MULTILINE)
    lines = message.strip().splitlines() or ["unknown reason"]
    return (inner[1] if inner else lines[0])[:300]


def _serve() -> None:
    first = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(first["tokenizer"], n_vocab=first["vocab"], eos_token=first["eos"])
    for line in sys.stdin:
        task = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        with contextlib.suppress(ValueError, OSError):
            seconds = int(used.ru_utime + used.ru_stime) + SECONDS + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))
        print(json.dumps(attempt(tokenizer, task["kind"], task["text"])), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    threading.stack_size(STACK)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()
