"""Damaged and hostile checkpoints from seeds, opened one after the other: `python fuzz_files.py FROM TO FOLDER`.

Knows: small valid checkpoints of every kind, how to spoil them, and what opening any of them may do: work, or
raise a UserError of one sentence. The process says every seed before it tries it, so that whoever watches it
knows which one crashed or hung it (test_hostile_files.py). Faults are lines of JSON.
"""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import parameter_shapes
from safetensors.numpy import save
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jspark import chat_template
from jspark.budget import parse_policy
from jspark.calibration import read_temperatures
from jspark.checkpoint import describe, open_drafter, open_target
from jspark.errors import UserError

#: Memory that any case may take beside twice its files, in MiB; seconds of processor time.
SPARE, SECONDS = 96, 5.0
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [*ALPHABET, "he", "ll", "<s>", "</s>"]
V, H, FF, HEADS, KV, D, LAYERS, RANK = len(VOCABULARY), 16, 24, 2, 1, 8, 2, 4
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = [
    "",
    "x",
    "../../../etc/passwd",
    "/dev/zero",
    "a\nb",
    "\x1b[31m",
    "\ud800",
    "x" * 5000,
    "0",
    "None",
    "%s{}",
]
DEEP: list = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [None, True, False, [], {}, DEEP, [0], [None], {"a": 1}, [[1]] * 50, 0.5, -0.5, 1e-320, 1e308]
VALUES += [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), *NUMBERS, *TEXTS]
FLOATS: list[Any] = [np.float32, np.float16, ml_dtypes.bfloat16]


# ── valid checkpoints ─────────────────────────────────────────────────────────────────────────────────────────


def config() -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": FF,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32},
        "tie_word_embeddings": False,
        "eos_token_id": [3, 4],
        "layer_types": ["full_attention"] * LAYERS,
    }


def _decoder_tensors(prefix: str = "model.") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {prefix + "embed_tokens.weight": (V, H), prefix + "norm.weight": (H,)}
    shapes["lm_head.weight"] = (V, H)
    q, kv = HEADS * D, KV * D
    for i in range(LAYERS):
        layer = f"{prefix}layers.{i}."
        for name, shape in (("q", (q, H)), ("k", (kv, H)), ("v", (kv, H)), ("o", (H, q))):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (FF, H)), ("up", (FF, H)), ("down", (H, FF))):
            shapes[f"{layer}mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (H,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}self_attn.{name}.weight"] = (D,)
    return shapes


