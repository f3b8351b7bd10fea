"""Frozen configurations of models and of the engine.

Knows: the numbers that fix shapes and behaviour, and which combinations are contradictory.
Does not know: file formats (checkpoint/ fills these in), arrays, or the command line (made from these).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from jspark.errors import UserError

Algorithm = Literal["NONE", "DFLASH", "DSPARK", "EAGLE3"]
DType = Literal["float32", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
OnlineCalibrationMode = Literal["off", "on", "frozen"]
AttentionBackend = Literal["auto", "mosaic", "triton", "xla"]
VerifyMode = Literal["static", "compact", "cap-accept"]


#: Request slots at most: far above what a device serves, low enough that their tables fit the host's memory.
MAX_SLOTS = 1 << 14


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, half-split layout; the fields beyond `theta` belong to one `kind` each."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class DecoderConfig:
    """A dense pre-norm decoder of the Llama and Qwen3 kind; also the shape of a drafter's backbone.

    windows: the sliding window of every layer, 0 where it sees everything; () where all do.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"
    windows: tuple[int, ...] = ()

    @property
    def reach(self) -> int:
        """Positions that its rotary embedding was made for; no limit where every layer has a sliding window."""
        if self.windows and all(self.windows):
            return 1 << 31
        stretched = self.rope.original_max_position * self.rope.factor if self.rope.kind == "yarn" else 0
        return max(self.max_position, int(stretched))

    def window(self, layer: int) -> int | None:
        """Tokens that a layer's queries see, their own included; None for all of them."""
        return (self.windows[layer] or None) if self.windows else None


