"""Groups of command line flags that several commands share, and the objects made of them.

Knows: flags, their defaults and help. Does not know: commands. JAX is imported only when something is loaded, so
that `--help` is quick.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from jspark.calibration import read_temperatures
from jspark.config import (
    Algorithm,
    AttentionBackend,
    DType,
    EngineConfig,
    LoadFormat,
    OnlineCalibrationMode,
    VerifyMode,
)
from jspark.errors import UserError
from jspark.request import Sampler, SamplingParams
from jspark.structured import StructuredOutputs

if TYPE_CHECKING:
    from jspark.llm import LLM
    from jspark.record import Observer

#: Left to the engine.
Chosen = Annotated[int, arg(help_behavior_hint="(default: chosen for the device)")]
#: Only where the drafter leaves it open.
AnchorPredicts = Annotated[
    Literal["yes", "no"] | None, arg(metavar="{yes,no}", help_behavior_hint="(default: as the drafter says)")
]


#: A branch, tag or commit.
Revision = Annotated[str | None, arg(metavar="REV", help_behavior_hint="(default: main)")]


@dataclass(frozen=True)
class ModelFlags:
    """Which model, and under which name."""

    model_path: str
    """A Hugging Face folder, a GGUF file, the built-in smollm2-135m, or a model of the Hub: org/name,
    org/name@REV, or org/name:FILE for one of its GGUF files."""
    revision: Revision = None
    """Branch, tag or commit of a model of the Hub."""
    offline: bool = False
    """Fetches nothing: models come from the disk. HF_HUB_OFFLINE and JSPARK_OFFLINE do the same."""
    load_format: LoadFormat = "auto"
    """auto reads the weights; dummy takes random ones, so that a folder with config.json alone can be timed."""
    served_model_name: Annotated[
        str | None, arg(metavar="NAME", help_behavior_hint="(default: the checkpoint's)")
    ] = None
    """The model's name in outputs."""
    chat_template: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: the checkpoint's)")] = (
        None
    )
    """A chat template (jinja) to use for chats."""


