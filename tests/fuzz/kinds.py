"""What is damaged, which command reads it, and what must hold if the command accepts it."""

from __future__ import annotations

import base64
import copy
import http.client
import http.server
import json
import os
import shutil
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer.main
import yaml
from PIL import Image

from rather import cli, errors
from rather.config import load as load_module
from rather.config.load import load, load_config
from rather.data import cache as cache_module
from rather.data.image_tokens import image_recipe
from rather.data.pixels import PixelMaker
from rather.data.prepare import prepare
from rather.data.save import DATA
from rather.errors import DataError
from rather.judges import openai_client
from rather.tools.board.serve import ROUTES, Board
from rather.tools.report.pairs import read_ledger
from rather.tracking.json_lines import LEDGER, flatten
from tests.data.vision import encoded, vision_folder
from tests.fuzz.harness import STDERR, STDOUT, Case, Kind, command
from tests.fuzz.mutators import BYTES, TEXT, damage, replace, swap
from tests.tiny import WORDS, make_config

STEPS = 4
IMAGES = {
    "a.png": "RGB",
    "b.jpeg": "RGB",
    "c.gif": "P",
    "d.webp": "RGBA",
    "e.png": "LA",
    "f.bmp": "L",
}
SECRET = "a canary that nothing may read out or change"
REQUESTS = 25  # to one board
ROWS = [
    {"id": f"r{i}", **row, "weight": 1 + i / 2}
    for i in range(4)
    for row in [{"prompt": " ".join(WORDS[i : i + 5]), "chosen": f" w{i} w7", "rejected": " w8 w9"}]
] + [
    {"id": "r4", "instruction": "w1 w2", "input": "w3", "chosen": "w4 w5", "rejected": "w6"},
    {"id": "r5", "prompt": "w1", "responses": [" w2", " w3 w4", " w5"], "scores": [1, 3, 2]},
    {"id": "r6", "chosen": "w1 w2 w3 w4", "rejected": "w1 w2 w5 w6"},
    {"id": "r7", "prompt": "w1 \u00e9\u4e2d\U0001f600", "chosen": " w2", "rejected": " w3", "margin": 0.5},
]  # fmt: skip


