"""`rather push`: the model of a run with its card as one commit of a repository on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from rather.commands.terminal import RunFolder, TrustPaths, command, count, echo, print_table
from rather.config.found import NO_TRUST, OF_A_CARD, Trust
from rather.config.load import load_found
from rather.config.paths import is_local
from rather.config.redaction import hide, redact
from rather.data.hub import CARD, MOST_CARD_BYTES, front_matter
from rather.errors import ConfigError, ServerError
from rather.files import (
    HUB_SECONDS,
    JsonObject,
    read_bytes,
    refuse_outside,
    why_not_from_hub,
)
from rather.run_folder.names import CONFIG, DATA_REPORT, refuse_other_folder
from rather.tracking.json_lines import read_object

RESULTS = ("model", "adapter", "best_model")  # of a run, the first that is there
LICENCE = ("license", "license_name", "license_link")
UNKNOWN = "unknown"  # a base that the run does not name, and its licence
WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
# What an export writes besides: of other files nobody knows what they hold.
CONFIGS = re.compile(
    r"((generation_|adapter_|tokenizer_|(\w+_)?(pre)?processor_)?config|rather|tokenizer|"
    r"special_tokens_map|added_tokens|chat_template)\.json|"
    r"(additional_chat_templates/[\w-]+|chat_template)\.jinja|"
    r"(configuration|modeling|tokenization|\w*processing)_\w+\.py"
)
BASE = re.compile(r'"base_model_name_or_path": "((?:[^"\\]|\\.)*)"')
FOLDERS = r"(~|/[^\s`|,)\"'/]+)/([^\s`|,)\"'/]+/)*"
IN_TEXT, IN_JSON = (re.compile(before + FOLDERS) for before in (r"(?<![\w:/.<])", r'(?<=": ")'))

Files = dict[str, Path | bytes]


@command
def push_command(
    run: RunFolder,
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME")],
    base: Annotated[str | None, typer.Option(metavar="ORG/NAME")] = None,
    public: bool = False,
    dry_run: bool = False,
    trust_paths: TrustPaths = False,
) -> None:
    """Upload the model of a run with its card to the hub, as one commit.

    The repository is private unless --public is given. The token is HF_TOKEN, or that of
    `hf auth login`. To push another result of the run, name its folder: output/dpo/best_model.

    repo: The repository; it is created if it does not exist.
    base: The model on the hub that the local folder of the base is a copy of.
    public: Everyone may read it.
    dry_run: Show the card and the files; upload nothing.
    """
    for name in (repo, base or repo):
        if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
            raise ConfigError(f"{name}: name the repository as ORG/NAME.")
    run_dir, folder = result_of(run.expanduser())
    trust = Trust(paths=trust_paths)
    files = {**files_in(folder, base), CARD: run_card(run_dir, folder, trust, base).encode()}
    if others := sorted(
        {path.name for path in folder.iterdir()} - {Path(x).parts[0] for x in files}
    ):
        echo(f"Left out, since no export writes it: {', '.join(others)}")
    if dry_run:
        echo(files[CARD].decode())  # type: ignore[union-attr]
        print_table(("file", "bytes"), [(name, size_of(file)) for name, file in files.items()])
        echo(f"Nothing was uploaded. {'Public' if public else 'Private'} repository: {repo}")
        return
    address = upload(repo, files, private=not public)
    total = count(len(files), "file")
    echo(f"{total} uploaded to {address} ({'public' if public else 'private'})")


def result_of(path: Path) -> tuple[Path, Path]:
    """Return a run folder and the folder of its result; either may be named."""
    if path.name in RESULTS and path.is_dir():
        refuse_other_folder(path.parent)
        return path.parent, path
    refuse_other_folder(path)
    for name in RESULTS:
        if (path / name).is_dir():
            refuse_outside(path, path / name)
            return path, path / name
    raise ConfigError(f"{path}: has no model yet; train it to the end first.")


def files_in(folder: Path, base: str | None = None) -> Files:
    """Return what an export wrote to a folder, by names in the repository, without its card.

    Paths of this machine are cut out of the JSON files; an adapter names `base`.
    """
    files: Files = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if WEIGHTS.fullmatch(name) or CONFIGS.fullmatch(name):
            refuse_outside(folder, file)
            has_paths = file.suffix == ".json" and name != "tokenizer.json"
            files[name] = _published(file, base) if has_paths else file
    return files


def _published(file: Path, base: str | None) -> bytes:
    text = IN_JSON.sub("", original := read_bytes(file).decode("utf-8", "replace"))
    if trained_on := BASE.search(original):
        base = base or trained_on[1]
        if is_local(base):
            raise ConfigError(
                f"{file}: names the folder {base}, which others do not have; add --base ORG/NAME, "
                "its name on the hub."
            )
        text = BASE.sub(f'"base_model_name_or_path": "{base}"', text)
    return text.encode()


def size_of(file: Path | bytes) -> int:
    return len(file) if isinstance(file, bytes) else file.stat().st_size


# --- the card ---


def run_card(
    run_dir: Path, folder: Path, trust: Trust = NO_TRUST, hub_base: str | None = None
) -> str:
    """Return the card that the run wrote, with the data, the base and its licence added."""
    config = load_found(run_dir / CONFIG, trust, OF_A_CARD)
    actor, reference = config.actor_train.model_args, config.reference.model_args
    base = actor.model_name_or_path or UNKNOWN
    refuse_outside(folder, folder / CARD)
    exported = ""
    if (folder / CARD).is_file():
        exported = read_bytes(folder / CARD, MOST_CARD_BYTES).decode("utf-8", "replace")
    body = re.sub(r"\A---\n.*?\n---\n", "", exported, flags=re.DOTALL).strip()
    for name in {base, reference.model_name_or_path or base}:
        body = body.replace(f"`{name}`", f"`{public_name(name)}`")
    data_report = read_object(run_dir / DATA_REPORT)
    try:
        data_section, datasets = _data_section(data_report), _datasets(data_report)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{run_dir / DATA_REPORT}: is not a report of a run ({error}).") from None
    text = f"{body}\n\n{data_section}"
    return card(text, hub_base or base, actor.revision, _top(folder / CARD), datasets)


def card(
    text: str, base: str, revision: str | None, top: JsonObject, datasets: Sequence[str] = ()
) -> str:
    """Return a card whose front matter names the base and its licence, which is never guessed."""
    licence = licence_of(base, revision)
    values = {**top, **licence}
    if not is_local(base):
        values["base_model"] = base
    if datasets:
        values["datasets"] = list(datasets)
    source = f"The licence is that of `{public_name(base)}`, as its card says."
    if licence == {"license": UNKNOWN}:
        source = f"The licence is unknown: no card of `{public_name(base)}` names one."
    front = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    text = f"{text.strip()}\n\n## Licence\n\n{source} The licence of the data is not stated here.\n"
    return redact(IN_TEXT.sub("", f"---\n{front}---\n\n{text}"))


def public_name(name: str) -> str:
    """Return a hub name, or the last part of a path: others need not know where it was."""
    return Path(name).name if is_local(name) else name


@cache  # a trainer of rather.trl writes a card with each checkpoint
def licence_of(base: str, revision: str | None = None) -> JsonObject:
    """Return what the card of a model says about its licence; unknown if it says nothing."""
    from huggingface_hub import hf_hub_download

    if base == UNKNOWN:
        return {"license": UNKNOWN}
    file = Path(base).expanduser() / CARD
    if not is_local(base):
        try:
            file = Path(hf_hub_download(base, CARD, revision=revision, etag_timeout=HUB_SECONDS))
        except Exception:  # no card, no such model, or no network
            return {"license": UNKNOWN}
    else:
        refuse_outside(file.parent, file)
    top = _top(file)
    licence = {key: top[key] for key in LICENCE if isinstance(top.get(key), str | list)}
    return licence if "license" in licence else {"license": UNKNOWN}


def _top(file: Path) -> JsonObject:
    """Return the front matter of a card; nothing without a card, or if it cannot be read."""
    try:
        return front_matter(read_bytes(file, MOST_CARD_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}


def _datasets(data: JsonObject) -> list[str]:
    """Return the names of the hub's datasets that the run was trained on."""
    addresses = data.get("train", {}).get("commits", {})
    return sorted({re.sub(r"[@:].*", "", name[len("hf://datasets/") :]) for name in addresses})


