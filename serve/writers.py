"""Answers → bodies of the OpenAI API, whole or in chunks.

Knows: completions and chats as clients read them, usage, and vLLM's and SGLang's figures of speculation.
Does not know: how bytes are sent (stream.py), or SGLang's own API (sglang.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from serve.loop import Call
from serve.params import Job
from serve.protocol import ChatRequest, CompletionRequest, Sampled
from serve.token_text import TokenTexts
from serve.tools import Call as ToolCall
from serve.tools import Reader, forced_calls, reader

if TYPE_CHECKING:
    from jspark.answer import Answer, Delta, Output

Fields = dict[str, Any]


class Writer:
    """What completions and chats share. block_size: γ, 0 without a drafter. answer_id: of the response."""

    kind: str
    chunk_kind: str

    def __init__(
        self,
        body: Sampled,
        job: Job,
        call: Call,
        model: str,
        texts: TokenTexts | None,
        block_size: int,
        answer_id: str,
    ):
        self._job, self._call, self._texts, self._block_size = job, call, texts, block_size
        self._head: Fields = {"id": answer_id, "created": int(time.time()), "model": model}
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._token_ids = bool(body.return_token_ids)
        self._spec_details = bool(body.return_spec_tokens_details)
        self._tokens = {a.request.id: 0 for a in call.answers}
        self._seen: set[int] = set()
        self._outputs: list[Output] = []

    # ── the whole answer ──────────────────────────────────────────────────────────────────────────────────────

    def whole(self, outputs: Sequence[tuple[Answer, Output]]) -> Fields:
        """The body of an answer that is not streamed."""
        self._outputs = [output for _, output in outputs]
        for answer, output in outputs:
            self._tokens[answer.request.id] = output.completion_tokens
        choices = [self._choice(answer, output) for answer, output in outputs]
        return self._head | {
            "object": self.kind,
            "choices": sorted(choices, key=lambda c: c["index"]),
            "usage": self._usage(),
            **self._whole_extras(outputs),
            **self._figures(),
        }

    def _choice(self, answer: Answer, output: Output) -> Fields:
        raise NotImplementedError

    def _whole_extras(self, outputs: Sequence[tuple[Answer, Output]]) -> Fields:
        return {}

    # ── chunks ────────────────────────────────────────────────────────────────────────────────────────────────

    def chunks(self, answer: Answer, delta: Delta) -> list[Fields]:
        """The chunks for a piece of news."""
        self._tokens[answer.request.id] += len(delta.token_ids)
        if delta.output:
            self._outputs.append(delta.output)
            self._tokens[answer.request.id] = delta.output.completion_tokens
        choices = self._delta_choices(answer, delta)
        self._seen.add(answer.request.id)
        return [self._chunk([choice]) for choice in choices]

    def _delta_choices(self, answer: Answer, delta: Delta) -> list[Fields]:
        raise NotImplementedError

    def last_chunks(self) -> list[Fields]:
        """What follows the last choice: usage where it was asked for, and figures of speculation."""
        figures = self._figures()
        if self._include_usage:
            return [self._chunk([]) | {"usage": self._usage()} | figures]
        if "sglext" in figures:
            return [self._chunk([]) | {"sglext": figures["sglext"]}]
        return []

    def _chunk(self, choices: list[Fields]) -> Fields:
        chunk = self._head | {"object": self.chunk_kind, "choices": choices}
        if self._continuous:
            chunk["usage"] = self._usage()
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────

    def index(self, answer: Answer) -> int:
        """The number of an answer's choice."""
        return answer.prompt * self._job.params.n + answer.index

    def _usage(self) -> Fields:
        first = [a for a in self._call.answers if a.index == 0]
        prompt, completion = sum(len(a.request.prompt) for a in first), sum(self._tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in first)},
        }

    def _figures(self) -> Fields:
        figures: Fields = {}
        if self._block_size:
            figures["metrics"] = {"speculative_decoding": vllm_figures(self._outputs, self._block_size)}
            if self._spec_details:
                figures["sglext"] = {"spec_tokens_details": sglang_figures(self._outputs)}
        return figures


