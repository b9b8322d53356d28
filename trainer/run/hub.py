"""Publication of a run's model on the Hugging Face hub, at its end (`hub.repo`) or later (`lockstep publish`).

    files of the model ─► folder with card and curve ─► checked: nothing private, valid front matter ─► uploaded

The folder is complete before anything is sent. It stays, so an upload that fails or is offline is repeated by `hf
upload`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from omegaconf import DictConfig, OmegaConf

from lockstep.rollout.errors import ConfigError, DataError, HubError
from lockstep.rollout.system.plain_files import behind_link, read_plain
from lockstep.trainer.checkpoint.run_dir import ADAPTER, RunDirectory
from lockstep.trainer.checkpoint.stored import check
from lockstep.trainer.checks.names import HUB_ID
from lockstep.trainer.compose import to_config, unknown_keys
from lockstep.trainer.config.redaction import redact_text
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.config.schema import Config
from lockstep.trainer.observe.metrics_log import read_metrics
from lockstep.trainer.observe.trackers.view import short_path
from lockstep.trainer.run.model_card import CURVE, TrainedModel, is_local, model_card, public, reward_curve
from lockstep.trainer.settings_file import fit

CARD = "README.md"
WEIGHTS = "*.safetensors"
TOKENIZER = (
    *("tokenizer*.json", "tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template*"),
    *("preprocessor_config.json", "processor_config.json"),
)
MODEL = (WEIGHTS, "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json", "*.py")
"""Names of what is uploaded of a directory: no optimizer states, no rollouts, nothing else that lies there."""
_MARK = "\n<!-- made by lockstep publish: {} -->\n"
_ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
    403: "use a token that may write there, or name a repository of yours",
    404: "check the user or organization in the name",
}


def publish(
    path: Path,
    repo: str,
    *,
    private: bool | None = None,
    checkpoint: int | None = None,
    adapter: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Write the folder of a run's model with its card, and upload it unless the hub is offline or `out` names a folder.

    Args:
        private: for a new repository; None: `hub.private` of the run.
        checkpoint: update whose checkpoint is published; None: the model that the run has left.
        adapter: leave out the weights that the adapter was merged into.
        out: folder to write; None: `hub/` in the run.

    Raises `LockstepError`: no run or model there, a folder in use, something private in the files, a failed upload.
    """
    if not HUB_ID.fullmatch(repo):
        raise HubError(f"{repo} is not the id of a repository; expected <user or organization>/<name>, as me/my-model")
    run = RunDirectory(behind_link(path))
    config = _saved_config(run)
    private = config.hub.private if private is None else private
    lines = read_metrics(run.metrics) if run.metrics.is_file() else []
    update = max((int(line["step"]) for line in lines), default=0) if checkpoint is None else checkpoint
    lines = [line for line in lines if line["step"] <= update]
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HubError(f"--out {out} is in use; name a new folder, or remove it")
    model = TrainedModel(
        config=config, lines=lines, provenance=_provenance(run), update=update, adapter=adapter, repo=repo
    )
    folder = run.hub if out is None else out
    with TemporaryDirectory(dir=run.path, prefix=".hub-") as temporary:
        source, staged = run.model, Path(temporary) / "hub"
        if checkpoint is not None:
            source = Path(temporary)
            _export(run, model, source)
        files, is_adapter = _files(run, source, adapter=adapter)
        _copy(files, staged)
        _write_card(staged, run, replace(model, adapter=is_adapter), say)
        _refuse_private(staged, run)
        if out is not None:
            shutil.copytree(staged, out, dirs_exist_ok=True)
        else:
            if run.hub.exists():
                shutil.rmtree(run.hub)
            staged.rename(run.hub)
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    say(f"{short_path(folder)}: {len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB")
    for name, size in sizes.items():
        say(f"  {size / 1e6:10.3f} MB  {name}")
    command = f"hf upload {repo} {shlex.quote(short_path(folder))} . --{'' if private else 'no-'}private"
    if out is not None or huggingface_hub.is_offline_mode():
        say(f"nothing was uploaded{' (HF_HUB_OFFLINE)' if out is None else ''}; upload it with: {command}")
        return
    _upload(folder, repo, private=private, message=f"{update} updates", command=command, say=say)


