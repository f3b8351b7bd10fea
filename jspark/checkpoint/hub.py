"""Models of the Hugging Face Hub: `org/name` → a folder or GGUF file in the Hub's own cache.

Knows: which files of a repository a model needs (never its pickles), revisions, offline use, and how every
failure reads. Tokens, endpoint and cache are huggingface_hub's own settings (HF_TOKEN, HF_ENDPOINT, HF_HOME).
Does not know: what is in the files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

from jspark.checkpoint.cache import is_offline
from jspark.checkpoint.safetensors_files import INDEX, PICKLES, SINGLE, weight_map
from jspark.errors import UserError
from jspark.files import is_file

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<file>[^@\0]+))?(?:@(?P<revision>[^\0]+))?")
#: Beside the weights, in the order in which they are fetched: small files first, so that weights in the cache
#: mean that all before them is there too.
_SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "tokenizer.json",
)
_TEMPLATES = "additional_chat_templates"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class HubId:
    """`org/name[:file][@revision]`. file: a GGUF file's name, or a part of it such as Q8_0."""

    repo: str
    file: str | None
    revision: str | None


def parse(spec: str) -> HubId | None:
    """The id in `spec`; None for anything else, such as a path."""
    match = _ID.fullmatch(spec)
    return HubId(match["repo"], match["file"], match["revision"]) if match else None


def fetch(hub_id: HubId, revision: str | None = None, offline: bool = False) -> Path:
    """The folder of the model's files in the cache, or its GGUF file; what is missing is downloaded first.

    revision: a branch, tag or commit, where the id names none. Progress is shown on stderr. Raises UserError:
    not found, not allowed, no network, offline and not in the cache, no safetensors, a damaged download.
    """
    if hub_id.revision is not None and revision is not None and hub_id.revision != revision:
        raise UserError(f"{hub_id.repo} was given with two revisions, {hub_id.revision} and {revision}; drop one")
    revision = hub_id.revision or revision or "main"
    if is_offline(offline, "HF_HUB_OFFLINE"):
        return _cached(hub_id, revision) or _raise_not_cached(hub_id, revision)
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).model_info(
            hub_id.repo, revision=revision, files_metadata=True
        )
    except Exception as e:  # of huggingface_hub, of the HTTP client below it, which changes, and of the system
        if _no_answer(e) and (path := _cached(hub_id, revision)):
            return path
        raise _explained(e, hub_id.repo, revision) from None
    return _Repository(hub_id, revision, info).fetch()