@dataclass(frozen=True)
class Eagle3Config:
    """What EAGLE-3 drafters differ in.

    norm_before_residual: the first layer's residual is the normed hidden state. norm_before_fc, fc_norm: features
    are normed before they are projected, all together or each on its own. norm_output: a slot hands its normed
    output on to the next one.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class DrafterConfig:
    """A block-diffusion drafter: backbone, features it reads, sequential head, confidence head; or EAGLE-3.

    `block_size` is γ, the number of drafted tokens, in every dialect. A drafter that predicts from the anchor
    row runs γ rows (DSpark); one that does not runs γ + 1 and drops the first (DFlash).
    `target_layer_ids`: layer id l is the output of target layer l, −1 the embedding.
    `draft_vocab_size`: how many of the target's tokens it can draft; 0: all, and there is no mask.
    `eagle3`: it is an autoregressive drafter, whose chain may be longer than the `block_size` it was trained for.
    Its `mask_token_id` means nothing, and `target_layer_ids` () stands for three layers that the target decides.
    `causal_windows`: in layers with a sliding window, a row of the block does not see later ones.
    """

    backbone: DecoderConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    predicts_from_anchor: bool
    markov: Literal["none", "vanilla", "gated", "rnn"] = "none"
    markov_rank: int = 0
    confidence: Literal["none", "hidden", "hidden+markov"] = "none"
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int = 0
    causal_windows: bool = False
    eagle3: Eagle3Config | None = None
    dialect: str = "deepspec"

    @property
    def feature_count(self) -> int:
        """Target layers that it reads."""
        return len(self.target_layer_ids) or 3

    @property
    def block_rows(self) -> int:
        """Rows the backbone runs to draft `block_size` tokens."""
        return self.block_size if self.predicts_from_anchor else self.block_size + 1


def with_layer_ids(drafter: DrafterConfig, target: DecoderConfig) -> DrafterConfig:
    """`drafter` with the layers it reads; where it does not say, the ones that SGLang and vLLM take for EAGLE-3.

    These are inputs of layers 2, n/2 and n − 3, hence outputs of the layers before.
    """
    if drafter.target_layer_ids:
        return drafter
    n = target.num_layers
    return replace(drafter, target_layer_ids=(1, n // 2 - 1, n - 4))


def check_drafter_fits(drafter: DrafterConfig, target: DecoderConfig) -> None:
    """Raises UserError when `drafter` cannot have been made for `target`."""
    b = drafter.backbone
    if b.hidden_size != target.hidden_size:
        raise UserError(
            f"the drafter's hidden size {b.hidden_size} is not the target's {target.hidden_size}: "
            "it was made for another target; pass the drafter that belongs to this model"
        )
    if b.vocab_size != target.vocab_size:
        raise UserError(
            f"the drafter's vocabulary of {b.vocab_size} is not the target's {target.vocab_size}: "
            "it was made for another target; pass the drafter that belongs to this model"
        )
    bad = [i for i in drafter.target_layer_ids if not -1 <= i < target.num_layers - 1]
    if bad:
        raise UserError(
            f"the drafter reads target layers {bad}, outside -1..{target.num_layers - 2} of this "
            f"{target.num_layers}-layer target; pass the drafter that belongs to this model"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise UserError(
            f"the drafter's mask token id {drafter.mask_token_id} is outside the vocabulary of "
            f"{target.vocab_size}; correct mask_token_id in its config.json"
        )


@dataclass(frozen=True)
class EngineConfig:
    """How the engine batches, drafts and verifies. Zero or an empty tuple means: choose for this device.

    max_running_requests: request slots (R at most). page_size: tokens a KV page. max_total_tokens: tokens the
    page pool holds. context_length: longest prompt + output. chunked_prefill_size: prompt tokens a step.
    block_size: γ at run time (0: the checkpoint's). row_buckets, token_tiers: the ladders of R and T.
    single_shapes: one bucket each of rows, pages and prefill instead of ladders, so few programs to compile and
    padding in every step: for runs of many prompts. overlap: dispatch a step before the last one is collected
    (None: on GPUs). attention_backend: what computes attention; auto is the fastest kernel that serves the model
    here, else XLA. prefix_cache: keep the pages of finished requests for later ones that begin alike.
    online_calibration: watch how honest confidence is, and refit its temperatures where it drifts; frozen only
    watches. probe_share: chance of a row that its whole block is verified for that, whatever the policy says.
    background_compile: a step for which a larger program is ready runs that one, and a thread compiles its own;
    off, a step compiles what it lacks, so that programs do not depend on time. freeze_cost_table: the cost table
    is not corrected by the times of steps. profile_seconds: after which measuring a cost table at the start begins
    no further program.
    """

    max_running_requests: int = 0
    page_size: int = 64
    max_total_tokens: int = 0
    context_length: int = 0
    chunked_prefill_size: int = 512
    block_size: int = 0
    verify_mode: VerifyMode = "compact"
    dtype: DType = "float32"
    row_buckets: tuple[int, ...] = ()
    token_tiers: tuple[int, ...] = ()
    single_shapes: bool = False
    overlap: bool | None = None
    prefix_cache: bool = True
    attention_backend: AttentionBackend = "auto"
    online_calibration: OnlineCalibrationMode = "off"
    probe_share: float = 1 / 64
    background_compile: bool = False
    freeze_cost_table: bool = False
    profile_seconds: int = 0

    def __post_init__(self) -> None:
        sizes = ("max_running_requests", "page_size", "max_total_tokens", "context_length")
        for name in (*sizes, "chunked_prefill_size", "block_size", "profile_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"{name} is {value!r}; it must be a whole number")
        if self.max_running_requests > MAX_SLOTS:
            raise UserError(f"max_running_requests is {self.max_running_requests}; it must be at most {MAX_SLOTS}")
        for name in (
            "max_running_requests",
            "max_total_tokens",
            "context_length",
            "block_size",
            "profile_seconds",
        ):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 (choose for me) or positive")
        for name in ("page_size", "chunked_prefill_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.online_calibration not in get_args(OnlineCalibrationMode):
            raise UserError(f"online_calibration is {self.online_calibration!r}; it must be off, on or frozen")
        if not (isinstance(self.probe_share, int | float) and 0 <= self.probe_share <= 1):
            raise UserError(f"probe_share is {self.probe_share!r}; it must be a number from 0 to 1")
        if self.attention_backend not in get_args(AttentionBackend):
            raise UserError(
                f"attention_backend is {self.attention_backend!r}; it must be "
                f"{', '.join(get_args(AttentionBackend))}"
            )
        for name in ("row_buckets", "token_tiers"):
            steps = getattr(self, name)
            whole = isinstance(steps, tuple | list) and all(type(x) is int and x > 0 for x in steps)
            if not whole or list(steps) != sorted(set(steps)):
                raise UserError(f"{name} is {steps!r}; it must be positive whole numbers in increasing order")