def _data_section(data: JsonObject) -> str:
    train, unit = data.get("train", {}), data.get("rows", "pairs")
    commits = [f"`{name}` (commit {commit})" for name, commit in train.get("commits", {}).items()]
    names = commits or [f"`{Path(file['path']).name}`" for file in train.get("files", [])]
    lines = [
        f"Trained on {train.get('used', '?')} {unit} of {', '.join(names) or 'unknown files'}."
    ]
    dropped = {kind: entry["count"] for kind, entry in train.get("dropped", {}).items()}
    if dropped:
        kinds = ", ".join(f"{number} {kind}" for kind, number in dropped.items())
        lines.append(f"Dropped: {kinds}.")
    held_out = sum(entry.get("pairs", 0) for entry in data.get("evals", {}).values())
    lines.append(f"Held out: {held_out} {unit}.")
    return "## Data\n\n" + " ".join(lines)


# --- the upload ---


def upload(
    repo: str,
    files: Mapping[str, Path | bytes],
    *,
    private: bool | None,
    token: str | None = None,
    message: str = "Upload by rather push",
    revision: str | None = None,
) -> str:
    """Write files to a repository as one commit; return its address.

    Weights of an earlier commit that are not among the files are removed: a loader could prefer
    them. `private` None: as the organization decides.
    """
    import huggingface_hub as hub

    token = token or hub.get_token()
    if not token:
        raise ConfigError("no token for the hub: set HF_TOKEN, or run `hf auth login`.")
    hide([token])
    api = hub.HfApi(token=token, library_name="rather")
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        repository = api.model_info(repo)
        if private and repository.private is False:
            raise ConfigError(
                f"{repo}: exists and is public; add --public, or choose another name."
            )
        stale = {entry.rfilename for entry in repository.siblings or []} - files.keys()
        operations: list[Any] = [hub.CommitOperationAdd(name, file) for name, file in files.items()]
        operations += [
            hub.CommitOperationDelete(name) for name in sorted(filter(WEIGHTS.fullmatch, stale))
        ]
        commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
    except ConfigError:
        raise
    except Exception as error:  # of the hub, of its HTTP library, or of the network
        status = getattr(getattr(error, "response", None), "status_code", None)
        hint = " HF_TOKEN must be a token that may write there." if status in (401, 403) else ""
        raise ServerError(
            f"{repo}: not uploaded: {redact(why_not_from_hub(error))}.{hint}"
        ) from error
    return str(commit.repo_url)