@cache
def tokenizer_json() -> bytes:
    backend = Backend(models.BPE({t: i for i, t in enumerate(VOCABULARY)}, [("h", "e"), ("l", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend.to_str().encode()


TOKENIZER_CONFIG = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


def drafter(dialect: str) -> tuple[dict, dict[str, tuple[int, ...]]]:
    """config.json and tensors of a drafter in one of the dialects."""
    heads = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    heads |= {"confidence_head_with_markov": True}
    common = {"block_size": 4, "mask_token_id": 5, "target_layer_ids": [0, 1]}
    shapes = _decoder_tensors("")
    shapes |= {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,)}
    if dialect == "dflash":
        del shapes["embed_tokens.weight"], shapes["lm_head.weight"]
        own = {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": common}
        return config() | own | {"num_target_layers": 4}, shapes
    shapes |= {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (V, RANK)}
    shapes |= {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
    if dialect == "deepspec":
        return config() | heads | common | {"architectures": ["Qwen3DSparkModel"]}, shapes
    if dialect == "specforge":
        inner = heads | common | {"projector_type": "dspark"}
        return config() | {"architectures": ["DSparkDraftModel"], "block_size": 4, "dflash_config": inner}, shapes
    own = {
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": 4}]},
        "transformer_layer_config": config(),
        "aux_hidden_state_layer_ids": [1, 2],
        "sample_from_anchor": True,
        "draft_vocab_size": V - 10,
    }
    shapes |= {"lm_head.weight": (V - 10, H), "markov_head.markov_w2.weight": (V - 10, RANK)}
    return heads | common | own, shapes | {"d2t": (V - 10,), "t2d": (V,)}


def _arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    out: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    if "d2t" in out:
        out["d2t"], out["t2d"] = np.zeros(V - 10, np.int64), np.arange(V) < V - 10
    return out


@cache
def drafter_files(dialect: str) -> tuple[dict, bytes]:
    if dialect == "eagle3":
        folder = Path(__file__).parent / "goldens" / "eagle3_qwen3_tiny_trained"
        return json.loads((folder / "config.json").read_text()), (folder / "model.safetensors").read_bytes()
    made, shapes = drafter(dialect)
    return made, save(_arrays(shapes))


@cache
def target_tensors() -> bytes:
    return save(_arrays(_decoder_tensors()))


#: (form, value): the numbers and pieces of bytes of a GGUF file in their order.
Atom = tuple[str, Any]


@cache
def gguf_atoms() -> tuple[Atom, ...]:
    """A GGUF file as its numbers and texts, so that each can be spoiled on its own."""
    atoms: list[Atom] = []

    def text(value: str) -> None:
        atoms.extend([("<Q", len(value.encode())), ("b", value.encode())])

    def pair(key: str, value: Any) -> None:
        text(key)
        many = value if isinstance(value, list) else [value]
        kind, form = {str: (8, ""), float: (6, "<f"), int: (4, "<I"), bool: (7, "<?")}[type(many[0])]
        if isinstance(value, list):
            atoms.extend([("<I", 9), ("<I", kind), ("<Q", len(value))])
        else:
            atoms.append(("<I", kind))
        for item in many:
            text(item) if kind == 8 else atoms.append((form, item))

    q, kv = HEADS * D, KV * D
    tensors = {"token_embd.weight": (V, H), "output_norm.weight": (H,)}
    for i in range(LAYERS):
        sizes = {"attn_norm": (H,), "ffn_norm": (H,), "attn_q": (q, H), "attn_k": (kv, H), "attn_v": (kv, H)}
        sizes |= {"attn_output": (H, q), "ffn_gate": (FF, H), "ffn_up": (FF, H), "ffn_down": (H, FF)}
        tensors |= {f"blk.{i}.{name}.weight": size for name, size in sizes.items()}
    pairs: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": H,
        "llama.feed_forward_length": FF,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": [KV] * LAYERS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": [1] * (V - 2) + [3, 3],
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": V - 2,
        "tokenizer.ggml.eos_token_id": V - 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TOKENIZER_CONFIG["chat_template"],
    }
    atoms.extend([("b", b"GGUF"), ("<I", 3), ("<Q", len(tensors)), ("<Q", len(pairs))])
    for key, value in pairs.items():
        pair(key, value)
    offset = 0
    for name, shape in tensors.items():
        text(name)
        atoms.append(("<I", len(shape)))
        atoms.extend(("<Q", d) for d in shape[::-1])
        atoms.extend([("<I", 0), ("<Q", offset)])
        offset += -(-4 * int(np.prod(shape)) // 32) * 32
    size = sum(len(_packed(a)) for a in atoms)
    atoms.append(("b", b"\0" * (-size % 32)))
    atoms.append(("b", b"\0" * offset))
    return tuple(atoms)


def _packed(atom: Atom) -> bytes:
    form, value = atom
    return value if form == "b" else struct.pack(form, value)


# ── spoiling ──────────────────────────────────────────────────────────────────────────────────────────────────


def spoil_json(draw: random.Random, document: Any, times: int) -> Any:
    """A copy with keys gone, doubled or renamed and values replaced."""
    document = json.loads(json.dumps(document))
    for _ in range(times):
        places = list(_places(document))
        if not places:
            return document
        holder, key = draw.choice(places)
        match draw.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(TEXTS)] = holder.pop(key)
            case 2:
                other, there = draw.choice(places)
                holder[key] = json.loads(json.dumps(other[there]))
            case 3 if isinstance(holder[key], list) and holder[key]:
                holder[key] = holder[key] * draw.choice([2, 50])
            case 4 if type(holder[key]) is int:
                holder[key] = holder[key] + draw.choice([-1, 1, 10**6])
            case _:
                holder[key] = json.loads(json.dumps(draw.choice(VALUES)))
    return document


def _places(document: Any, depth: int = 0) -> Any:
    if depth > 8:
        return
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items)[:60]:
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value, depth + 1)


def spoil_bytes(draw: random.Random, data: bytes, within: int | None = None) -> bytes:
    """Bits turned over, an end cut off, a stretch doubled; `within`: only before this position."""
    out, end = bytearray(data), max(1, min(within or len(data), len(data)))
    for _ in range(draw.choice([1, 1, 3, 20])):
        at = draw.randrange(end)
        match draw.randrange(5):
            case 0:
                del out[at:]
            case 1:
                out[at:at] = out[at : at + draw.randrange(1, 40)]
            case _ if at < len(out):
                out[at] = draw.randrange(256)
    return bytes(out)


def as_text(draw: random.Random, document: Any) -> bytes:
    """JSON, now and then with a number of thousands of digits, brackets without end, doubled keys or garbage."""
    text = json.dumps(document).encode()
    match draw.randrange(30):
        case 0:
            return text.replace(b"1", b"1" * 6000)
        case 1:
            return text.replace(b"[", b"[" * 100_000, 1)
        case 2:
            return text[:-1] + b"," + text[1:] if text[:1] == b"{" else text
        case 3 | 4:
            return spoil_bytes(draw, text)
        case 5:
            return text.decode().encode("utf-16")
    return text


def spoil_safetensors(draw: random.Random, data: bytes) -> bytes:
    """The header's length, its JSON, or bytes of it."""
    size = struct.unpack("<Q", data[:8])[0]
    if draw.random() < 0.3:
        return spoil_bytes(draw, data, 8 + size)
    header = json.loads(data[8 : 8 + size])
    if draw.random() < 0.4:
        entry = header[draw.choice([k for k in header if k != "__metadata__"])]
        key = draw.choice(["shape", "data_offsets", "dtype"])
        if key == "dtype":
            entry[key] = draw.choice(["F64", "BF16", "I8", "F8_E4M3", "BOOL", "U64", "X", 3])
        elif entry[key]:
            entry[key][draw.randrange(len(entry[key]))] = draw.choice(NUMBERS)
    else:
        header = spoil_json(draw, header, draw.choice([1, 2]))
    text = as_text(draw, header)
    stated = len(text) if draw.random() < 0.95 else draw.choice(NUMBERS) % 2**64
    return struct.pack("<Q", stated) + text + data[8 + size :]


def spoil_gguf(draw: random.Random) -> bytes:
    atoms = list(gguf_atoms())
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(atoms) - 1)
        if draw.random() < 0.5:  # the small parts, not the vocabulary
            at = draw.choice([*range(130), *range(len(atoms) - 130, len(atoms) - 1)])
        form, value = atoms[at]
        if form == "<Q" and atoms[at + 1][0] == "b" and draw.random() < 0.8:  # a text, and its length with it
            new = draw.choice([atoms[at + 1][1], *(t.encode("utf-8", "surrogatepass") for t in TEXTS)])
            new = spoil_bytes(draw, new) if new and draw.random() < 0.5 else new
            atoms[at : at + 2] = [("<Q", len(new)), ("b", new)]
            continue
        match draw.randrange(1 if draw.random() < 0.2 else 2, 4):
            case 1:
                if draw.random() < 0.5:
                    del atoms[at]
                else:
                    atoms[at:at] = atoms[at : at + draw.randrange(1, 8)]
            case _ if form == "b":
                atoms[at] = ("b", spoil_bytes(draw, value) if value and at else b"GGML")
            case _ if form == "<f":
                atoms[at] = (form, draw.choice([0.0, -1.0, float("nan"), float("inf"), 1e30, 1e-30]))
            case _:
                bits = 8 * struct.calcsize(form)
                near = [value + 1, max(value - 1, 0), value * 2, value + 32, *range(16)]
                new = draw.choice(near if draw.random() < 0.7 else NUMBERS)
                atoms[at] = (form, bool(new & 1) if form == "<?" else new % 2**bits)
    data = b"".join(map(_packed, atoms))
    return spoil_bytes(draw, data) if draw.random() < 0.1 else data


_PARTS = ["{% for i in range(N) %}BODY{% endfor %}", "{{ 'ab' * N }}", "{{ BODYTEXT|center(N) }}", "{{ [1] * N }}"]
_PARTS += ["{% set x = 'a' %}BODY{% set x = x ~ x %}{{ x }}", "{{ N ** N }}", "{{ '%Nd' % 1 }}", "{% if N %}BODY"]
_PARTS += ["{% macro m(a) %}BODY{{ m(a) }}{% endmacro %}{{ m(N) }}", "{{ messages[N] }}", "{{ ''|indent(N) }}"]
_PARTS += [
    "{{ messages|tojson(indent=N) }}",
    "{{ ''.__class__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ N // 0 }}",
]
_PARTS += [
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ joiner('x').__dict__ }}",
    "{%",
    "}}",
    "{# ",
    "BODY",
]
_PARTS += ["{{ messages|batch(N)|list|length }}", "{{ 'a'.zfill(N) }}", "{{ lipsum(n=N) }}", "{% include 'N' %}"]