@dataclass(frozen=True)
class SpeculationFlags:
    """What drafts, and how its drafts are verified."""

    speculative_algorithm: Annotated[
        Algorithm | None,
        arg(metavar="{NONE,DFLASH,DSPARK,EAGLE3}", help_behavior_hint="(default: the drafter's, or NONE)"),
    ] = None
    """How to draft."""
    speculative_draft_model_path: Annotated[
        str | None, arg(metavar="PATH", help_behavior_hint="(default: none)")
    ] = None
    """The drafter's folder or Hub id, or `untrained`: random weights, which show only what drafting costs."""
    speculative_draft_model_revision: Revision = None
    """Branch, tag or commit of a drafter of the Hub."""
    draft_anchor_predicts: AnchorPredicts = None
    """Whether row 0 of the drafter predicts, for drafters that do not say so themselves."""
    skip_draft_probe: bool = False
    """Leaves out the trial that warns about drafters whose drafts are hardly ever accepted."""
    speculative_dspark_block_size: Annotated[int, arg(help_behavior_hint="(default: the drafter's)")] = 0
    """Drafted tokens a step, γ."""
    speculative_num_steps: Annotated[int, arg(help_behavior_hint="(default: the drafter's)")] = 0
    """The same for EAGLE3: the length of its chain."""
    speculative_dspark_confidence_sts_path: Annotated[
        str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """Calibration of the drafter's confidence: JSON with "temperatures", one a drafted token."""
    verify_mode: VerifyMode = "compact"
    """compact verifies the chosen windows, static every draft; cap-accept pays for static, commits compact's."""
    verify_policy: Annotated[str, arg(metavar="auto|full|fixed:K|threshold:X|argmax|argmax:FILE")] = "auto"
    """How much of each block is verified. argmax: what pays best by the cost table, in FILE or measured here;
    auto: argmax where the drafter has a confidence head and there is a cost table, else full."""
    speculative_dspark_sps_table_path: Annotated[
        str | None, arg(metavar="FILE", help_behavior_hint="(default: the one measured on this device)")
    ] = None
    """The cost table: one that jspark profile wrote, or either form of SGLang's."""
    online_calibration: OnlineCalibrationMode = "off"
    """Watches how honest the drafter's confidence is, and refits it where it drifts; frozen only watches."""
    probe_share: float = EngineConfig.probe_share
    """Chance of an answer's step to be verified whole for that."""


@dataclass(frozen=True)
class EngineFlags:
    """Number format and sizes."""

    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of weights and KV cache."""
    max_running_requests: Chosen = 0
    """Prompts that are answered at the same time."""
    page_size: int = EngineConfig.page_size
    """Tokens a page of the KV cache."""
    max_total_tokens: Chosen = 0
    """Tokens that the KV cache holds, of all prompts together."""
    context_length: Annotated[int, arg(help_behavior_hint="(default: the model's)")] = 0
    """Longest prompt and answer together, in tokens."""
    chunked_prefill_size: int = EngineConfig.chunked_prefill_size
    """Prompt tokens that a step takes in beside the answers in progress."""
    attention_backend: AttentionBackend = "auto"
    """What computes attention; auto is the fastest kernel that serves the model on this device, else XLA."""
    row_buckets: Annotated[
        str | None, arg(metavar="R,R,…", help_behavior_hint="(default: a ladder that doubles)")
    ] = None
    """Row counts that steps are padded to; fewer mean fewer programs to compile."""
    single_shapes: bool = False
    """One bucket each of rows, pages and prefill in place of ladders: few programs, padding in every step."""
    prefix_cache: Annotated[bool, arg(name="radix-cache")] = True
    """Keep the pages of finished answers for later prompts that begin alike."""
    disable_overlap_schedule: Annotated[bool, arg(help_behavior_hint="(default: only on CPUs)")] = False
    """Waits for the results of a step before the next one is begun; the tokens are the same."""
    trace_out: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Records every step for replay (docs/traces.md)."""
    profile_seconds: Annotated[int, arg(help_behavior_hint="(default: 20 on the CPU, 120 elsewhere)")] = 0
    """Seconds after which measuring the cost table begins no further program."""
    freeze_cost_table: bool = False
    """Leaves the cost table as it was measured, whatever the steps take."""


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen, and when an answer ends."""

    n: int = 1
    """Answers to each prompt; with a seed, answer i has the seed plus i."""
    max_new_tokens: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 128, or what the context leaves)")
    ] = None
    """Tokens an answer has at most."""
    min_new_tokens: int = 0
    """Tokens before which nothing ends an answer."""
    temperature: float = 0.0
    """0 takes the likeliest token every time (greedy)."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; 1 is off."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability; 0 is off."""
    seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: none)")] = None
    """Makes sampled tokens repeatable."""
    speculative_sampling: Sampler = "auto"
    """coupled keeps plain decoding's tokens, rejection its distribution; auto is coupled where there is a seed."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT")] = ()
    """Ends the answer before this text."""
    stop_token_ids: Annotated[tuple[str, ...], arg(metavar="ID,ID,…")] = ()
    """Token ids that end the answer, beside the model's own."""
    ignore_eos: bool = False
    """Goes on after the model's own end of text."""
    repetition_penalty: float = 1.0
    """Makes tokens of prompt and answer less likely (above 1) or likelier; 1 is off."""
    frequency_penalty: float = 0.0
    """Lowers the logit of a token for each time that it is in the answer; 0 is off."""
    presence_penalty: float = 0.0
    """Lowers the logit of a token once when it is in the answer; 0 is off."""
    logit_bias: Annotated[tuple[str, ...], arg(metavar="ID:BIAS,ID:BIAS,…")] = ()
    """Added to the logits of these token ids."""
    bad_words: Annotated[tuple[str, ...], arg(metavar="TEXT")] = ()
    """Never appears in the answer."""
    logprobs: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: none)")] = None
    """With --json: log-probabilities of the answer's tokens and of this many of the likeliest ones, 0 to 20."""
    prompt_logprobs: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: none)")] = None
    """With --json: the same of the prompt's tokens."""
    echo: bool = False
    """Begins the answer's text with the prompt."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the text."""

    def params(self) -> SamplingParams:
        """The parameters; UserError for what is out of range, or has no effect on greedy answers."""
        params = SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens="auto" if self.max_new_tokens is None else self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            stop=self.stop,
            stop_token_ids=[i for text in self.stop_token_ids for i in token_ids(text, "--stop-token-ids")],
            ignore_eos=self.ignore_eos,
            speculative_sampling=self.speculative_sampling,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=dict(pair for text in self.logit_bias for pair in _biases(text)),
            bad_words=self.bad_words,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            echo=self.echo,
            skip_special_tokens=self.skip_special_tokens,
        )
        unused = {
            "--seed": self.seed is not None,
            "--top-k": self.top_k > 0,
            "--top-p": self.top_p < 1,
            "--min-p": self.min_p > 0,
        }
        if self.temperature == 0 and any(unused.values()):
            flag = next(name for name, given in unused.items() if given)
            raise UserError(f"{flag} does nothing at temperature 0; add --temperature 1, say, or drop it")
        return params


