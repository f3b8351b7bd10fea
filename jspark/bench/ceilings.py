"""What a machine can do, measured, and what a forward must do, counted; together they are the floor of a time.

Knows: read bandwidth and matrix rate of a device; bytes and operations of a target's and a drafter's passes.
Does not know: what is timed, or how programs work inside: the counts are of what no program could leave out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jspark import kv
from jspark.config import DecoderConfig, DrafterConfig
from jspark.models.decoder import Decoder
from jspark.models.drafter import Drafter

#: Bytes of the buffer whose reading is timed, by kind of device: far beyond every cache.
_BUFFER = {"cpu": 2**29}
_BUFFER_ELSEWHERE = 2**32
_REPEATS = 7


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one device. read_bandwidth: bytes/s. matmul_rate: FLOP/s in `dtype`."""

    dtype: str
    read_bandwidth: float
    matmul_rate: float

    def floor(self, work: Work) -> Floor:
        """The time below which `work` cannot be done on this device."""
        reading, arithmetic = work.bytes / self.read_bandwidth, work.flops / self.matmul_rate
        seconds = max(reading, arithmetic)
        return Floor(seconds, "reading" if reading >= arithmetic else "arithmetic")


@dataclass(frozen=True)
class Floor:
    """Seconds, and which of the two they come from: reading or arithmetic."""

    seconds: float
    bound: str


@dataclass(frozen=True)
class Work:
    """The fewest bytes to read, and the floating-point operations of all matrix products."""

    bytes: int
    flops: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def measure(mesh: Mesh, dtype: str) -> Ceilings:
    """Ceilings of the first device of `mesh` in this process, now; a busy machine gives lower ones."""
    return Ceilings(dtype, read_bandwidth(mesh), matmul_rate(mesh, dtype))


def read_bandwidth(mesh: Mesh) -> float:
    """Bytes a second: the fastest of several readings of a large random buffer, by row sums and by x @ v."""
    device = mesh.devices.flat[0]
    size = _BUFFER.get(device.platform, _BUFFER_ELSEWHERE)
    with jax.default_device(device):
        x = jnp.tile(jax.random.normal(jax.random.key(0), (size // 4 // 8192 // 32, 8192), jnp.float32), (32, 1))
        v = jnp.ones(8192, jnp.float32)
        return x.nbytes / min(_seconds(lambda x: jnp.sum(x, axis=1), x), _seconds(jnp.matmul, x, v))


def copy_bandwidth(mesh: Mesh) -> float:
    """Bytes a second, read and written together, of the fastest of several copies of a large random buffer."""
    device = mesh.devices.flat[0]
    size = _BUFFER.get(device.platform, _BUFFER_ELSEWHERE)
    with jax.default_device(device):
        x = jnp.tile(jax.random.normal(jax.random.key(0), (size // 4 // 8192 // 32, 8192), jnp.float32), (32, 1))
        return 2 * x.nbytes / _seconds(lambda x: -x, x)


def matmul_rate(mesh: Mesh, dtype: str) -> float:
    """FLOP/s of a large square product of random matrices in `dtype`; float32 is not computed as tf32."""
    device = mesh.devices.flat[0]
    side = 2048 if device.platform == "cpu" else 8192
    exact = jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
    with jax.default_device(device), exact:
        a, b = jax.random.normal(jax.random.key(1), (2, side, side), jnp.dtype(dtype))
        return 2 * side**3 / _seconds(jnp.matmul, a, b)


def _seconds(function: Callable[..., jax.Array], *args: jax.Array) -> float:
    """Seconds of the fastest of several calls."""
    compiled = jax.jit(function)
    compiled(*args).block_until_ready()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        compiled(*args).block_until_ready()
        times.append(time.perf_counter() - started)
    return min(times)


def weight_bytes(module: nnx.Module) -> int:
    """Bytes of all parameters."""
    return sum(x.nbytes for x in jax.tree.leaves(module))


def target_pass(model: Decoder, config: DecoderConfig, *, rows: int, tokens: int, context: int) -> Work:
    """One forward of `tokens` packed tokens of `rows` requests with `context` tokens each, logits for every token.

    Every weight is read once, of an embedding that is no output projection only the tokens' rows; keys and
    values once a request.
    """
    parameters = _parameters(model)
    embedding = parameters["embed.embedding"]
    if not config.tie_embeddings:
        del parameters["embed.embedding"]
    lookup = 0 if config.tie_embeddings else tokens * embedding.nbytes // config.vocab_size
    return (
        _linear(parameters.values(), tokens)
        + Work(lookup, 0)
        + _attention(config, embedding, rows, tokens, context)
    )


def propose_pass(
    drafter: Drafter, config: DrafterConfig, target: Decoder, *, rows: int, block_size: int, context: int
) -> Work:
    """Drafting `block_size` tokens for each of `rows` requests with `context` tokens each.

    The head's weights count once, however many positions go through it one after the other.
    """
    width = block_size + (config.block_rows - config.block_size)
    parameters = _parameters(drafter)
    backbone = [x for name, x in parameters.items() if name.startswith(("layers.", "norm."))]
    heads = [
        x for name, x in parameters.items() if name.startswith(("markov.", "confidence.")) and name != "markov.w1"
    ]
    projection = drafter.vocabulary(target.vocabulary).head
    heads += _parameters(projection).values()
    return (
        _linear(backbone, rows * width)
        + _linear(heads, rows * block_size)
        + _attention(config.backbone, backbone[0], rows, rows * width, context)
    )


def inject_pass(drafter: Drafter, *, tokens: int) -> Work:
    """Features of `tokens` tokens → keys and values of every draft layer."""
    wanted = (".attn.k.", ".attn.v.", ".attn.kv.", ".attn.k_norm.")
    parameters = _parameters(drafter)
    return _linear(
        [
            x
            for name, x in parameters.items()
            if name.startswith(("fc.", "hidden_norm.")) or any(w in name for w in wanted)
        ],
        tokens,
    )


def _parameters(module: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def _linear(parameters: Iterable[jax.Array], tokens: int) -> Work:
    """Reads the parameters once and multiplies `tokens` rows with each; vectors are noise in both counts."""
    parameters = list(parameters)
    return Work(sum(x.nbytes for x in parameters), 2 * tokens * sum(x.size for x in parameters))


def _attention(config: DecoderConfig, like: jax.Array, rows: int, tokens: int, context: int) -> Work:
    flops = 4 * tokens * context * config.num_heads * config.head_dim * config.num_layers
    return Work(rows * context * kv.bytes_per_token(config, like.dtype), flops)
