"""Named tensors in files: what a file format must offer, and the table that maps names onto our parameters.

Knows: rules (regular expression → parameter path and transform), the check of names and shapes against what a
model expects, and the paths of the decoder that all Hugging Face dialects share.
Does not know: file formats, configurations, or devices; arrays stay numpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jspark.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """Shape in the file's own orientation (outermost first) and the file's name of the element type."""

    shape: Shape
    dtype: str


class TensorSource(Protocol):
    """Tensors of one checkpoint; `infos` comes from headers alone, `read` touches one tensor's data."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name in the file."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in the file's orientation, as float32, float16, bfloat16 or float64."""
        ...

    def readable(self, name: str) -> bool:
        """False when the element type is one that `read` cannot turn into floats."""
        ...


class NoTensors:
    """A checkpoint whose weights nobody looks at."""

    infos: Mapping[str, TensorInfo] = {}

    def read(self, name: str) -> np.ndarray:
        """Nothing can be asked for."""
        raise KeyError(name)

    def readable(self, name: str) -> bool:
        """Nothing is."""
        return False


@dataclass(frozen=True)
class Transform:
    """From the file's orientation to ours: what it does to a shape and to the array."""

    shape: Callable[[Shape], Shape]
    array: Callable[[np.ndarray], np.ndarray]


KEEP = Transform(lambda shape: shape, lambda array: array)
#: A linear layer stored as [out, in] becomes a kernel [in, out].
TRANSPOSE = Transform(lambda shape: shape[::-1], lambda array: array.T)


@dataclass(frozen=True)
class Rule:
    """Tensors whose whole name matches `pattern` are the parameter `path` after `transform`."""

    pattern: re.Pattern[str]
    path: str
    transform: Transform

    def apply(self, name: str) -> str | None:
        """The parameter path of the tensor `name`, or None when the rule is not about it."""
        match = self.pattern.fullmatch(name)
        return match.expand(self.path) if match else None


def rule(pattern: str, path: str, transform: Transform = KEEP) -> Rule:
    """A `Rule` from a pattern in text."""
    return Rule(re.compile(pattern), path, transform)


#: Linear layers and norms of a layer in Hugging Face's naming, and in ours.
LINEARS = {
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
}


def linear_rules(pattern: str, path: str, transform: Transform = TRANSPOSE) -> tuple[Rule, Rule]:
    """Rules of a linear layer: `<pattern>.weight` → `<path>.kernel` and `<pattern>.bias` → `<path>.bias`."""
    return (
        rule(pattern + r"\.weight", path + ".kernel", transform),
        rule(pattern + r"\.bias", path + ".bias"),
    )


def _decoder_rules() -> Iterator[Rule]:
    layer = r"(?:model\.)?layers\.(\d+)\."
    yield rule(r"(?:model\.)?embed_tokens\.weight", "embed.embedding")
    yield rule(r"(?:model\.)?norm\.weight", "norm.scale")
    yield rule(r"(?:model\.)?lm_head\.weight", "head.kernel", TRANSPOSE)
    for theirs, ours in LINEARS.items():
        yield from linear_rules(layer + re.escape(theirs), r"layers.\1." + ours)
    for theirs, ours in NORMS.items():
        yield rule(layer + re.escape(theirs) + r"\.weight", r"layers.\1." + ours + ".scale")


#: Llama, Mistral and Qwen3 in Hugging Face's naming, with or without the `model.` prefix.
DECODER_RULES: tuple[Rule, ...] = tuple(_decoder_rules())

#: Tensors that say nothing the configuration does not say already.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq|rope_freqs\.weight")
#: Left out by a model that ties its head to the embedding or a drafter that borrows the target's.
_SHAREABLE = ("embed.embedding", "head.kernel")


@dataclass(frozen=True)
class Located:
    """Where one parameter comes from."""

    path: str
    name: str
    transform: Transform


def locate(source: TensorSource, rules: Iterable[Rule]) -> tuple[dict[str, Located], list[str]]:
    """Parameter path → origin of everything the rules recognise, and the names that they do not.

    Raises UserError when two tensors claim one parameter.
    """
    rules = tuple(rules)
    found: dict[str, Located] = {}
    unknown = []
    for name in source.infos:
        hit = next(((r, path) for r in rules if (path := r.apply(name))), None)
        if hit is None:
            unknown.append(name)
            continue
        r, path = hit
        if path in found:
            raise UserError(
                f"tensors {found[path].name} and {name} are both {path}; remove one from the checkpoint"
            )
        found[path] = Located(path, name, r.transform)
    return found, unknown


def check(
    source: TensorSource,
    found: Mapping[str, Located],
    unknown: Iterable[str],
    expected: Mapping[str, Shape],
    label: str,
) -> list[Located]:
    """The origins of `expected` in its order, from headers alone.

    Raises one UserError about missing, mis-shaped, unreadable and left-over tensors together. A left-over
    tensor is an error because ignoring a bias or an extra layer would give wrong tokens silently.
    """
    problems = []
    missing = [path for path in expected if path not in found]
    if missing:
        problems.append("missing " + _some(missing))
    wrong = []
    for path, want in expected.items():
        if path not in found:
            continue
        origin = found[path]
        info = source.infos[origin.name]
        got = origin.transform.shape(info.shape)
        if got != tuple(want):
            wrong.append(f"{path} has shape {list(got)} instead of {list(want)}")
        elif not source.readable(origin.name):
            wrong.append(f"{path} is stored as {info.dtype}, which cannot be read")
    if wrong:
        problems.append(_some(wrong))
    spare = [o.name for path, o in found.items() if path not in expected and path not in _SHAREABLE]
    spare += [name for name in unknown if not _DERIVED.fullmatch(name)]
    if spare:
        problems.append("not used by this configuration: " + _some(spare))
    if problems:
        raise UserError(
            f"the tensors of {label} do not fit its configuration ({'; '.join(problems)}); "
            "check that its files belong together and are complete"
        )
    return [found[path] for path in expected]


def _some(problems: list[str]) -> str:
    """A list as a sentence can hold it: a wrong number of layers makes thousands of problems."""
    left = len(problems) - 4
    return ", ".join(problems[:4]) + (f" and {left} more" if left > 0 else "")


def stream(source: TensorSource, origins: Iterable[Located]) -> Iterator[tuple[str, np.ndarray]]:
    """(parameter path, array in our orientation), read one at a time."""
    for origin in origins:
        yield origin.path, origin.transform.array(source.read(origin.name))