@dataclass(frozen=True)
class StructureFlags:
    """What an answer must look like; one of these."""

    json_schema: Annotated[str | None, arg(metavar="FILE|JSON", help_behavior_hint="(default: none)")] = None
    """JSON that fits this schema; `{}` is any JSON."""
    regex: Annotated[str | None, arg(metavar="REGEX", help_behavior_hint="(default: none)")] = None
    """Text that this expression matches as a whole."""
    choice: Annotated[tuple[str, ...], arg(metavar="TEXT")] = ()
    """One of these texts."""
    grammar: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Text of the Lark or GBNF grammar in this file."""

    def structured_outputs(self) -> StructuredOutputs | None:
        """The constraint; UserError for more than one, or for a file that cannot be read."""
        given: dict[str, Any] = {"json": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        given = {k: v for k, v in given.items() if v is not None} | (
            {"choice": self.choice} if self.choice else {}
        )
        if not given:
            return None
        if len(given) > 1:
            raise UserError("--json-schema, --regex, --choice and --grammar exclude each other; give one of them")
        if "json" in given and not given["json"].lstrip().startswith("{"):
            given["json"] = _read(given["json"], "JSON schema")
        if "grammar" in given:
            given["grammar"] = _read(given["grammar"], "grammar")
        return StructuredOutputs(**given)


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as e:  # ValueError: no UTF-8, or a path with a zero byte
        why = e.strerror if isinstance(e, OSError) else e
        raise UserError(f"the {what} {path:.200} cannot be read ({why}); pass a text file in UTF-8") from None


def open_llm(
    model: ModelFlags,
    speculation: SpeculationFlags,
    engine: EngineFlags,
    observer: Observer | None = None,
    **more: Any,
) -> LLM:
    """The model that the flags describe, loaded; UserError for what cannot be. observer, more: see `LLM`."""
    from jspark.llm import LLM

    sts = speculation.speculative_dspark_confidence_sts_path
    size, steps = speculation.speculative_dspark_block_size, speculation.speculative_num_steps
    if steps and (size or speculation.speculative_algorithm not in (None, "EAGLE3")):
        raise UserError(
            "--speculative-num-steps is EAGLE3's; give other drafters --speculative-dspark-block-size alone"
        )
    options = asdict(engine) | {"row_buckets": _row_buckets(engine.row_buckets)}
    return LLM(
        model.model_path,
        speculation.speculative_draft_model_path,
        speculation.speculative_algorithm,
        revision=model.revision,
        draft_revision=speculation.speculative_draft_model_revision,
        offline=model.offline,
        load_format=model.load_format,
        served_model_name=model.served_model_name,
        chat_template=model.chat_template,
        draft_anchor_predicts=yes_or_no(speculation.draft_anchor_predicts),
        draft_probe=not speculation.skip_draft_probe,
        policy=speculation.verify_policy,
        sts=None if sts is None else read_temperatures(sts),
        verify_mode=speculation.verify_mode,
        block_size=size or steps,
        cost=speculation.speculative_dspark_sps_table_path,
        observer=observer,
        online_calibration=speculation.online_calibration,
        probe_share=speculation.probe_share,
        overlap=False if options.pop("disable_overlap_schedule") else None,
        **options,
        **more,
    )


def _row_buckets(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--row-buckets {text!r} is no list of numbers; write 8,64") from None


def yes_or_no(answer: Literal["yes", "no"] | None) -> bool | None:
    """The answer as a truth value; None for no answer."""
    return None if answer is None else answer == "yes"


#: Parameters whose flags have other names, or names that are words of plain sentences.
_FLAGS = {
    "max_tokens": "--max-new-tokens",
    "min_tokens": "--min-new-tokens",
    "block_size": "--speculative-dspark-block-size",
    "sts": "--speculative-dspark-confidence-sts-path",
    "policy": "--verify-policy",
    "cost": "--speculative-dspark-sps-table-path",
}


def in_flags(message: str) -> str:
    """`message` with the flags' names in place of the parameters': what a user of the command line can change."""
    if "config.json" in message:
        return message  # names of a file's own keys
    groups = (SpeculationFlags, EngineFlags, SamplingFlags, StructureFlags)
    known = {f.name: "--" + f.name.replace("_", "-") for group in groups for f in fields(group)} | _FLAGS
    # A name with an underscore is no plain word; any other one is a parameter only where it begins the message.
    snake = "|".join(name for name in known if "_" in name)
    message = re.sub(rf"(?<![\w./'\"-])({snake})(?![\w./'\"-])", lambda m: known[m[1]], message)
    return re.sub(rf"^({'|'.join(known)})(?= is |: )", lambda m: known[m[1]], message)


def _biases(text: str) -> list[tuple[int, float]]:
    try:
        return [(int(i), float(bias)) for i, bias in (pair.split(":") for pair in text.split(","))]
    except ValueError:
        raise UserError(f"--logit-bias {text!r} is no list of ids and numbers; write 504:-5,3575:2.5") from None


def token_ids(text: str, flag: str) -> list[int]:
    """The ids in `1,2,3`; UserError for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} {text!r} is no list of token ids; write 1,2,3") from None