class World:
    """A tiny model, rows in three formats, a config and a finished run, with the results they give."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder, self.canary = folder, folder / "canary" / "secret"
        (folder / "inputs").mkdir()
        self.canary.parent.mkdir()
        self.canary.write_text(SECRET)
        kinds = [each for each in vars(errors).values() if isinstance(each, type)]
        codes = {getattr(each, "exit_code", None) for each in kinds}
        self.exit_codes = {0, *(code for code in codes if isinstance(code, int) and code > 1)}
        config = make_config(folder)  # model and pairs
        self.model = Path(config.pretrain or "")
        self.rows = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
        (folder / "rows.jsonl").write_bytes(b"\n".join(self.rows) + b"\n")
        table = pa.Table.from_pylist(ROWS[:4])
        with pa.ipc.new_file(folder / "rows.arrow", table.schema) as writer:
            writer.write_table(table)
        pq.write_table(table, folder / "rows.parquet", row_group_size=2)
        self._write_images(folder / "images")
        self.config = folder / "dpo.yaml"
        self.config.write_text(self._yaml())
        share_with_children(self.config)
        self.settings = settings_of(self.config)
        assert command(["train", str(self.config)]) == 0
        self.run = folder / "output" / "run"
        self.results = {name: self._saved(folder / name) for name in self.files}
        self._printed(*self.preparing(folder / "rows.jsonl", folder / "inputs" / "cached" / "out"))
        self.score = self._printed("score", *self.scoring(self.model))
        longer = shutil.copytree(self.run, folder / "inputs" / "longer" / "run")
        assert command(self.resuming(longer)) == 0
        self.resumed = (longer / "model" / "model.safetensors").read_bytes()
        self.seen = self.outside()

    files = ("rows.jsonl", "rows.arrow", "rows.parquet")

    def _write_images(self, folder: Path) -> None:
        """Write a model that sees, without weights, and rows with an image in each format."""
        folder.mkdir()
        self.recipe = image_recipe(vision_folder(self.folder / "sees", "qwen2_5_vl"))
        image = Image.linear_gradient("L").resize((40, 24))
        sources = []
        for name, mode in IMAGES.items():
            (folder / name).write_bytes(encoded(image.convert(mode), Path(name).suffix[1:]))
            sources.append(name)
        content = base64.b64encode(encoded(image.rotate(180).convert("RGB"))).decode()
        sources.append(f"data:image/png;base64,{content}")
        rows = [
            {"images": [source], "prompt": f"<image>Row {i}?", "chosen": "yes", "rejected": "no"}
            for i, source in enumerate(sources)
        ]
        self.image_rows = [json.dumps(row).encode() for row in rows]
        (folder / "rows.jsonl").write_bytes(b"\n".join(self.image_rows) + b"\n")

    def _yaml(self) -> str:
        data = {"file_name": str(self.folder / "pairs.jsonl")}
        training = {
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 8,
            "lr_scheduler_type": "constant",
        }
        values = {
            "exp_name": "run", "output_dir": str(self.folder / "output"), "logging_dir": str(self.folder / "logs"),
            "pretrain": str(self.model), "sequence_length": 64, "beta": 0.2, "pref_loss": ["sigmoid", "sft"],
            "loss_weights": [1.0, 0.1], "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "report_html": False,
            "actor_train": {"data_args": data, "training_args": training},
            "validation": {"data_args": {"file_name": str(self.folder / "held_out.jsonl")}},
        }  # fmt: skip
        return yaml.safe_dump(values, sort_keys=False)

    def _printed(self, *arguments: str) -> str:
        """Return what a command prints, in a process of its own as for an input."""
        file = self.folder / "inputs" / "printed"
        if (child := os.fork()) == 0:
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
            os._exit(command(arguments))
        assert os.waitpid(child, 0)[1] == 0
        return file.read_text()

    def _saved(self, rows: Path) -> dict[str, list[Any]]:
        out = self.folder / "inputs" / f"saved-{rows.name}"
        self._printed(*self.preparing(rows, out))
        return pairs_by_id(out)

    # --- commands ---

    def preparing(self, rows: Path, out: Path) -> list[str]:
        changes = [f"actor_train.data_args.file_name={rows}", "validation.data_args.file_name=null"]
        changes += [f"actor_train.data_args.cache_dir={out.parent / 'cache'}", "max_bad_fraction=1"]
        return ["data", str(self.config), *changes, "--json", "--save", str(out)]

    def scoring(self, model: Path) -> list[str]:
        cache = self.folder / "inputs" / "cache"
        held_out = str(self.folder / "held_out.jsonl")
        return [str(model), held_out, "--json", f"actor_train.data_args.cache_dir={cache}"]

    def resuming(self, run: Path) -> list[str]:
        shared = self.folder / "inputs" / "cache"
        changes = [
            f"output_dir={run.parent}",
            f"logging_dir={run.parent / 'logs'}",
            f"max_steps={STEPS + 1}",
        ]
        changes += [
            f"{role}.data_args.cache_dir={shared}" for role in ("actor_train", "validation")
        ]
        return ["train", str(self.config), *changes]

    # --- what must not change ---

    def outside(self) -> dict[str, Any]:
        """Return the state of every file that is not an input."""
        found = {}
        for path, folders, names in os.walk(self.folder):
            if Path(path) == self.folder:
                folders.remove("inputs")
            for name in (*folders, *names):
                status = os.lstat(os.path.join(path, name))
                found[os.path.join(path, name)] = (
                    status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino,
                )  # fmt: skip
        return found

    def changed(self) -> list[str]:
        """Return the files outside that have changed since the last call."""
        before, self.seen = self.seen, self.outside()
        return sorted(key for key in before | self.seen if before.get(key) != self.seen.get(key))


def share_with_children(config: Path) -> None:
    """Build once, before the forks, what is the same for all inputs and costs most of their time:
    the command line, and the undamaged config before overrides."""
    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(cli.app)
    initialize, compose = load_module.initialize_config_dir, load_module.compose
    folder, known = "", cache(lambda: compose(config.stem, []))

    def remember_folder(given: str, **options: Any) -> Any:
        nonlocal folder
        folder = given
        return initialize(given, **options)

    def compose_once(name: str, own: list[str]) -> Any:
        is_known = (folder, name, own) == (str(config.parent.resolve()), config.stem, [])
        return copy.deepcopy(known()) if is_known else compose(name, own)

    load_module.initialize_config_dir = remember_folder  # type: ignore[attr-defined]
    load_module.compose = compose_once  # type: ignore[attr-defined]


# --- judges ---


def settings_of(file: Path) -> dict[str, tuple[Any, str]]:
    """Return every setting with the place that it comes from."""
    config = load(file)
    sources = dict(config.sources)
    return {
        key: (value, sources.get(key, "default"))
        for key, value in flatten(config.model_dump()).items()
    }


def pairs_by_id(folder: Path) -> dict[str, list[Any]]:
    """Return the tokens that `rather data --save` wrote, by the id of their row."""
    found = defaultdict(list)
    with pa.memory_map(str(folder / DATA)) as file:
        for row in pa.ipc.open_stream(file).read_all().to_pylist():
            found[row["id"]].append(row)
    return {name: sorted(rows, key=str) for name, rows in found.items()}


def same_pairs(expected: dict[str, list[Any]], kept: Iterable[str], out: Path) -> str | None:
    """Rows that were not damaged give the same pairs, unless as many rows are reported as dropped."""
    found = pairs_by_id(out)
    report = json.loads((out.parent / STDOUT).read_text())["train"]
    dropped = sum(entry["count"] for entry in report["dropped"].values())
    kept = list(kept)
    if wrong := [
        name for name in kept if name in found and not _contains(found[name], expected[name])
    ]:
        return f"rows {wrong} were not damaged, but give other pairs"
    lost = [name for name in kept if name not in found]
    return f"{lost} are lost, but only {dropped} rows are reported" if len(lost) > dropped else None


def _contains(found: list[Any], wanted: list[Any]) -> bool:
    return all(each in found for each in wanted)


# --- kinds ---


def configs(world: World, draw: Random, folder: Path) -> Case:
    """A setting that differs from that of the undamaged file has another place than "default"."""
    file = folder / world.config.name
    shutil.copy(world.config, file)
    what = damage(file, draw, TEXT)

    def judge(code: int) -> str | None:
        if code:
            return None
        found, text = (
            settings_of(file),
            (folder / STDOUT).read_text() + (folder / STDERR).read_text(),
        )
        keys = flatten(yaml.safe_load(file.read_bytes()) or {})  # by another reader
        for key in found.keys() | world.settings.keys():
            (old, _), (new, place) = world.settings.get(key, (None, "")), found.get(key, (None, ""))
            # A key that the damage has removed has its default again, and is shown with it.
            is_removed = place in ("default", "") and key not in keys
            if old != new and place in ("default", "") and not is_removed:
                return f"{key} is {new!r} instead of {old!r} by default, and nothing says so"
        return None if "exp_name:" in text else "the settings were not printed"

    return Case(what, ["config", "show", str(file)], judge)


def rows(world: World, draw: Random, folder: Path) -> Case:
    file, out = folder / "rows.jsonl", folder / "out"
    shutil.copy(world.folder / file.name, file)
    what = damage(file, draw, TEXT | {"zero": BYTES["zero"]})

    def judge(code: int) -> str | None:
        lines = file.read_bytes().split(b"\n")
        kept = [row["id"] for row, line in zip(ROWS, world.rows, strict=True) if line in lines]
        return None if code else same_pairs(world.results[file.name], kept, out)

    return Case(what, world.preparing(file, out), judge, forks=draw.random() < 0.9)


def images(world: World, draw: Random, folder: Path) -> Case:
    """Each row is a pair or dropped with a reason; what was not damaged is a pair with its image."""
    place = Path(shutil.copytree(world.folder / "images", folder / "images"))
    file = draw.choice([*sorted(place.iterdir()), place / "rows.jsonl"])
    if file.suffix != ".jsonl" and draw.random() < 0.2:
        what = replace(file, draw, world.canary)
    else:
        what = damage(file, draw, TEXT if file.suffix == ".jsonl" else BYTES)
    options = [
        f"pretrain={world.folder / 'sees'}",
        "sequence_length=256",
        f"actor_train.data_args.file_name={place / 'rows.jsonl'}",
        f"actor_train.data_args.cache_dir={folder / 'cache'}",
        "validation.data_args.file_name=null",
        "max_bad_fraction=1",
    ]

    def judge(code: int) -> str | None:
        if code:
            return None
        report = json.loads((folder / STDOUT).read_text())["train"]
        dropped = sum(entry["count"] for entry in report["dropped"].values())
        if report["rows"] != report["pairs"] + dropped:
            return f"of {report['rows']} rows {report['pairs']} are pairs, {dropped} are dropped"
        lines = (place / "rows.jsonl").read_bytes().split(b"\n")
        found = {
            image.digest: image
            for image in prepare(load_config(world.config, options)).train.images()
        }
        for name, row in zip(IMAGES, world.image_rows, strict=False):
            content = (world.folder / "images" / name).read_bytes()
            is_damaged = row not in lines or place / name == file
            if not is_damaged and world.recipe.image_digest(content) not in found:
                return f"the row of {name} was not damaged, but is lost"
        for image in found.values():
            with suppress(DataError):
                PixelMaker(world.recipe).pixels([image])
        return None

    return Case(what, ["data", str(world.config), *options, "--json"], judge)


def _table(name: str, read: Callable[[Path], Any]) -> Kind:
    """Damaged tables: only what a validating reader accepts too may be accepted."""

    def kind(world: World, draw: Random, folder: Path) -> Case:
        file, out = folder / name, folder / "out"
        shutil.copy(world.folder / name, file)
        what = damage(file, draw, BYTES)

        def judge(code: int) -> str | None:
            if code:
                return None
            try:
                table = read(file)
                table.validate(full=True)
                found = table.to_pylist()
            except Exception as error:
                bad = "UTF8" in str(error) and "bad_encoding" in (folder / STDOUT).read_text()
                return None if bad else f"accepted, but a validating reader says {error}"
            kept = [row["id"] for row in ROWS[:4] if row in found]
            return same_pairs(world.results[name], kept, out)

        return Case(what, world.preparing(file, out), judge)

    return kind


def safetensors(world: World, draw: Random, folder: Path) -> Case:
    """The same tensors give the same scores; there is no checksum that could notice other ones."""
    model = Path(shutil.copytree(world.model, folder / "model"))
    file = model / "model.safetensors"
    before = tensors_of(file)
    what = replace(file, draw, world.canary) if draw.random() < 0.1 else damage(file, draw, BYTES)

    def judge(code: int) -> str | None:
        if code:
            return None
        after = tensors_of(file)
        if any(
            not torch.isfinite(torch.frombuffer(bytearray(b), dtype=torch.float32)).all()
            for _, b in after.values()
        ):
            return "accepted weights that are not finite"
        text = (folder / STDOUT).read_text().replace(str(model), str(world.model))
        return (
            "the same tensors give other scores"
            if after == before and text != world.score
            else None
        )

    return Case(what, ["score", *world.scoring(model)], judge)


def tensors_of(file: Path) -> dict[str, tuple[Any, bytes]]:
    """Read a safetensors file with nothing but json."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    return {
        name: (entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def model_configs(world: World, draw: Random, folder: Path) -> Case:
    """A config.json of the same values gives the same scores; others are judged by no one here."""
    model = Path(shutil.copytree(world.model, folder / "model"))
    file = model / "config.json"
    before = json.loads(file.read_bytes())
    what = damage(file, draw, TEXT)

    def judge(code: int) -> str | None:
        if code or json.loads(file.read_bytes()) != before:
            return None
        text = (folder / STDOUT).read_text().replace(str(model), str(world.model))
        return None if text == world.score else "the same config gives other scores"

    return Case(what, ["score", *world.scoring(model)], judge)


def tokenizers(world: World, draw: Random, folder: Path) -> Case:
    """A tokenizer of the same content gives the same pairs."""
    model = Path(shutil.copytree(world.model, folder / "model"))
    file = model / draw.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
    before = json.loads(file.read_bytes())
    what = damage(file, draw, TEXT)
    rows, out = world.folder / "rows.jsonl", folder / "out"

    def judge(code: int) -> str | None:
        if code or json.loads(file.read_bytes()) != before:
            return None
        return same_pairs(world.results[rows.name], (row["id"] for row in ROWS), out)

    arguments = [*world.preparing(rows, out), f"pretrain={model}"]
    return Case(what, arguments, judge, forks=draw.random() < 0.9)


def token_caches(world: World, draw: Random, folder: Path) -> Case:
    """A damaged entry is built again: the pairs are those of the rows. Some have a good checksum."""
    rows, out = world.folder / "rows.jsonl", folder / "out"
    place = Path(shutil.copytree(world.folder / "inputs" / "cached" / "cache", folder / "cache"))
    (entry,) = place.glob("*.arrow")
    file = draw.choice([entry, entry.with_suffix(".json"), place / "files.json"])
    crafted = file != place / "files.json" and draw.random() < 0.7
    if crafted and file == entry:
        what = f"crafted {damage(file, draw, BYTES)}"
    elif crafted:
        report = folder / "report"
        report.write_text(json.dumps(json.loads(file.read_bytes())["report"]))
        what = f"crafted {damage(report, draw, TEXT)}"
    else:
        what = damage(file, draw, TEXT)
    if crafted:
        _sign(entry, folder / "report")

    def judge(code: int) -> str | None:
        if code:
            return "a damaged cache ended the command"
        if crafted:  # a stranger may write other tokens with a good checksum
            return None
        return same_pairs(world.results[rows.name], (row["id"] for row in ROWS), out)

    return Case(what, world.preparing(rows, out), judge)


def _sign(entry: Path, report: Path) -> None:
    """Give an entry of the token cache the checksum of what it holds."""
    known = json.loads(entry.with_suffix(".json").read_bytes())["report"]
    with suppress(ValueError, RecursionError):
        known = json.loads(report.read_bytes()) if report.exists() else known
    text = json.dumps({"sha256": cache_module._sha(entry, known), "report": known})
    entry.with_suffix(".json").write_text(text, errors="surrogateescape")


def ledgers(world: World, draw: Random, folder: Path) -> Case:
    """Findings of a ledger that has changed are those of the good one, or there are none."""
    run = Path(shutil.copytree(world.run, folder / "run"))
    file = run / LEDGER
    what = replace(file, draw, world.canary) if draw.random() < 0.1 else damage(file, draw, BYTES)
    arguments: Sequence[str] = draw.choice([["verify", str(run)], ["pairs", str(run), "--json"]])

    def judge(code: int) -> str | None:
        if code:
            return None
        if arguments[0] == "verify":
            # What follows the last checkpoint may be half a step of a run that was killed.
            good = (world.run / LEDGER).read_bytes()
            same = not os.path.lexists(file) or file.read_bytes().startswith(good)
            return None if same else "a damaged ledger is called good"
        # Half a step at the end may be missing.
        found = read_ledger(run).to_pylist()
        whole = read_ledger(world.run).to_pylist()
        return (
            None
            if found[: len(whole)] == whole[: len(found)]
            else "other numbers than those of the run"
        )

    # `pairs` also says that it does not read the texts of a folder that came from elsewhere.
    return Case(what, arguments, judge, own_message=True)


def checkpoints(world: World, draw: Random, folder: Path) -> Case:
    """A damaged checkpoint is never called good, and a run that resumes has the same bits."""
    run = Path(shutil.copytree(world.run, folder / "output" / "run"))
    place = run / f"checkpoint-{draw.choice([STEPS, STEPS, 2])}"
    file, kind = draw.choice(sorted(place.iterdir())), draw.random()
    if kind < 0.2:
        what = replace(file, draw, world.canary)
    elif kind < 0.3:
        what = swap(place, draw)
    elif kind < 0.35:
        shutil.copy(file, place / "another")
        what = "another file"
    else:
        what = damage(file, draw, BYTES)

    def judge_bits(code: int) -> str | None:
        same = (run / "model" / "model.safetensors").read_bytes() == world.resumed
        return None if code or same else "the resumed run has other weights"

    def judge_verdict(code: int) -> str | None:
        same = _contents(place) == _contents(world.run / place.name)
        return None if code or same else "a damaged checkpoint is called good"

    what = f"{what} of {place.name}"
    if draw.random() < 0.2:
        return Case(what, world.resuming(run), judge_bits)
    return Case(what, ["verify", str(run)], judge_verdict, own_message=True)


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.iterdir() if path.is_file() and path.stat().st_size < 1 << 30)
    return {path.name: path.read_bytes() for path in files}