class CompletionWriter(Writer):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionRequest, *args: Any):
        super().__init__(body, *args)
        self._body = body
        self._offsets: dict[int, int] = {}

    def _choice(self, answer: Answer, output: Output) -> Fields:
        ids, entries = list(output.output_ids), list(output.logprobs or [])
        choice = self._fields(answer, output.text or "", output.output_ids)
        if self._body.logprobs is not None and self._texts:
            if self._body.echo and output.prompt_logprobs is not None:
                ids, entries = [*answer.request.prompt, *ids], [*output.prompt_logprobs, *entries]  # type: ignore[list-item]
            start = 0 if self._body.echo and output.prompt_logprobs is not None else len(answer.echo)
            choice["logprobs"] = self._texts.completion(entries, ids, start, self._body.logprobs)
        return choice | self._end(answer, output)

    def _delta_choices(self, answer: Answer, delta: Delta) -> list[Fields]:
        first = answer.request.id not in self._seen
        if not (delta.text or delta.output or delta.logprobs or self._token_ids or self._continuous):
            return []
        choice = self._fields(answer, delta.text, delta.token_ids)
        if self._body.logprobs is not None and self._texts:
            entries: list[Any] = list(delta.logprobs or [])
            ids = list(delta.token_ids)
            start = self._offsets.get(answer.request.id, len(answer.echo))
            if first and self._body.echo:
                entries = [*answer.prompt_logprobs, *entries]
                ids, start = [*answer.request.prompt, *ids], 0
            written = self._texts.completion(entries, ids, start, self._body.logprobs)
            self._offsets[answer.request.id] = start + sum(map(len, written["tokens"]))
            choice["logprobs"] = written
        if delta.output:
            choice |= self._end(answer, delta.output)
        return [choice]

    def _fields(self, answer: Answer, text: str, ids: list[int]) -> Fields:
        choice: Fields = {"index": self.index(answer), "text": text, "logprobs": None, "finish_reason": None}
        if self._token_ids:
            choice["token_ids"] = ids
            if answer.request.id not in self._seen:
                choice["prompt_token_ids"] = list(answer.request.prompt)
        return choice

    def _end(self, answer: Answer, output: Output) -> Fields:
        end: Fields = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None and self._texts:
            end["prompt_logprobs"] = self._texts.prompt(output.prompt_logprobs, self._body.prompt_logprobs)
        return end