def spoil_template(draw: random.Random, depth: int = 0) -> str:
    part = draw.choice(_PARTS)
    if "BODYTEXT" in part:
        return part.replace("BODYTEXT", "'x'").replace("N", str(draw.choice([3, 10, 10**9])))
    body = "".join(spoil_template(draw, depth + 1) for _ in range(draw.randrange(3))) if depth < 3 else "x"
    return part.replace("N", str(draw.choice([0, 1, 3, 7, 50, 99999, 10**9]))).replace("BODY", body)


# ── cases ─────────────────────────────────────────────────────────────────────────────────────────────────────


def build(seed: int, folder: Path) -> Callable[[], object]:
    """Writes the files of a seed; what is returned opens them as a user would."""
    draw = random.Random(seed)
    kind = draw.choices(
        ("gguf", "tensors", "config", "tokenizer", "settings", "index", "drafter", "small", "template"),
        (24, 22, 16, 10, 6, 6, 14, 3, 0.4),
    )[0]
    if kind == "gguf":
        (folder / "m.gguf").write_bytes(spoil_gguf(draw))
        return lambda: use_target(folder / "m.gguf")
    if kind == "small":
        table = {"draft": {"1": 0.1, "8": 0.2}, "verify": {"8": 0.1, "64": 0.4}}
        if draw.random() < 0.5:
            sts = {"temperatures": [1.0, 0.5, 2.0]}
            (folder / "sts.json").write_bytes(as_text(draw, spoil_json(draw, sts, draw.choice([1, 2]))))
            return lambda: read_temperatures(folder / "sts.json")
        (folder / "cost.json").write_bytes(as_text(draw, spoil_json(draw, table, draw.choice([1, 2]))))
        return lambda: parse_policy(f"argmax:{folder / 'cost.json'}")
    if kind == "drafter":
        dialect = draw.choice(["deepspec", "specforge", "speculators", "dflash", "eagle3"])
        made, tensors = drafter_files(dialect)
        if draw.random() < 0.7:
            made = spoil_json(draw, made, draw.choice([1, 1, 2, 4]))
        else:
            tensors = spoil_safetensors(draw, tensors)
        (folder / "config.json").write_bytes(as_text(draw, made))
        (folder / "model.safetensors").write_bytes(tensors)
        return lambda: use_drafter(folder)
    parts: dict[str, Any] = {
        "config.json": json.dumps(config()).encode(),
        "model.safetensors": target_tensors(),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG).encode(),
    }
    match kind:
        case "tensors":
            parts["model.safetensors"] = spoil_safetensors(draw, target_tensors())
        case "config":
            parts["config.json"] = as_text(draw, spoil_json(draw, config(), draw.choice([1, 1, 2, 4])))
        case "tokenizer":
            spoiled = spoil_json(draw, json.loads(tokenizer_json()), draw.choice([1, 1, 2, 4]))
            parts["tokenizer.json"] = as_text(draw, spoiled)
        case "settings":
            parts["tokenizer_config.json"] = as_text(draw, spoil_json(draw, TOKENIZER_CONFIG, 1))
            generation = spoil_json(draw, {"eos_token_id": [3, 4], "temperature": 1.0}, 1)
            parts["generation_config.json"] = as_text(draw, generation)
        case "index":
            shards = ["a.safetensors", "b.safetensors"]
            arrays = _arrays(_decoder_tensors())
            halves = [{n: arrays[n] for n in sorted(arrays)[i::2]} for i in range(2)]
            parts |= {s: save(h) for s, h in zip(shards, halves, strict=True)}
            del parts["model.safetensors"]
            where = {n: s for s, h in zip(shards, halves, strict=True) for n in h}
            index = spoil_json(draw, {"metadata": {}, "weight_map": where}, draw.choice([1, 2]))
            parts["model.safetensors.index.json"] = as_text(draw, index)
        case "template":
            parts["chat_template.jinja"] = "".join(spoil_template(draw) for _ in range(3)).encode()
    for name, data in parts.items():
        (folder / name).write_bytes(data)
    return lambda: use_target(folder)


