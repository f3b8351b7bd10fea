"""The target that a drafter of speculators says it was made for, compared with the one that it is loaded beside.

Knows: the keys of speculators_config.verifier. Does not know: drafters, or how models are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jspark.checkpoint.hf_config import TARGETS, architectures
from jspark.checkpoint.settings import MAX_POSITION, Settings
from jspark.config import DecoderConfig
from jspark.errors import UserError, warn

#: Key → the same size in our configuration.
_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
}


@dataclass(frozen=True)
class Verifier:
    """A target as a drafter's file describes it: its name, architectures and sizes, as far as they are there."""

    name: str
    architectures: tuple[str, ...]
    sizes: Mapping[str, int]
    origin: str

    def compare(self, name: str, target: DecoderConfig) -> None:
        """Warns when the target has another name or architecture; UserError when it has other sizes."""
        for key, size in self.sizes.items():
            ours = getattr(target, _SIZES[key])
            if size != ours:
                raise UserError(
                    f"{self.origin}: the drafter was made for a target with {key} {size}, and here it is {ours}; "
                    "pass the drafter that belongs to this model"
                )
        kinds = {TARGETS[a] for a in self.architectures if a in TARGETS}
        other = self.architectures and target.model_type not in kinds
        ours, theirs = _plain(name), _plain(self.name)
        if other or (theirs and ours and ours not in theirs and theirs not in ours):
            made_for = " ".join(filter(None, (self.name, *self.architectures)))
            warn(
                f"the drafter was made for {made_for}, and the target is {name} ({target.model_type}); output is "
                "right all the same, but drafts may not be: check that the two belong together"
            )


def read_verifier(config: Settings) -> Verifier | None:
    """What `config` says of the drafter's target; None where it has no such section."""
    outer = config.section("speculators_config")
    section = outer and outer.section("verifier")
    if not section:
        return None
    sizes = {key: section.integer(key, high=MAX_POSITION) for key in _SIZES if section.get(key) is not None}
    return Verifier(section.text("name_or_path", ""), architectures(section), sizes, section.origin)


def _plain(name: str) -> str:
    """The last part of a path or id, in lower case and without punctuation."""
    return "".join(c for c in name.rstrip("/").rsplit("/", 1)[-1].lower() if c.isalnum())