def _saved_config(run: RunDirectory) -> Config:
    """Read the settings of a run; those of another version are left out. Raises `ConfigError`."""
    if not run.config.is_file():
        raise ConfigError(f"{run.path} is not the directory of a run: it has no config.yaml; name one, as runs/latest")
    tree = read_saved(run.config)
    for key in unknown_keys(tree):
        place, _, last = key.rpartition(".")
        if isinstance(section := OmegaConf.select(tree, place) if place else tree, DictConfig):
            section.pop(last, None)
    values: Any = OmegaConf.to_container(tree)
    return to_config(fit(values, run.config))


def _provenance(run: RunDirectory) -> Mapping[str, Any]:
    try:
        values = json.loads(read_plain(run.provenance)) if run.provenance.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{run.provenance} cannot be read: {error}; remove it to publish without versions") from error
    return values if isinstance(values, Mapping) else {}


def _export(run: RunDirectory, model: TrainedModel, directory: Path) -> None:
    """Write the model, or the adapter, and the tokenizer of a checkpoint. Raises `HubError` without it."""
    from lockstep.trainer.build import make_chat  # a finished run has its model
    from lockstep.trainer.checkpoint.export import export_model

    place, settings = run.checkpoints / f"step-{model.update}", model.config.model
    if (problem := check(place) if place.is_dir() else "is not there") is not None:
        raise HubError(f"{place} {problem}; set --checkpoint to one of: {_saved_updates(run) or 'none is there'}")
    settings.trust_remote_code = False  # others may have written the run
    make_chat(settings, history=model.config.environment.history).save_pretrained(directory)
    if (place / ADAPTER).is_dir():
        shutil.copytree(place / ADAPTER, directory / ADAPTER)
    else:
        export_model(place, settings, directory, has_critic=model.config.plan.has_critic)


def _saved_updates(run: RunDirectory) -> str:
    return ", ".join(sorted((place.name[5:] for place in run.checkpoints.glob("step-*")), key=lambda n: (len(n), n)))


def _files(run: RunDirectory, source: Path, *, adapter: bool) -> tuple[dict[str, Path], bool]:
    """Return the files of a model by their names in the repository, and True if it is an adapter alone."""
    own, of_adapter = _matching(source, (*MODEL, *TOKENIZER)), _matching(source / ADAPTER, MODEL)
    has_weights = any(fnmatch(name, WEIGHTS) for name in own) and "config.json" in own
    if of_adapter and (adapter or not has_weights):
        return {**_matching(source, TOKENIZER), **of_adapter}, True
    if adapter or not has_weights:
        kind, expected = ("adapter", f"{ADAPTER}/") if adapter else ("model", f"config.json and {WEIGHTS}")
        entries = ", ".join(sorted(entry.name for entry in source.iterdir())) if source.is_dir() else "no directory"
        saved = _saved_updates(run)
        advice = f"name a checkpoint with --checkpoint, one of {saved}" if saved else "let the run reach its end first"
        raise HubError(f"{source} holds no {kind}: found {entries or 'nothing'}, expected {expected}; {advice}")
    return {**own, **{f"{ADAPTER}/{name}": file for name, file in of_adapter.items()}}, False