def use_target(path: Path) -> None:
    """Opens a target, reads all its tensors, and puts text through its tokenizer."""
    describe(str(path))
    target = open_target(str(path))
    for _ in target.parameters(parameter_shapes.decoder(target.config)):
        pass
    if tokenizer := target.tokenizer():
        ids = tokenizer.encode("hello <s> é\n  1234")
        tokenizer.decode(ids)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids[:20])) + stream.flush() == tokenizer.decode(ids[:20])
        if tokenizer.has_chat_template:
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def use_drafter(path: Path) -> None:
    """Opens a drafter and reads all its tensors."""
    describe(str(path))
    checkpoint = open_drafter(str(path))
    for _ in checkpoint.parameters(parameter_shapes.drafter(checkpoint.config)):
        pass


_ADVICE = re.compile(r"; |must be|at least|at most")
_INTERNAL = re.compile(r"Traceback|object at 0x|<class |\bdict_|PosixPath|panicked")


def complaint(message: str) -> str | None:
    """What is wrong with a UserError's message; None when it is a sentence that tells what to do."""
    if "\n" in message or not message.isprintable() or len(message) > 2100 or not message.strip():
        return "it is not one printable line"
    if not _ADVICE.search(message):
        return "it does not say what to do"
    return "it shows internals" if _INTERNAL.search(message) else None