class ChatWriter(Writer):
    """`/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest, *args: Any):
        super().__init__(body, *args)
        self._body = body
        chat = self._job.conversation
        assert chat is not None
        self._forced = chat.forced
        self._readers: dict[int, Reader] = {}
        if chat.tools is not None:
            self._readers = {a.request.id: reader(chat.tools) for a in self._call.answers}
        self._calls = dict.fromkeys(self._tokens, 0)
        self._forced_text = dict.fromkeys(self._tokens, "")

    def _choice(self, answer: Answer, output: Output) -> Fields:
        content, calls = self._read(answer, output.text or "", ended=True)
        message: Fields = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [_tool_call(c) for c in calls]
        choice: Fields = {
            "index": self.index(answer),
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": self._reason(answer, output),
            "stop_reason": output.stop_reason,
        }
        if self._token_ids:
            choice["token_ids"] = output.output_ids
        return choice

    def _whole_extras(self, outputs: Sequence[tuple[Answer, Output]]) -> Fields:
        extras: Fields = {}
        answer, output = outputs[0]
        if self._token_ids:
            extras["prompt_token_ids"] = list(answer.request.prompt)
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None and self._texts:
            extras["prompt_logprobs"] = self._texts.prompt(output.prompt_logprobs, self._body.prompt_logprobs)
        return extras

    def _delta_choices(self, answer: Answer, delta: Delta) -> list[Fields]:
        ended = delta.output is not None
        content, calls = self._read(answer, delta.text, ended)
        first = answer.request.id not in self._seen
        choices = []
        if first:
            choices.append(self._piece(answer, {"role": "assistant", "content": ""}))
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        bare = not calls and not ended
        if content or (bare and (logprobs or self._token_ids or (self._continuous and not first))):
            piece = self._piece(answer, {"content": content}, logprobs)
            if self._token_ids:
                piece["token_ids"] = delta.token_ids
            choices.append(piece)
            logprobs = None
        elif ended and (logprobs or (self._token_ids and delta.token_ids)):
            piece = self._piece(answer, {"content": ""}, logprobs)
            if self._token_ids:
                piece["token_ids"] = delta.token_ids
            choices.append(piece)
        if calls:
            start = self._calls[answer.request.id] - len(calls)
            listed = [{"index": start + i} | _tool_call(c) for i, c in enumerate(calls)]
            choices.append(self._piece(answer, {"tool_calls": listed}))
        if delta.output is not None:
            end = self._piece(answer, {}) | {
                "finish_reason": self._reason(answer, delta.output),
                "stop_reason": delta.output.stop_reason,
            }
            choices.append(end)
        return choices

    def _piece(self, answer: Answer, delta: Fields, logprobs: Fields | None = None) -> Fields:
        return {"index": self.index(answer), "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, entries: Any) -> Fields | None:
        if entries is None or not self._texts:
            return None
        return self._texts.chat(entries, self._body.top_logprobs or 0)

    def _read(self, answer: Answer, text: str, ended: bool) -> tuple[str, list[ToolCall]]:
        """Content and tool calls in the next piece of an answer's text."""
        key = answer.request.id
        calls: list[ToolCall] = []
        if self._forced is not None:
            self._forced_text[key] += text
            content = ""
            if ended:
                calls = forced_calls(self._forced, self._forced_text[key])
                content = "" if calls else self._forced_text[key]
        elif key in self._readers:
            content, calls = self._readers[key].push(text)
            if ended:
                rest, more = self._readers[key].finish()
                content, calls = content + rest, [*calls, *more]
        else:
            content = text
        self._calls[key] += len(calls)
        return content, calls

    def _reason(self, answer: Answer, output: Output) -> str:
        # The OpenAI API says "stop" where the one tool to call was named.
        called = self._calls[answer.request.id] and not self._forced
        return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason


def _tool_call(call: ToolCall) -> Fields:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _drafts(outputs: Sequence[Output]) -> tuple[list[int], list[int], int, int, int]:
    """Of steps with something to verify: histograms of accepted tokens and windows; steps, accepted, verified."""
    accepted = [sum(column) for column in zip(*(o.accepted_histogram for o in outputs), strict=True)]
    windows = [sum(column) for column in zip(*(o.window_histogram for o in outputs), strict=True)]
    if windows:
        accepted[0] -= windows[0]
        windows[0] = 0
    steps = sum(windows)
    return accepted, windows, steps, _weighted(accepted), _weighted(windows)


def _weighted(histogram: Sequence[int]) -> int:
    return sum(n * count for n, count in enumerate(histogram))


def vllm_figures(outputs: Sequence[Output], block_size: int) -> Fields:
    """vLLM's `metrics.speculative_decoding` of a request. The mean counts the target's own token."""
    accepted_histogram, _, steps, accepted, verified = _drafts(outputs)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / verified if verified else 0.0,
        "acceptance_histogram": accepted_histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": verified,
        "num_spec_tokens": block_size,
    }


def sglang_figures(outputs: Sequence[Output]) -> Fields:
    """SGLang's details of a request; caps are verify windows."""
    accepted_histogram, windows, steps, accepted, verified = _drafts(outputs)
    return {
        "spec_accept_rate": accepted / verified if verified else 0.0,
        "spec_accept_length": 1 + accepted / steps if steps else 0.0,
        "spec_cap_length": verified / steps if steps else 0.0,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": verified,
        "spec_verify_ct": steps,
        "spec_correct_drafts_histogram": accepted_histogram,
        "spec_cap_lens_histogram": windows,
    }