class _Repository:
    """A repository at one commit."""

    def __init__(self, hub_id: HubId, revision: str, info: ModelInfo):
        self.id = hub_id
        self.revision = revision
        self.files = {s.rfilename: s for s in info.siblings or ()}
        self.commit = info.sha or revision
        # The first file is fetched by the name that was asked for, so that the cache learns what it stands for.
        self._at = revision

    def fetch(self) -> Path:
        names = self.files.keys()
        if self.id.file is not None or not ({SINGLE, INDEX} & names):
            gguf = _choose_gguf(self.id, names)
            if gguf is None:
                raise UserError(_no_weights(self.id.repo, names))
            return self._get(gguf)
        for name in (*_SMALL, *sorted(n for n in names if _is_template(n))):
            if name in names:
                self._get(name)
        if SINGLE in names:
            return self._get(SINGLE).parent
        index = self._get(INDEX)
        for shard in sorted(set(weight_map(index).values())):
            if shard in names:  # what is not there is named when the folder is opened
                self._get(shard)
        return index.parent

    def _get(self, name: str) -> Path:
        """One file, from the cache or downloaded and then compared with its published hash."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        known = isinstance(try_to_load_from_cache(self.id.repo, name, revision=self.commit), str)
        endpoint = os.environ.get("HF_ENDPOINT") or None
        try:
            path = Path(hf_hub_download(self.id.repo, name, revision=self._at, endpoint=endpoint))
            if self.commit not in path.parts:  # the branch has moved since
                path = Path(hf_hub_download(self.id.repo, name, revision=self.commit, endpoint=endpoint))
        except Exception as e:  # as above
            raise _explained(e, self.id.repo, self.revision, name) from None
        self._at = self.commit
        if not known:
            self._verify(name, path)
        return path

    def _verify(self, name: str, path: Path) -> None:
        file = self.files[name]
        size = path.stat().st_size
        if file.lfs is not None and file.lfs.sha256:
            good = _digest(path, hashlib.sha256()) == file.lfs.sha256
        elif file.blob_id:
            good = _digest(path, hashlib.sha1(b"blob %d\0" % size)) == file.blob_id  # git's own name of it
        else:
            good = file.size in (None, size)
        if not good:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise UserError(
                f"{name} of {self.id.repo} did not arrive as it was published (its hash differs) and was dropped; "
                "try again, and check the network if it happens twice"
            )


def _cached(hub_id: HubId, revision: str) -> Path | None:
    """What `fetch` would return, where the cache holds all of it."""
    from huggingface_hub import snapshot_download

    try:
        # No file is asked for: only which folder the revision is.
        folder = Path(snapshot_download(hub_id.repo, revision=revision, local_files_only=True, allow_patterns=[]))
    except (OSError, ValueError):
        return None
    if hub_id.file is None:
        if (folder / SINGLE).is_file():
            return folder
        if (folder / INDEX).is_file():
            # A name that leads elsewhere is refused when the folder is opened.
            plain = [s for s in set(weight_map(folder / INDEX).values()) if Path(s).name == s]
            return folder if all(is_file(folder / s) for s in plain) else None
    name = _choose_gguf(hub_id, [str(p.relative_to(folder)) for p in folder.rglob("*.gguf")])
    return folder / name if name else None


def _choose_gguf(hub_id: HubId, names: Iterable[str]) -> str | None:
    files = sorted(n for n in names if n.endswith(".gguf"))
    asked = hub_id.file
    if asked is not None:
        fitting = [n for n in files if n == asked] or [n for n in files if asked.lower() in n.lower()]
        if len(fitting) != 1 and files:
            many = f"{len(fitting)} files" if fitting else "no file"
            raise UserError(f"{hub_id.repo} has {many} for {asked}; name one of {_listed(fitting or files)}")
        return fitting[0] if fitting else None
    if len(files) > 1:
        raise UserError(
            f"{hub_id.repo} holds {len(files)} GGUF files; name one as {hub_id.repo}:FILE, of {_listed(files)}"
        )
    return files[0] if files else None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _is_template(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parent.name == _TEMPLATES and len(path.parts) == 2 and path.suffix == ".jinja"


def _no_weights(repo: str, names: Iterable[str]) -> str:
    pickles = sorted(n for n in names if any(PurePosixPath(n).match(pattern) for pattern in PICKLES))
    if pickles:
        return (
            f"{repo} has no safetensors, only pickles ({pickles[0]}), which can run code when opened; "
            "use a repository with model.safetensors"
        )
    return f"{repo} holds neither {SINGLE}, {INDEX} nor a GGUF file; use a repository with the model's weights"


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ── how failures read ─────────────────────────────────────────────────────────────────────────────────────────


def _raise_not_cached(hub_id: HubId, revision: str) -> NoReturn:
    at = "" if revision == "main" else f" at {revision}"
    raise UserError(
        f"there is no file or folder {hub_id.repo!r}, and of the model of that name{at} the Hugging Face cache "
        "does not hold all; go online once (without --offline, HF_HUB_OFFLINE and JSPARK_OFFLINE), or pass a "
        "local folder"
    )


def _status(error: Exception) -> int:
    return getattr(getattr(error, "response", None), "status_code", 0)


def _no_answer(error: Exception) -> bool:
    """Whether the Hub said nothing about the repository: no network, or a fault of its own."""
    return not 400 <= _status(error) < 500


def _explained(error: Exception, repo: str, revision: str, name: str | None = None) -> UserError:
    from huggingface_hub import errors

    what = f"{name} of {repo}" if name else repo
    # What a local entry lacks is only the consequence.
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    error = cause if isinstance(cause, Exception) else error
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{repo} is gated; ask for access on its page and set HF_TOKEN to a token of that account, or run "
            "`hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{repo} has no revision {revision!r}; name one of its branches, tags or commits")
    if isinstance(error, errors.RepositoryNotFoundError) or _status(error) in (401, 403, 404):
        return UserError(
            f"there is no file or folder {repo!r}, and the Hub has no such model for you; check the name, and set "
            "HF_TOKEN where it is private"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"no space is left for {what}; free some, or move the cache with HF_HOME")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return UserError(
            f"the Hugging Face cache cannot be written for {what} ({error.strerror}); set HF_HOME to another "
            "folder"
        )
    why = str(error).strip().partition("\n")[0] or type(error).__name__
    if _status(error):
        return UserError(f"the Hub could not serve {what} ({why}); try again later")
    return UserError(
        f"{what} could not be fetched from the Hub ({why:.200}); check the network and try again, or pass "
        "a local folder"
    )