def peak() -> float:
    """The most memory this process ever had, in MiB."""
    # What getrusage says begins with the parent's peak, which hides a child's growth below it.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def attempt(seed: int, folder: Path) -> str | None:
    """The fault of one seed, None for none. Its files stay in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    use = build(seed, folder)
    size = sum(f.stat().st_size for f in folder.rglob("*")) / 2**20
    before, began = peak(), time.process_time()
    fault = None
    try:
        use()
    except UserError as e:
        if found := complaint(str(e)):
            fault = f"{found}: {e}"
    except BaseException as e:  # a panic of a library in Rust is no Exception
        if isinstance(e, KeyboardInterrupt):
            raise
        fault = f"{type(e).__name__}: {e}"
    if time.process_time() - began > SECONDS:
        fault = f"{time.process_time() - began:.1f} s of processor time"
    # Peaks only grow, so what a case adds to the peak is at most what it took.
    if peak() > before + SPARE + 2 * size:
        fault = f"{peak() - before:.0f} MiB for files of {size:.1f} MiB"
    return fault


def main(first: int, last: int, folder: Path) -> None:
    """Tries the seeds first..last − 1 and prints what happens."""
    chat_template._WALL_SECONDS = 1.0
    for seed in range(first, last):
        print(seed, flush=True)
        if fault := attempt(seed, folder):
            print(json.dumps({"seed": seed, "fault": fault}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