def run_folders(world: World, draw: Random, folder: Path) -> Case:
    """Commands that look at a run folder."""
    run = Path(shutil.copytree(world.run, folder / "run"))
    file = draw.choice(sorted(path for path in run.iterdir() if path.is_file()))
    what = replace(file, draw, world.canary) if draw.random() < 0.35 else damage(file, draw, TEXT)
    arguments: Sequence[str] = draw.choice(
        [
            ["health", str(run), "--json"],
            ["report", str(run), "--out", str(folder / "report.html")],
            ["verify", str(run)],
        ]
    )
    return Case(what, arguments, own_message=arguments[0] == "verify")


def board_requests(world: World, draw: Random, folder: Path) -> Case:
    """Every answer has a status, none is an internal error, and a request without a token gets nothing."""
    number = draw.randrange(2**32)

    def work() -> int:
        random = Random(number)
        with Board(world.run.parent) as board:
            threading.Thread(target=board.serve_forever, daemon=True).start()
            good = f"/api/runs?token={board.token}"
            before = _get(board, good)
            for _ in range(REQUESTS):
                if problem := _ask(board, random):
                    (folder / "problem").write_text(problem)
                    break
            if _get(board, good) != before:
                (folder / "problem").write_text("the board does not answer as before")
            board.shutdown()
        return 0

    def judge(code: int) -> str | None:
        file = folder / "problem"
        return file.read_text() if file.exists() else None

    return Case(f"requests of {number}", work, judge, inputs=REQUESTS)


