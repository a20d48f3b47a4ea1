"""Open and read files that others may have made: regular files, within limits of size and depth.

Files that a run owns are never links. Inside a model or adapter folder a link may lead only to
another file of that folder, or of its hub cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import resource
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import yaml

from rather.errors import ConfigError, DiskError

log = logging.getLogger(__name__)
T = TypeVar("T")
JsonObject = dict[str, Any]

MOST_BYTES = 1_000_000  # of YAML
MOST_JSON_BYTES = 256 << 20  # the largest tokenizer.json has a tenth of it
MOST_VALUES = 20_000  # a config has some hundred; an alias bomb has 10^9
MOST_DEPTH = 100
MOST_DIGITS = 4_300  # Python's own limit; YAML's 1:00:00 would be computed
MOST_LAYERS, MOST_WIDTH = 10_000, 10_000_000
Opener = Callable[[str, int], int]
LAYERS = re.compile(r"(.+_)?layers?")
WIDTHS = re.compile(
    r"(hidden|intermediate|vocab)_size|head_dim|num_.*heads|n_(embd|inner)|d_(model|ff)|ffn_dim|r"
)
VOCABULARIES = {"tokenizer.json", "vocab.json"}  # large, and not read by recursion
# What transformers, tokenizers and PEFT open in a folder.
OPENED = {".json", ".safetensors", ".jinja", ".model", ".txt", ".py"}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_SECONDS = 5  # until the hub counts as unreachable
HUB_REASONS = {
    "RepositoryNotFoundError": "unknown, or private: check the name, or set HF_TOKEN",
    "GatedRepoError": "accept the terms on its page and set HF_TOKEN",
    "RevisionNotFoundError": "no such revision",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and the cache does not have it",
}


def regular(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open a regular file, or a link to one; an `opener` for `open`. A pipe is not waited for.

    A relative path is looked up in an open folder, if one is given.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def own(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open a file that a run owns, which is never a link; an `opener` for `open`."""
    try:
        return regular(path, flags | os.O_NOFOLLOW, folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "is a symbolic link"
        raise


def read_bytes(path: Path, most: int = MOST_JSON_BYTES, opener: Opener = regular) -> bytes:
    """Return the content of a file; raise ValueError if it is larger than `most`."""
    with open(path, "rb", opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= most else b""
    if max(size, len(data)) > most:
        raise ValueError(f"more than {most:,} bytes. Is it a data file?")
    return data


def read_inside(folder: Path, name: str, most: int) -> tuple[Path, bytes]:
    """Return the real path and content of a file in a folder; PermissionError if it is outside.

    A link may lead to another file of the folder. No link is followed while the file is opened, so
    what becomes a link in between is not read.
    """
    home = real_path(folder)
    target = real_path(home / name)
    if not target.is_relative_to(home):
        raise PermissionError(errno.EPERM, "is outside the folder", name)

    def beneath(_: str | Path, flags: int) -> int:
        *folders, last = target.relative_to(home).parts or (".",)
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in folders:
                step = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(part, step, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            return own(last, flags, descriptor)
        finally:
            os.close(descriptor)

    return target, read_bytes(target, most, beneath)


def write_own(path: Path, text: str) -> None:
    """Write a text file that a run owns."""
    try:
        with open(path, "w", encoding="utf-8", errors="replace", opener=own) as file:
            file.write(text)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not name the file
        raise


def append_whole(descriptor: int, data: bytes) -> None:
    """Append to an open file all or nothing: the half that a full disk took is cut off again."""
    size = os.fstat(descriptor).st_size
    done = 0
    try:
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def file_sha(path: Path, opener: Opener = regular) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb", opener=opener) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def limit_memory(extra: int) -> None:
    """Let this process take so many more bytes; beyond them a library meets MemoryError.

    The limit is on addresses, so files that are mapped later count. Only Linux has it.
    """
    if sys.platform != "linux":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + extra
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Limit the memory of this process for a while."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(extra)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def make_folder(path: Path, key: str = "", mode: int = 0o777) -> None:
    """Create a folder and those around it. /proc and others refuse it as a missing file.

    An error names the key of the config that it comes from.
    """
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        where = f"{key}: {path}" if key else str(path)
        raise DiskError(
            f"{where}: cannot be created ({error.strerror}); choose another folder."
        ) from error


def sync(path: Path) -> None:
    """Sync a file or folder: a new or renamed entry may otherwise be gone after a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_own(path: Path, text: str) -> None:
    """Write a text file that a run owns, complete or not at all; others may write it as well."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        # A new file under a name that nobody can foresee: nothing is written through a link.
        with open(part, "x", encoding="utf-8", errors="replace", opener=own) as file:
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        error.filename = str(path)  # the name that users know
        raise
    finally:
        part.unlink(missing_ok=True)


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write the file that a user named; replace one only if forced."""
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path}: already exists; choose another file, or replace it with --force."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).") from error


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text; raise ValueError, also for values nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"more than {MOST_DEPTH} values inside each other") from None
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return value
    raise ValueError(f"more than {MOST_DEPTH} values inside each other")


def read_json(path: Path, opener: Opener = regular) -> Any:
    """Return the value in a JSON file; raise OSError or ValueError."""
    return parse_json(read_bytes(path, opener=opener))


def read_object(path: Path, opener: Opener = regular) -> JsonObject:
    """Return the object in a JSON file; raise OSError or ValueError."""
    value = read_json(path, opener)
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not an object")
    return value


class BoundedLoader(yaml.SafeLoader):
    """Reads YAML within limits: depth, digits, and values after aliases are unfolded."""

    def __init__(self, text: str | bytes) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark, before = self.peek_event().start_mark, self._values  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self._refuse("nested too deeply", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        # An alias to something around it has no size yet, and no end.
        self._values += self._sizes.get(id(node), MOST_VALUES) if is_alias else 1
        if not is_alias:
            self._sizes[id(node)] = self._values - before
        if self._values > MOST_VALUES:
            self._refuse(f"its aliases unfold to more than {MOST_VALUES:,} values", mark)
        if node and node.tag.endswith((":int", ":float")) and len(node.value) > MOST_DIGITS:
            self._refuse(f"a number of more than {MOST_DIGITS:,} digits", mark)
        return node

    def _refuse(self, problem: str, mark: Any) -> None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def yaml_text(path: Path, opener: Opener = regular) -> str:
    """Return the text of a YAML file; raise OSError or ValueError."""
    return read_bytes(path, MOST_BYTES, opener).decode("utf-8")


def parse_yaml(text: str) -> Any:
    """Return the values of a YAML text; raise ValueError."""
    try:
        return BoundedLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"line {line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


# --- folders of models and adapters ---


def real_path(path: Path) -> Path:
    """Follow links like Path.resolve, which fails at a link to itself; opening it reports it."""
    return Path(os.path.realpath(path))


def refuse_outside(folder: Path, path: Path) -> None:
    """Refuse a link out of the folder, except from snapshots/<commit> to blobs of a hub cache."""
    target, homes = real_path(path), [real_path(folder)]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parent.parent / "blobs")
    if not any(map(target.is_relative_to, homes)):
        raise ConfigError(
            f"{path}: is a link to {target}, outside of its folder; copy the file into it"
        )


def inspect_folder(
    name: str | Path, revision: str | None = None, *, local_files_only: bool = False
) -> Path | None:
    """Check type, place, size and depth of every file that a library may open in a folder.

    A hub name stands for its snapshot in the hub cache; what is missing there is downloaded first,
    except weights. Return the folder; None if there is none.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        from huggingface_hub import snapshot_download

        if HUB_NAME.fullmatch(str(name)) and not local_files_only:
            check_hub_model(str(name), revision)
        try:
            small = [f"*{suffix}" for suffix in OPENED - {".safetensors"}]
            folder = Path(
                snapshot_download(
                    str(name), revision=revision, allow_patterns=small, ignore_patterns=["*/*"],
                    local_files_only=local_files_only,
                )
            )  # fmt: skip
        except (OSError, ValueError):  # the library that opens it reports why
            return None
    found = sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")])
    sizes = {path: _size(folder, path) for path in found if path.suffix in OPENED}
    weights = sum(size for path, size in sizes.items() if path.suffix == ".safetensors")
    for path in sizes:
        try:
            if path.suffix == ".json" and path.name not in VOCABULARIES:
                _refuse_huge(read_json(path), weights)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
    return folder


@cache
def check_hub_model(name: str, revision: str | None) -> None:
    """Raise unless the hub or its cache has a model; without a network, use only the cache.

    The libraries that open it would ask again and again, for minutes.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        ask_hub(lambda: HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS))
    except Exception as error:  # of the hub, of its HTTP library, or of the network
        try:
            snapshot_download(  # any revision that the user wants  # nosec B615
                name, revision=revision, allow_patterns="config.json", local_files_only=True
            )
        except (OSError, ValueError):
            raise ConfigError(
                f"{name}: neither a local folder nor a model that the hub provides "
                f"({why_not_from_hub(error)})"
            ) from error
        if not constants.HF_HUB_OFFLINE and not hub_answered(error):
            log.warning("the hub does not answer; only what is in its cache is used")
            os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes
            constants.HF_HUB_OFFLINE = True


def ask_hub(question: Callable[[], T]) -> T:
    """Return an answer of the hub. Looking up its address has no timeout, so a thread does it."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    return answer.result(timeout=HUB_SECONDS + 1)


def why_not_from_hub(error: Exception) -> str:
    """Return one line on why the hub did not provide something."""
    text = str(error).strip().partition("\n")[0]
    silent = f"the hub does not answer within {HUB_SECONDS} s: check the network, or HF_ENDPOINT"
    if isinstance(error, TimeoutError) or "timed out" in text:
        return silent
    return HUB_REASONS.get(type(error).__name__) or text or type(error).__name__


def hub_answered(error: Exception) -> bool:
    """Whether an error is the hub's own answer, and not the lack of one."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code < 500


def _size(folder: Path, path: Path) -> int:
    """Return the bytes of a regular file; refuse any other, and text that is too large."""
    refuse_outside(folder, path)
    try:
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
        if path.suffix != ".safetensors" and size > MOST_JSON_BYTES:
            raise ValueError(f"more than {MOST_JSON_BYTES:,} bytes")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return size


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")


def _refuse_huge(values: Any, weights: int) -> None:
    """Refuse too many layers, and matrices larger than the weights next to a config allow.

    `weights`: their bytes, 0 if there are none. A matrix of the model has hidden_size rows or
    columns; eight weights in a byte are more than any format packs. An adapter's rank, r, belongs
    to a matrix of at least 64 numbers.
    """
    if not isinstance(values, dict):
        return
    numbers = {key: value for key, value in values.items() if isinstance(value, int)}
    hidden = next(
        (numbers[key] for key in ("hidden_size", "n_embd", "d_model") if key in numbers), 1
    )
    held = 8 * max(weights, 1 << 20) if weights else MOST_WIDTH
    for key, value in values.items():
        _refuse_huge(value, weights)
        if key in numbers and LAYERS.fullmatch(key) and value > MOST_LAYERS:
            raise ValueError(f"{key}: {value} is more than {MOST_LAYERS:,}")
        if key in numbers and WIDTHS.fullmatch(key):
            times = 512 if key == "r" else hidden if weights else 1
            times *= numbers.get("head_dim", 1) if key.endswith("heads") else 1
            if value > MOST_WIDTH or value * times > held:
                raise ValueError(f"{key}: {value} is too large for the weights next to it")
