"""Bodies of requests → prompts and sampling parameters.

Knows: which field means what in jspark's words. Does not know: HTTP, or what becomes of the answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from jspark.errors import UserError
from jspark.request import SamplingParams
from serve.chat import Conversation, conversation
from serve.errors import HttpError
from serve.protocol import ChatRequest, CompletionRequest, GenerateRequest, Sampled
from serve.settings import ToolFormat

if TYPE_CHECKING:
    from jspark.answer import Answer
    from jspark.llm import LLM

#: Tokens of a completion when nothing is said: the OpenAI API's, and SGLang's for /generate.
COMPLETION_TOKENS, GENERATE_TOKENS = 16, 128
_FIELDS = {f.name for f in fields(SamplingParams)}
#: Fields with the same name and meaning on both sides.
_SAME = _FIELDS & set(Sampled.model_fields) - {"max_tokens", "logit_bias", "structured_outputs"}


@dataclass(frozen=True)
class Job:
    """What is asked of the engine. prompts: texts or token ids. conversation: of a chat."""

    prompts: Sequence[str | Sequence[int]]
    params: SamplingParams
    conversation: Conversation | None = None


def completion_job(body: CompletionRequest) -> Job:
    """The job of a completion; UserError for values out of range."""
    given = _shared(body)
    given["max_tokens"] = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    given["echo"] = bool(body.echo)
    given["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    return Job(prompt, SamplingParams(**given))


def chat_job(llm: LLM, body: ChatRequest, parser: ToolFormat) -> Job:
    """The job of a chat; UserError for values out of range, or messages that the template refuses."""
    given = _shared(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise HttpError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    given["max_tokens"] = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true; add it", param="top_logprobs")
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    chat = conversation(llm, body, parser)
    if chat.constraint is not None:
        if "structured_outputs" in given:
            raise HttpError(
                400, "a forced tool call and another constraint exclude each other; drop one", param="tool_choice"
            )
        given["structured_outputs"] = chat.constraint
    if chat.stop:
        stop = given.get("stop", ())
        given["stop"] = (*([stop] if isinstance(stop, str) else stop), *chat.stop)
    if chat.special_marks:
        given["skip_special_tokens"] = False
    params = SamplingParams(**given)
    return Job([chat.ids], params, chat)


def generate_job(body: GenerateRequest) -> Job:
    """The job of SGLang's /generate; UserError for values out of range."""
    prompts: Any = body.text if body.input_ids is None else body.input_ids
    if prompts is None or (body.text is not None and body.input_ids is not None):
        raise HttpError(400, "text and input_ids: one of them must be given; correct it", param="text")
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    given: dict[str, Any] = {"max_tokens": GENERATE_TOKENS}
    sampling = body.sampling_params
    if sampling is not None:
        renamed = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
        for name in type(sampling).model_fields:
            ours = renamed.get(name, name)
            if ours in _FIELDS and ours != "logit_bias" and getattr(sampling, name) is not None:
                given[ours] = getattr(sampling, name)
        given |= _bias(sampling.logit_bias)
        given |= _constraint({"json": sampling.json_schema, "regex": sampling.regex, "grammar": sampling.ebnf})
    if body.disable_speculative_decoding:
        given["speculative"] = False
    if body.return_logprob:
        given["logprobs"] = body.top_logprobs_num or 0
        if body.logprob_start_len not in (None, -1):
            if body.logprob_start_len != 0:
                raise HttpError(
                    400,
                    "logprob_start_len can be -1 (the answer) or 0 (all); correct it",
                    param="logprob_start_len",
                )
            given["prompt_logprobs"] = given["logprobs"]
    return Job(prompts, SamplingParams(**given))


def _shared(body: Sampled) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream: true; add it, or drop them", param="stream_options")
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    given |= _bias(body.logit_bias)
    if body.disable_speculative_decoding:
        given["speculative"] = False
    asked: dict[str, Any] = {"regex": body.regex, "grammar": body.ebnf}
    if body.structured_outputs is not None:
        asked |= {k: v for k, v in body.structured_outputs.model_dump(by_alias=True).items() if v is not None}
    form = body.response_format
    if form is not None and form.type == "json_object":
        asked["json_object"] = True
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise HttpError(
                400, "response_format.json_schema.schema is missing; add the schema", param="response_format"
            )
        if asked.get("json") is not None:
            raise HttpError(400, "two JSON schemas were given; give one", param="response_format")
        asked["json"] = form.json_schema.schema_
    return given | _constraint(asked)


def _bias(given: dict[str, float] | None) -> dict[str, Any]:
    if not given:
        return {}
    try:
        return {"logit_bias": {int(token): bias for token, bias in given.items()}}
    except ValueError:
        raise HttpError(400, "logit_bias: keys must be token ids; correct them", param="logit_bias") from None


def _constraint(asked: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    return {"structured_outputs": given} if given else {}


def answers(llm: LLM, job: Job, longest: int) -> list[Answer]:
    """The answers to a job, ready for the engine. longest: prompt tokens allowed, 0 for no limit of our own.

    Takes its time with long prompts and large grammars, so it is not for the event loop. Raises UserError or
    HttpError for what cannot be served.
    """
    engine = llm.engine
    context = engine.config.context_length
    prompts, counts = [], []
    for prompt in job.prompts:
        ids = llm.target.text_ids(prompt) if isinstance(prompt, str) else prompt
        counts.append(len(ids))
        # An echo shows the text as it came.
        prompts.append(prompt if job.params.echo else ids)
    wanted = job.params.max_tokens if isinstance(job.params.max_tokens, int) else 1
    for count in counts:
        if longest and count > longest:
            raise HttpError(
                400,
                f"the prompt has {count} tokens and this server takes {longest}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        if count + wanted > context:
            raise HttpError(
                400,
                f"the prompt has {count} tokens and {wanted} are to come, and the context holds {context}; "
                "shorten the prompt or lower max_tokens",
                param="prompt",
                code="context_length_exceeded",
            )
    params: Any = job.params
    if params.max_tokens is None:
        # Whatever fits: the rest of the context, or of the pool where that is smaller.
        allocator = engine.scheduler.allocator
        room = min(context, allocator.capacity * allocator.page_size - engine.block_size)
        params = [replace(job.params, max_tokens=max(room - count, 1)) for count in counts]
    return llm.prepare(prompts, params)


def as_http(error: UserError) -> HttpError:
    """A 400 that names the parameter at fault, where the message begins with one."""
    named = re.match(r"(\w+)(?: is |: )", str(error))
    return HttpError(400, str(error), param=named[1] if named and named[1] in _FIELDS else None)
