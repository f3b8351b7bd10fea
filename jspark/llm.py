"""The Python interface: prompts in, text out.

Knows: text and token ids, stop strings, chat templates; how many iterators share one engine.
Does not know: batching and steps (engine.py), how models are found and loaded (loading.py), HTTP.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from numbers import Integral
from os import PathLike, fspath
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh

import jspark
from jspark import probe, programs
from jspark.answer import Answer, Delta, Output
from jspark.budget import Auto, Full, Policy, Threshold, parse_policy
from jspark.calibration import Temperatures, read_temperatures
from jspark.chat_template import read_template
from jspark.config import Algorithm, DType, EngineConfig, LoadFormat, VerifyMode
from jspark.cost import CostTable
from jspark.engine import Engine
from jspark.errors import UserError
from jspark.grammar import Grammar, Grammars
from jspark.loading import Draft, Target, find_drafter, load_drafter, load_target
from jspark.profile import Tell, tell_nobody
from jspark.record import Observer, StepRecord
from jspark.request import FinishReason, Request, SamplingParams
from jspark.structured import StructuredOutputs
from jspark.text import TextStream
from jspark.trace import Header, TraceWriter

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_ENGINE_FIELDS = {f.name for f in fields(EngineConfig)} - {"dtype"}


class LLM:
    """A target, with or without a drafter, that answers prompts. Iterators may be interleaved, and used from
    several threads: they take turns, a step at a time.

    model: a folder, a GGUF file, a built-in name, a Hub id (org/name, org/name@revision, org/name:FILE.gguf), or
    a `Target` that other LLMs share. draft: a drafter's folder or Hub id, or "untrained" for one of random
    weights. speculative_algorithm: follows from the drafter when not given. revision, draft_revision: of models
    of the Hub. offline: nothing is fetched. load_format: "dummy" gives the target random weights, to time shapes
    of which only config.json is at hand. served_model_name: in outputs; the checkpoint's name when not given.
    chat_template: a file to use in place of the checkpoint's. draft_anchor_predicts: whether the drafter's row 0
    predicts, for checkpoints that do not say so. draft_probe: a trial answer that warns when hardly any draft is
    accepted. dtype: float32 on the CPU and bfloat16 elsewhere when not given.
    policy: how much of each block is verified, as an object or in the command line's words; auto searches by cost
    where the drafter has a trained confidence head and there is a cost table, and verifies everything else. cost:
    the cost table, or its file; else the one kept for this model on this device, if there is one. measure_cost:
    where there is none, and the policy would use it, measures one now (`argmax` does so unasked); tell: hears how
    far that is. sts: temperatures of the drafter's confidence, one a drafted
    token (`calibration.read_temperatures`). seed: of the untrained drafter, and of the requests that bring
    none. observer: sees a `StepRecord` of every step; request ids rise in the order of prompts. trace_out: a file
    that every step is recorded in (`jspark.trace`), whole after `trace.close` or at the interpreter's end. engine:
    fields of `EngineConfig`, such as verify_mode, block_size, max_running_requests, page_size, max_total_tokens,
    context_length, chunked_prefill_size, attention_backend, prefix_cache, background_compile.

    Raises:
        UserError: something cannot be loaded, or the arguments contradict each other.
    """

    def __init__(
        self,
        model: str | PathLike[str] | Target,
        draft: str | PathLike[str] | None = None,
        speculative_algorithm: Algorithm | None = None,
        *,
        revision: str | None = None,
        draft_revision: str | None = None,
        offline: bool = False,
        load_format: LoadFormat = "auto",
        served_model_name: str | None = None,
        chat_template: str | PathLike[str] | None = None,
        draft_anchor_predicts: bool | None = None,
        draft_probe: bool = True,
        dtype: DType | None = None,
        policy: str | Policy = "auto",
        cost: CostTable | str | PathLike[str] | None = None,
        measure_cost: bool = False,
        tell: Tell = tell_nobody,
        sts: Temperatures | Sequence[float] | None = None,
        seed: int | None = None,
        mesh: Mesh | None = None,
        observer: Observer | None = None,
        trace_out: str | PathLike[str] | None = None,
        **engine: Any,
    ):
        unknown = sorted(engine.keys() - _ENGINE_FIELDS)
        if unknown:
            raise UserError(f"{unknown[0]} is no setting of LLM; there are {', '.join(sorted(_ENGINE_FIELDS))}")
        mode = engine.get("verify_mode", "compact")
        if mode not in get_args(VerifyMode):
            raise UserError(f"verify_mode is {mode!r}; it must be {', '.join(get_args(VerifyMode))}")
        EngineConfig(**engine)  # refuses what is out of range before anything is loaded
        if not isinstance(mesh, Mesh | None):
            raise UserError(f"mesh is {mesh!r}; it must be a jax.sharding.Mesh, or None for one device")
        if seed is not None and not isinstance(seed, Integral):
            raise UserError(f"seed is {seed!r}; it must be a whole number")
        self._policy = parse_policy(policy) if isinstance(policy, str) else policy
        if not callable(getattr(self._policy, "plan", None)):
            raise UserError(f"policy is {policy!r}; it must be a policy or its name, such as 'full'")
        for what, path in (("model", model), ("draft", draft)):
            if not isinstance(path, str | PathLike | Target | None) or (what, path) == ("model", None):
                raise UserError(f"{what} is {path!r}; it must be the path of a checkpoint")
        spec = None if draft is None else fspath(draft)
        name = model.name if isinstance(model, Target) else fspath(model)
        found = find_drafter(
            spec, speculative_algorithm, draft_anchor_predicts, draft_revision, offline, target=name
        )
        self._cost = cost if isinstance(cost, CostTable | None) else CostTable.from_file(fspath(cost))
        self._measure_cost, self._tell = measure_cost, tell
        self._refuse_unused(found, engine.get("block_size"), mode, sts)
        if not (found and found.checkpoint and found.checkpoint.config.confidence != "none"):
            # No confidence, or the confidence of random weights: nothing to search by.
            self._policy = Full() if self._policy == Auto() else self._policy
        if sts is None and found and found.calibration and not engine.get("block_size"):
            sts = read_temperatures(found.calibration)
        self._sts, self._observer, self._traces = sts, observer, trace_out is not None
        template = None if chat_template is None else read_template(chat_template)
        programs.use_compilation_cache()
        if not isinstance(model, Target):
            model = load_target(
                fspath(model),
                dtype,
                mesh,
                draft=found,
                revision=revision,
                offline=offline,
                load_format=load_format,
            )
        elif revision is not None:
            raise UserError(
                "the target is loaded already, so a revision of it cannot be chosen; drop the revision"
            )
        elif load_format != "auto":
            raise UserError("the target is loaded already, so how to load it cannot be chosen; drop load_format")
        elif dtype not in (None, model.dtype) or mesh not in (None, model.mesh):
            raise UserError("the target is loaded already; its dtype and mesh cannot be changed, load it again")
        self.target = model if template is None else model.with_chat_template(template, str(chat_template))
        self.served_model_name = served_model_name or model.name
        self.algorithm: Algorithm = found.algorithm if found else "NONE"
        #: The drafter's name; None without one.
        self.draft_name = found.name if found else None
        self._drafter = load_drafter(found, model, seed or 0) if found else None
        self._config = EngineConfig(dtype=model.dtype, **engine)
        self._engine: Engine | None = None
        self._seeds = None if seed is None else np.random.default_rng(seed % 2**64)
        self._ids = itertools.count()
        self._live: dict[int, tuple[Answer, dict[int, Answer]]] = {}
        # Held while requests and the engine change, not while a caller looks at an answer.
        self._lock = threading.RLock()
        self._config = self.engine.config
        #: What writes `trace_out`; None without one.
        self.trace = None if trace_out is None else TraceWriter(fspath(trace_out), self._trace_header())
        if self._drafter and found and found.checkpoint and draft_probe:
            prompt = model.text_ids(probe.TEXT) if model.tokenizer else []
            prompt = prompt or probe.arbitrary_prompt(model.config.vocab_size)
            probe.probe(self.engine, (model.model, model.config), self._drafter, prompt, model.mesh)

    def _refuse_unused(self, draft: Draft | None, block_size: int | None, mode: VerifyMode, sts: object) -> None:
        """UserError for settings of a drafter that is not there, or of a head that it does not have."""
        if draft is None:
            for what, given in (
                ("a block size", block_size),
                ("a verify mode", mode != "compact"),
                ("a verify policy", self._policy not in (Auto(), Full())),
                ("a cost table", self._cost is not None),
                ("a confidence calibration", sts is not None),
            ):
                if given:
                    raise UserError(f"{what} was given without a drafter; name a drafter or drop it")
        elif draft.checkpoint and draft.checkpoint.config.confidence == "none":
            for what, given in (
                ("a threshold policy", isinstance(self._policy, Threshold)),
                ("a confidence calibration", sts is not None),
            ):
                if given:
                    raise UserError(f"{what} needs a confidence head, which this drafter does not have; drop it")

    def _observe(self, record: StepRecord) -> None:
        if self._observer is not None:
            self._observer(record)
        if self.trace is not None:
            self.trace(record)

    def _aborted(self, request_id: int, reason: FinishReason) -> None:
        if self.trace is not None:
            self.trace.end(request_id, reason)

    def _trace_header(self) -> Header:
        engine = self.engine
        table = engine.temperatures
        return Header(
            model=self.target.name,
            drafter=self.draft_name,
            block_size=engine.block_size,
            verify_mode=self._config.verify_mode,
            policy=repr(self._policy),
            page_size=self._config.page_size,
            overlap=engine.overlap,
            temperatures=None if table is None else table.tolist(),
            versions={"jspark": jspark.__version__, "jax": jax.__version__, "numpy": np.__version__},
            device=self.target.mesh.devices.flat[0].device_kind,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of target and drafter; what the two share counts once."""
        leaves = {id(x): x for x in jax.tree.leaves((self.target.model, self._drafter and self._drafter[0]))}
        return sum(leaf.nbytes for leaf in leaves.values())

    @property
    def engine(self) -> Engine:
        """The engine; a fresh one after a step that failed, since a failed step may have lost its buffers."""
        if self._engine is None:
            target = (self.target.model, self.target.config)
            try:
                self._engine = Engine(
                    self._config,
                    target,
                    self._drafter,
                    policy=self._policy,
                    cost=self._cost,
                    measure_cost=self._measure_cost,
                    tell=self._tell,
                    mesh=self.target.mesh,
                    sts=self._sts,
                    observer=self._observe if self._observer or self._traces else None,
                    on_abort=self._aborted if self._traces else None,
                )
            except (MemoryError, jax.errors.JaxRuntimeError) as e:
                if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(e):
                    raise
                raise UserError(
                    "there is not enough memory for a KV pool of this size; lower max_total_tokens, "
                    "max_running_requests or context_length"
                ) from None
        return self._engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Answers in the order of the prompts, the `n` continuations of one prompt one after the other.

        prompts: one or several, each a text or a list of token ids; any number of them stream through the
        engine's slots. params: for all of them, or one a prompt. Raises UserError before any work is done when
        one of them cannot be served.
        """
        outputs = self.as_completed(prompts, params)
        return [output for _, output in sorted(outputs, key=lambda pair: (pair[0], pair[1].index))]

    def as_completed(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[tuple[int, Output], None, None]:
        """(index of the prompt, an answer to it), each as soon as it is complete; otherwise as `generate`."""
        return self._completed(self.prepare(_several(prompts), params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """The answer to one prompt, piece by piece; closing the iterator ends the request.

        The pieces' texts join to `generate`'s text, for each `index` of several continuations. Raises UserError at
        once, as `generate` does.
        """
        return self._deltas(self.prepare([prompt], params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Output]:
        """Answers to one conversation or several ({"role": …, "content": …}), by the model's chat template.

        tools: what the model may call, as the OpenAI API has them; messages may have "tool_calls" and the role
        "tool". Raises UserError where the template refuses the messages or has no place for tools.
        """
        several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        return self.generate([self.target.chat_ids(m, tools) for m in several], params)  # type: ignore[arg-type]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generator[Delta, None, None]:
        """The answer to one conversation, piece by piece; see `chat` and `stream`."""
        return self.stream(self.target.chat_ids(messages, tools), params)

    # ── prompts → requests ────────────────────────────────────────────────────────────────────────────────────

    def prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Answer]:
        """The answers to be, for whoever drives `engine`: they are added to it there, and take its updates.

        The `n` continuations of a prompt stand one after the other. Raises UserError as `generate` does.
        """
        if params is None or isinstance(params, SamplingParams):
            each: Iterable[SamplingParams] = itertools.repeat(params or SamplingParams(), len(prompts))
        elif not (isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)):
            raise UserError(f"sampling parameters are SamplingParams or a list of them, not {params!r:.60}")
        elif len(params) != len(prompts):
            raise UserError(
                f"{len(params)} sampling parameters were given for {len(prompts)} prompts; give one each"
            )
        else:
            each = params
        asked = list(enumerate(zip(prompts, each, strict=True)))
        answers, grammars, i = [], {}, 0
        try:
            # Before the lock is taken: a large grammar takes its time.
            for i, (_, own) in asked:
                grammars[i] = self._grammar(own)
            with self._lock:
                for i, (prompt, own) in asked:
                    ids = self._prompt_ids(prompt)
                    for index in range(own.n):
                        continuation = own.continuation(index)
                        answers.append(self._answer(i, index, prompt, ids, continuation, grammars[i]))
        except UserError as e:
            raise UserError(f"prompt {i}: {e}" if len(prompts) > 1 else str(e)) from None
        return answers

    def _answer(
        self,
        i: int,
        index: int,
        prompt: Prompt,
        ids: tuple[int, ...],
        params: SamplingParams,
        grammar: Grammar | None,
    ) -> Answer:
        if params.stop:
            self.target.need_tokenizer("a stop string")
        eos = () if params.ignore_eos else self.target.eos_token_ids
        if self._seeds is not None and params.seed is None:
            auto = params.speculative_sampling == "auto"
            params = replace(
                params,
                seed=int(self._seeds.integers(2**63)),
                speculative_sampling="rejection" if auto else params.speculative_sampling,
            )
        request = Request(
            id=next(self._ids),
            prompt=ids,
            params=params,
            stop_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
            bad_words=self._bad_words(params),
            grammar=grammar,
        )
        limit = self.engine.check(request)
        tokenizer, skip = self.target.tokenizer, params.skip_special_tokens
        if not skip:
            self.target.need_tokenizer("a text with special tokens")
        echo, text = "", None
        if params.echo:
            decoder = self.target.need_tokenizer("an echo of the prompt")
            echo = prompt if isinstance(prompt, str) else decoder.decode(ids, skip)
        if tokenizer:
            text = TextStream(tokenizer.stream(skip), params.stop, params.min_tokens)
        return Answer(
            request,
            text,
            self.engine.block_size,
            limit,
            model=self.served_model_name,
            prompt=i,
            index=index,
            echo=echo,
            whole_blocks=self._config.verify_mode != "compact",
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        assert isinstance(params.structured_outputs, StructuredOutputs)
        return self._grammars.compile(params.structured_outputs, params.ignore_eos)

    @cached_property
    def _grammars(self) -> Grammars:
        tokenizer = self.target.need_tokenizer("a structured output")
        return Grammars(tokenizer, self.target.config.vocab_size, self.target.eos_token_ids)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Bad words as token ids: a text as it stands and after a space, since most tokenizers tell them apart."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            if not isinstance(word, str):
                found[tuple(word)] = None
                continue
            tokenizer = self.target.need_tokenizer("a text among bad_words")
            bare = word.strip() or word
            spelled = [tuple(tokenizer.encode(t, add_special_tokens=False)) for t in (bare, " " + bare)]
            if not spelled[0]:
                raise UserError(f"bad_words: {word!r} has no token in this vocabulary; drop it")
            found |= dict.fromkeys(spelled)
        return tuple(found)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.target.text_ids(prompt))
        try:
            if isinstance(prompt, bytes):
                raise TypeError
            return tuple(operator.index(t) for t in prompt)
        except TypeError:
            raise UserError(f"a prompt is a text or a list of token ids, not {prompt!r:.60}") from None

    # ── requests → answers ────────────────────────────────────────────────────────────────────────────────────

    def _completed(self, answers: list[Answer]) -> Generator[tuple[int, Output], None, None]:
        with contextlib.closing(self._advance(answers)) as progress:
            for i, delta in progress:
                if delta.output:
                    yield i, delta.output

    def _deltas(self, answers: list[Answer]) -> Generator[Delta, None, None]:
        with contextlib.closing(self._advance(answers)) as progress:
            for _, delta in progress:
                yield delta

    def _advance(self, answers: list[Answer]) -> Generator[tuple[int, Delta], None, None]:
        """(index of the prompt, news of an answer), until all have ended; when closed before, aborts the rest."""
        news: dict[int, Answer] = {}
        left = len(answers)
        try:
            with self._lock:
                for answer in answers:
                    self._live[answer.request.id] = (answer, news)
                    self.engine.add(answer.request, answer.limit)
            while left:
                with self._lock:
                    if not news:
                        self._pump()
                    deltas = [(answer.prompt, answer.delta()) for answer in news.values()]
                    news.clear()
                left -= sum(delta.output is not None for _, delta in deltas)
                yield from deltas
        finally:
            with self._lock:
                for answer in answers:
                    if self._live.pop(answer.request.id, None):
                        self.engine.abort(answer.request.id)

    def _pump(self) -> None:
        """One step of the engine; its updates go to their answers, whoever iterates over those."""
        with _interrupts_held_back():
            engine = self.engine
            try:
                updates = engine.step()
            except BaseException:
                self._engine = None
                for answer, news in self._live.values():
                    self._aborted(answer.request.id, "abort")
                    answer.finish_reason = "abort"
                    news[answer.request.id] = answer
                self._live.clear()
                raise
            for update in updates:
                if update.id not in self._live:
                    continue
                answer, news = self._live[update.id]
                answer.take(update)
                news[update.id] = answer
                if answer.finish_reason:
                    del self._live[update.id]
                    engine.abort(update.id, "stop")  # a stop string: the engine knows nothing of it


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if not isinstance(prompts, Sequence | np.ndarray):
        raise UserError(f"prompts are a text, a list of token ids or a list of these, not {prompts!r:.60}")
    if isinstance(prompts, str | bytes) or (len(prompts) and all(isinstance(p, Integral) for p in prompts)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits for the end of a step, whose donated buffers would be lost; a second one does not wait."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    seen: list[tuple[int, Any]] = []

    def handler(number: int, frame: Any) -> None:
        if seen:
            before(number, frame)
        seen.append((number, frame))

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        before(*seen[0])