def _get(board: Board, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", board.server_port, timeout=20)
    connection.request("GET", path)
    reply = connection.getresponse()
    return reply.status, reply.read()


def _ask(board: Board, draw: Random) -> str | None:
    """Send one damaged request; return what is wrong with the answer."""
    run = next(iter(board.runs.rows()))["id"]
    route = draw.choice([path for path in ROUTES if path != "/api/pair"])
    query = f"token={board.token}&run={run}&metric=loss&metric=eval%2Floss"
    request = (
        f"GET {route}?{query} HTTP/1.1\r\nHost: 127.0.0.1:{board.server_port}\r\n\r\n".encode()
    )
    for name in draw.choices(list(TEXT), k=draw.randint(1, 3)):
        request = TEXT[name](request, draw)
    answer = b""
    with socket.create_connection(("127.0.0.1", board.server_port), timeout=20) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 20):
                answer += part
        except TimeoutError:
            return f"{request!r} was not answered in time"
        except OSError:  # the board has closed the connection
            pass
    if SECRET.encode() in answer:
        return f"{request!r} reads a file outside"
    status = answer.split(b" ", 2)[1:2] if answer.startswith(b"HTTP/1.1 ") else [b""]
    if status[0] == b"500":
        return f"{request!r} is an internal error: {answer[-300:]!r}"
    if status[0] == b"200" and board.token.encode() not in request:
        return f"{request!r} has no token and is answered"
    return None


