"""Checkpoints of a run: whole or not there, and continued only under the configuration they were made with.

Knows: orbax, and what makes two runs the same. Does not know: what is in the state.

orbax writes into a folder of another name and renames it at the end; a checkpoint without that is never listed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jspark.errors import UserError
from jspark.train.step import TrainState

_CONFIG = "run.json"


class StateFiles:
    """The checkpoints in `folder`/state of one run.

    record: configuration of the run; a folder of another run is refused with the difference.
    """

    def __init__(self, folder: Path, record: Mapping[str, Any], *, resume: bool, keep: int = 2):
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._folder = folder
        record = json.loads(json.dumps(record))
        known = folder / _CONFIG
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if known.exists():
                if not resume:
                    raise UserError(
                        f"{folder} holds a training run already; go on with it by --resume, or name another folder"
                    )
                _refuse_difference(json.loads(known.read_text()), record, folder)
            else:
                partial = known.with_name(_CONFIG + ".partial")
                partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
                partial.replace(known)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, enable_async_checkpointing=False, cleanup_tmp_directories=True
            )
            self._manager = ocp.CheckpointManager((folder / "state").absolute(), options=options)
        except (OSError, ValueError) as e:
            raise UserError(f"the training folder {folder} cannot be used ({e}); name another one") from None

    @property
    def latest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def restore(self, like: TrainState) -> TrainState:
        """The newest state that can be read, placed as `like` is; `like` itself where there is none at all.

        Younger ones that cannot be read are removed, since their steps are made again; when none can, nothing is
        removed and UserError says why.
        """
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _plain(like))
        unreadable: dict[int, Exception] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                held = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
            except Exception as e:  # orbax raises many kinds for a damaged folder
                unreadable[step] = e
                continue
            for damaged in unreadable:
                self._manager.delete(damaged)
            return _whole(like, held)
        for step, e in unreadable.items():
            raise UserError(
                f"the checkpoint of step {step} in {self._folder} cannot be read ({_first_line(e)}); name another "
                "folder to start anew"
            )
        return like

    def save(self, state: TrainState) -> None:
        """Writes the state; UserError when it cannot be written, with the earlier checkpoints as they were."""
        step = int(state.step)
        try:
            self._manager.save(step, args=ocp.args.StandardSave(_plain(state)), force=True)
            self._manager.wait_until_finished()
        except Exception as e:  # of whichever layer met the full disk
            raise UserError(
                f"the checkpoint of step {step} cannot be written to {self._folder} ({_first_line(e)}); free some "
                "space and go on with --resume, earlier checkpoints are whole"
            ) from None

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()


def _plain(state: TrainState) -> dict[str, Any]:
    """A nest of dictionaries: file names that do not depend on optax's classes."""
    leaves = jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
    optimizer = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}
    return {"step": state.step, "params": state.params, "optimizer": optimizer}


def _whole(like: TrainState, held: Mapping[str, Any]) -> TrainState:
    leaves, tree = jax.tree_util.tree_flatten_with_path(like.optimizer)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]
    optimizer = jax.tree.unflatten(tree, [held["optimizer"][n] for n in names])
    return TrainState(held["step"], dict(held["params"]), optimizer)


def _refuse_difference(held: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    ours, theirs = _flat(wanted), _flat(held)
    changed = [k for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k)]
    if changed:
        what = ", ".join(f"{k} was {theirs.get(k)!r} and is {ours.get(k)!r}" for k in changed[:4])
        raise UserError(
            f"{folder} was trained under another configuration ({what}); give the same, or name another folder"
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{prefix}.{key}".lstrip(".")).items()}


def _first_line(e: Exception) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0][:200]
