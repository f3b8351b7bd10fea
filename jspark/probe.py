"""A trial of a drafter right after loading: does the target accept its drafts, and if not, which reading of the
checkpoint would do better?

Knows: one short prompt, and the conventions that dialects have mixed up: whether the anchor's row predicts, and
layer ids that are one off. Does not know: requests of users, or text beyond the one sentence it starts from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from jspark.budget import Full
from jspark.config import DecoderConfig, DrafterConfig, EngineConfig
from jspark.engine import Engine
from jspark.errors import warn
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.request import Request, SamplingParams

#: What the trial continues; a model without a tokenizer gets a few arbitrary tokens.
TEXT = "Rain fell all night on the small harbour. In the morning the boats were full of water, and the"
#: Tokens of the trial, hence about as many steps with a drafter that is always wrong.
TOKENS = 49
#: Tokens a step, the target's own counted, below which a drafter is as good as none.
LEAST = 1.2


def arbitrary_prompt(vocab_size: int) -> list[int]:
    """Tokens for models without a tokenizer."""
    return np.random.default_rng(0).integers(0, vocab_size, 16).tolist()


def accept_length(engine: Engine, prompt: Sequence[int], tokens: int = TOKENS) -> float:
    """Tokens a step of one greedy answer, with whole blocks verified; the engine must be idle."""
    policy, engine.policy = engine.policy, Full()
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    count, steps = 0, 0
    try:
        engine.add(Request(id=-1, prompt=tuple(prompt), params=params))
        while not engine.idle:
            for update in engine.step():
                count, steps = count + len(update.tokens), update.stats.steps
    finally:
        engine.policy = policy
    return (count - 1) / steps if steps else 1.0


def other_readings(config: DrafterConfig, target: DecoderConfig) -> Iterator[tuple[str, DrafterConfig]]:
    """(what to change, the drafter read so): the other anchor convention, layer ids one up and one down."""
    if config.eagle3 is None:
        other = not config.predicts_from_anchor
        size = config.block_rows if other else config.block_rows - 1
        if size and (other or config.markov != "rnn"):
            answer = "true, or --draft-anchor-predicts yes" if other else "false, or --draft-anchor-predicts no"
            changed = replace(config, predicts_from_anchor=other, block_size=size)
            yield f"sample_from_anchor {answer}", changed
    for shift in (1, -1):
        ids = tuple(i + shift for i in config.target_layer_ids)
        if min(ids) >= -1 and max(ids) < target.num_layers - 1:
            yield f"target layers {list(ids)}", replace(config, target_layer_ids=ids)


def probe(
    engine: Engine,
    target: tuple[Decoder, DecoderConfig],
    drafter: tuple[AnyDrafter, DrafterConfig],
    prompt: Sequence[int],
    mesh: Mesh,
) -> float | None:
    """Runs the trial on an idle engine and warns when hardly any draft is accepted.

    Returns the accept length, None where the context is too short for a trial. Only after a bad result are the
    other readings of the checkpoint tried, each with an engine of its own that is small and short-lived.
    """
    room = engine.scheduler.context_length - len(prompt)
    tokens = min(TOKENS, room)
    if tokens < TOKENS // 2:
        return None
    length = accept_length(engine, prompt, tokens)
    if length >= LEAST:
        return length
    model, config = drafter
    settings = EngineConfig(
        max_running_requests=1,
        page_size=engine.config.page_size,
        context_length=len(prompt) + tokens,
        chunked_prefill_size=len(prompt),
        dtype=engine.config.dtype,
    )
    tried: list[tuple[float, str]] = []
    for change, other in other_readings(config, target[1]):
        trial = Engine(settings, target, (model, other), mesh=mesh)
        tried.append((accept_length(trial, prompt, tokens), change))
    figures = ", ".join(f"{n:.2f} with {change}" for n, change in tried)
    said = f"the drafter brings {length:.2f} tokens a step in a trial, where 1 is none of its drafts"
    best, change = max(tried, default=(0.0, ""))
    if best >= max(LEAST, length + 0.1):
        warn(f"{said}; it was probably made with {change}: correct that ({figures})")
    else:
        others = f"; other readings of its configuration do no better ({figures})" if tried else ""
        warn(f"{said}{others}: check that it belongs to this target, or decode without it")
    return length