def servers(world: World, draw: Random, folder: Path) -> Case:
    """The damaged answers of a server that judges or generates, each damaged in its own way."""
    for name in "ab":
        rows = [{"prompt": f"w{i}", "responses": [f"{name} {i}"]} for i in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    class Damaged(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            prompt = json.loads(body or b"{}").get("prompt", "")
            choice = {"text": "w2 w3", "token_ids": [5, 6], "finish_reason": "stop"}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 2, "total_tokens": 9}
            message = {"role": "assistant", "content": "[[A]]"}
            answer = {"choices": [{**choice, "message": message}], "usage": usage}
            content = json.dumps(answer | {"data": [{"id": "m"}]}).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            for name in draw.choices(list(TEXT), k=draw.randint(0, 2)):
                if draw.random() < 0.3:
                    head = TEXT[name](head, draw)
                else:
                    content = TEXT[name](content, draw)
            with suppress(OSError):  # the command reads no more
                self.wfile.write(head + content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    def work() -> int:
        openai_client.FIRST_WAIT = openai_client.LONGEST_WAIT = 0.001
        os.environ.pop("XDG_CACHE_HOME", None)  # HOME is the folder
        with http.server.HTTPServer(("127.0.0.1", 0), Damaged) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}"
            try:
                return command([*words, url, "--json"])
            finally:
                server.shutdown()

    def judge(code: int) -> str | None:
        errors = (folder / STDERR).read_text().partition("rather: ")[2].splitlines()
        if code:
            return f"more than a sentence: {errors}" if len(errors) > 1 else None
        result = json.loads((folder / STDOUT).read_text())
        return None if {result.get("n"), result.get("rows")} & {1, 2, 3} else f"gives {result}"

    judging = ["judge", "a.jsonl", "b.jsonl", "--judge-model", "m", "--concurrency", "1", "--with"]
    asking = ["generate", str(world.model), "a.jsonl", "--out", "c.jsonl", "--max-new-tokens", "4"]
    words = draw.choice([judging, [*asking, "--concurrency", "1", "--timeout", "9", "--server"]])
    return Case(f"answers of a server to rather {words[0]}", work, judge, forks=False)


KINDS: dict[str, Kind] = {
    "configs": configs,
    "rows": rows,
    "images": images,
    "arrow": _table("rows.arrow", lambda file: pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all()),
    "parquet": _table("rows.parquet", lambda file: pq.read_table(file)),
    "safetensors": safetensors,
    "model configs": model_configs,
    "tokenizers": tokenizers,
    "token caches": token_caches,
    "ledgers": ledgers,
    "checkpoints": checkpoints,
    "run folders": run_folders,
    "board requests": board_requests,
    "servers": servers,
}  # fmt: skip