def _matching(directory: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    """Return the regular files of a directory whose names match; a link could lead to any file of the user."""
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    is_model = {file.name: file for file in files if any(fnmatch(file.name, pattern) for pattern in patterns)}
    return {name: file for name, file in is_model.items() if file.is_file() and not file.is_symlink()}


def _copy(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files into a new folder, without local paths in their JSON; weights are links where that is possible."""
    for name, file in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("config.json"):
            target.write_text(json.dumps(_without_paths(json.loads(read_plain(file))), indent=2))
            continue
        try:
            (os.link if fnmatch(name, WEIGHTS) else shutil.copyfile)(file, target)
        except OSError:  # a file system without links
            shutil.copyfile(file, target)


def _without_paths(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(item, key) for key, item in value.items()}
    is_path = isinstance(value, str) and name.endswith("name_or_path") and is_local(value)
    return public(value) if is_path else value


def _write_card(folder: Path, run: RunDirectory, model: TrainedModel, say: Callable[[str], None]) -> None:
    """Write curve and card. A card that a user has edited, in `hub/` or beside the model, is kept."""
    picture = reward_curve(model)
    if picture is None:
        say("the card has no reward curve: no rewards, or no matplotlib (pip install 'lockstep-rl[plot]')")
    else:
        (folder / CURVE).write_bytes(picture)
    cards = [card for card in (run.hub / CARD, run.model / CARD) if card.is_file() and not _is_made(read_plain(card))]
    for card in cards[:1]:
        say(f"{short_path(card)} is edited by hand, so it is the card; delete it for one made of the run")
    text = read_plain(cards[0]) if cards else str(model_card(model, has_curve=picture is not None))
    try:
        huggingface_hub.ModelCard(text)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise HubError(f"the front matter cannot be read ({error}); correct or delete {cards[0]}") from error
    if cards[:1] != [run.hub / CARD]:  # edits of what is written now are seen next time
        text += _MARK.format(_digest(text))
    (folder / CARD).write_text(text, encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_made(card: str) -> bool:
    """Return True for a card that is as `_write_card` wrote it."""
    text = card[: -len(_MARK.format(_digest("")))]
    return card == text + _MARK.format(_digest(text))


def _refuse_private(folder: Path, run: RunDirectory) -> None:
    """Raise `HubError` if the card or a file of settings has a secret or a local path."""
    for name in (CARD, *(f"{place}{file}" for place in ("", f"{ADAPTER}/") for file in MODEL if "*" not in file)):
        text = (folder / name).read_text(errors="replace") if (folder / name).is_file() else ""
        for problem in _private(text, run):
            raise HubError(f"{name} has {problem}, so nothing is uploaded; remove it in {run.path}, then publish again")


def _private(text: str, run: RunDirectory) -> Iterator[str]:
    for place in (str(Path.home()), str(run.path.resolve().parent)):
        if len(place) > 1 and re.search(rf"{re.escape(place)}(?![\w-])", text):
            yield f"the local path {place}"
    if redact_text(text) != text:
        yield "what looks like a secret"


def _upload(folder: Path, repo: str, *, private: bool, message: str, command: str, say: Callable[[str], None]) -> None:
    """Upload the folder as a commit on top of what the repository has. Raises `HubError`; the folder is kept."""
    try:
        api = huggingface_hub.HfApi()  # the token is that of `hf auth login`, or HF_TOKEN
        huggingface_hub.ModelCard.load(folder / CARD).validate()
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            info = None
        others = [one.rfilename for one in (info and info.siblings) or () if one.rfilename != ".gitattributes"]
        if info is not None and others:
            stay = [name for name in others if not (folder / name).is_file()]
            say(
                f"{repo} exists ({'private' if info.private else 'public'}) with {len(others)} files; this is one more "
                f"commit on top of them, and {', '.join(stay) or 'no other file'} of it stays"
            )
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:  # of many kinds: the client's, the transport's, of the card
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        lines = [line for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
        raise HubError(
            f"{repo}: the upload failed ({redact_text(lines[0])}); "
            f"{_ADVICE.get(status or 0, 'try again when the hub can be reached')}; {short_path(folder)} is complete: "
            f"publish again, or type: {command}"
        ) from error
    say(f"uploaded       {address}")
