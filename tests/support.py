"""What tests of the engine share: golden models loaded once, runs to completion, plain decoding as the judge."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspark import axes, kv
from jspark.batch import pack
from jspark.checkpoint import open_drafter, open_target
from jspark.config import EngineConfig
from jspark.engine import Engine
from jspark.models.decoder import Layout
from jspark.request import Request, SamplingParams, Stats, TokenLogprob
from jspark.sampling import RowSampling, coupled_gumbel, log_probs
from jspark.verify import forward
from jspark.weights import load_decoder, load_drafter

GOLDENS = Path(__file__).parent / "goldens"


#: float32 products in float32: a GPU would multiply in tf32.
exact = jax.default_matmul_precision("highest")


@cache
def mesh():
    return axes.single_device_mesh()


#: How weights may lie: as on a CPU, on several GPUs, on one, and the fourth for completeness.
LAYOUTS = [Layout(stacked, joined) for stacked in (False, True) for joined in (False, True)]


@cache
def target(name: str):
    checkpoint = open_target(str(GOLDENS / name))
    return load_decoder(checkpoint, checkpoint.config, jnp.float32, mesh()), checkpoint.config


@cache
def drafter(name: str, target_name: str = "qwen3_tiny"):
    checkpoint = open_drafter(str(GOLDENS / name))
    return load_drafter(
        checkpoint, checkpoint.config, jnp.float32, mesh(), target(target_name)[0]
    ), checkpoint.config


def arrays(name: str) -> tuple[dict, dict]:
    """(inputs, outputs) of a golden folder."""
    with np.load(GOLDENS / name / "inputs.npz") as i, np.load(GOLDENS / name / "outputs.npz") as o:
        return dict(i), dict(o)


def prompts(name: str) -> list[tuple[int, ...]]:
    inputs, _ = arrays(name)
    count = sum(k.startswith("prompt_") for k in inputs)
    return [tuple(inputs[f"prompt_{i}"].tolist()) for i in range(count)]


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    stats: Stats = field(default_factory=Stats)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


_compiled: dict[Any, Any] = {}


def make_engine(config: EngineConfig, target, drafter=None, **options) -> Engine:
    """An engine on the test's mesh that shares its compiled programs with every other one of the same sizes and
    models in this process: tests compile far more than they compute."""
    engine = Engine(config, target, drafter, mesh=mesh(), **options)
    programs, sizes = engine.programs, replace(engine.config, overlap=None, prefix_cache=True)
    models = (id(target[0]), drafter and id(drafter[0]), str(options.get("sts")))
    if len(_compiled) > 8:
        _compiled.pop(next(iter(_compiled)))
    # The models are kept, so that their ids stay theirs.
    own = (programs._compiled, programs._proposals, target, drafter)
    programs._compiled, programs._proposals, *_ = _compiled.setdefault((sizes, programs.spec, models), own)
    return engine


def forget_programs() -> None:
    """Engines made from now on compile anew."""
    _compiled.clear()


def run(engine: Engine, requests: list[Request]) -> list[Result]:
    """Adds all requests, steps until nothing is left, and checks that every page came back."""
    for request in requests:
        engine.add(request)
    results = {request.id: Result() for request in requests}
    while not engine.idle:
        for update in engine.step():
            result = results[update.id]
            assert result.reason is None, "tokens after the end"
            result.tokens += update.tokens
            result.logprobs += update.logprobs
            result.prompt_logprobs += update.prompt_logprobs
            result.reason, result.stats = update.finish_reason, update.stats
    assert engine.scheduler.allocator.in_use == 0
    return [results[request.id] for request in requests]


@cache
def plain_engine(name: str = "qwen3_tiny") -> Engine:
    """Plain decoding, one request at a time: what everything else must equal."""
    config = EngineConfig(max_running_requests=1, context_length=256, chunked_prefill_size=64)
    return make_engine(config, target(name))


def plain(request: Request, name: str = "qwen3_tiny") -> list[int]:
    return run(plain_engine(name), [request])[0].tokens


@cache
def _logits_program(name: str):
    model, config = target(name)
    pages = 256 // 16 + 1
    pool = kv.make_pool(config, pages, 16, jnp.float32, mesh())
    table = jnp.arange(1, pages, dtype=jnp.int32)[None]

    @jax.jit
    @exact
    def logits(tokens, length):
        batch = pack(
            tokens[None],
            jnp.zeros(1, jnp.int32),
            (length - 1)[None],
            jnp.ones(1, bool),
            table,
            None,
            verify_tokens=256,
            page_size=16,
        )
        return forward(model, config, pool, batch, logit_rows=256)[0]

    return logits


def full_logits(tokens: tuple[int, ...], name: str = "qwen3_tiny") -> np.ndarray:
    """Logits [len(tokens), V] of one forward over the whole sequence."""
    padded = np.zeros(256, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits_program(name)(padded, np.int32(len(tokens))))[: len(tokens)]


def adjusted(request: Request, output: list[int], logits: np.ndarray) -> np.ndarray:
    """The rules of jspark/adjust.py, one after the other in NumPy, on the logits of the token after `output`."""
    p, z = request.params, logits.astype(np.float64).copy()
    for token in {*request.prompt, *output}:
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token in set(output):
        z[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    for token, bias in (p.logit_bias or {}).items():
        z[token] += bias
    history = [*request.prompt, *output]
    for word in request.bad_words:
        begin = list(word[:-1])
        if not begin or history[-len(begin) :] == begin:
            z[word[-1]] = -np.inf
    if len(output) < p.min_tokens:
        z[list(request.stop_ids)] = -np.inf
    return z


def row_sampling(params: SamplingParams, coupled: bool) -> RowSampling:
    return RowSampling(
        temperature=jnp.full(1, params.temperature, jnp.float32),
        top_k=jnp.full(1, max(params.top_k, 0), jnp.int32),
        top_p=jnp.full(1, params.top_p, jnp.float32),
        min_p=jnp.full(1, params.min_p, jnp.float32),
        seed=jnp.full(1, ((params.seed or 0) ^ ((params.seed or 0) >> 32)) & 0xFFFFFFFF, jnp.uint32),
        coupled=jnp.full(1, coupled),
    )


def margin(request: Request, tokens: list[int], name: str = "qwen3_tiny") -> float:
    """Plain decoding's own gap between its best and second choice of the token after `tokens`."""
    sequence = request.prompt + tuple(tokens)
    scores = full_logits(sequence, name)[-1:]
    if request.params.temperature > 0:
        rows = row_sampling(request.params, True)
        scores = log_probs(jnp.asarray(scores), rows, filtered=request.params.filtered)
        scores += coupled_gumbel(rows.seed, jnp.full(1, len(sequence), jnp.int32), scores.shape[-1])
    top = np.sort(np.asarray(scores)[0])[-2:]
    return float(top[1] - top[0])


def check_equals_plain(request: Request, got: list[int], want: list[int], excused: list) -> None:
    """Equality with plain decoding; a first difference at a tie (margin below 1e-4) is excused and counted."""
    if got == want:
        return
    first = next(i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1])
    gap = margin(request, want[:first])
    assert gap < 1e-4, (
        f"request {request.id} differs at token {first}: {got[first]} for {want[first]}, margin {gap}"
    )
    excused.append((request.id, first, gap))
