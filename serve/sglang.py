"""SGLang's own API: /generate.

Knows: its bodies. Does not know: how they are sent (stream.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from serve.loop import Call
from serve.params import Job
from serve.protocol import GenerateRequest
from serve.token_text import TokenTexts
from serve.writers import sglang_figures

if TYPE_CHECKING:
    from jspark.answer import Answer, Delta, Output

Fields = dict[str, Any]


class GenerateWriter:
    """One object a prompt and continuation; a stream repeats it with the text so far."""

    def __init__(
        self,
        body: GenerateRequest,
        job: Job,
        call: Call,
        model: str,
        texts: TokenTexts | None,
        block_size: int,
        answer_id: str,
    ):
        self._body, self._job, self._call, self._texts = body, job, call, texts
        self._block_size, self._id = block_size, body.rid or answer_id
        single = isinstance(body.text, str) or (body.input_ids is not None and isinstance(body.input_ids[0], int))
        self._single = single and job.params.n == 1
        self._so_far: dict[int, Fields] = {}

    def whole(self, outputs: Sequence[tuple[Answer, Output]]) -> Fields | list[Fields]:
        """The body of an answer that is not streamed."""
        ordered = sorted(outputs, key=lambda pair: self._index(pair[0]))
        found = [self._object(a, o.text or "", o.output_ids, o.logprobs or [], o) for a, o in ordered]
        return found[0] if self._single else found

    def chunks(self, answer: Answer, delta: Delta) -> list[Fields]:
        """The answer so far."""
        so_far = self._so_far.setdefault(answer.request.id, {"text": "", "ids": [], "logprobs": []})
        so_far["text"] += delta.text
        so_far["ids"] += delta.token_ids
        so_far["logprobs"] += delta.logprobs or []
        written = self._object(answer, so_far["text"], list(so_far["ids"]), so_far["logprobs"], delta.output)
        return [written if self._single else {"index": self._index(answer)} | written]

    def last_chunks(self) -> list[Fields]:
        """Nothing follows."""
        return []

    def _index(self, answer: Answer) -> int:
        return answer.prompt * self._job.params.n + answer.index

    def _object(self, answer: Answer, text: str, ids: list[int], entries: Any, output: Output | None) -> Fields:
        number = self._index(answer)
        meta: Fields = {
            "id": self._id if self._single else f"{self._id}-{number}",
            "finish_reason": None if output is None else _reason(output),
            "prompt_tokens": len(answer.request.prompt),
            "completion_tokens": len(ids),
            "cached_tokens": answer.cached_tokens,
        }
        if output is not None:
            meta["e2e_latency"] = time.perf_counter() - self._call.started
            if self._block_size:
                meta |= sglang_figures([output])
        if self._body.return_logprob and self._texts:
            with_text, top = bool(self._body.return_text_in_logprobs), self._body.top_logprobs_num or 0
            pairs = [(e.token_id, e.logprob) for e in entries]
            meta["output_token_logprobs"] = self._texts.triples(pairs, with_text)
            if top:
                meta["output_top_logprobs"] = [self._texts.triples(e.top[:top], with_text) for e in entries]
            if self._job.params.prompt_logprobs is not None:
                prompt = answer.prompt_logprobs
                ids_of = answer.request.prompt
                known = [(t, None if e is None else e.logprob) for t, e in zip(ids_of, prompt, strict=False)]
                meta["input_token_logprobs"] = self._texts.triples(known, with_text)
        return {"text": text, "output_ids": ids, "meta_info": meta}


def _reason(output: Output) -> Fields:
    if output.finish_reason == "length":
        return {"type": "length", "length": output.completion_tokens}
    if output.finish_reason == "stop":
        return {"type": "stop", "matched": output.stop_reason}
    return {"type": "abort", "message": str(output.stop_reason or "the answer broke off")}
