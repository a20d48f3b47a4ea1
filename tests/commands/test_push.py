"""`rather push`: the model of a run and its card, on a local server of the hub's protocol."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from rather.config.run_config import DPOConfig
from rather.model.export import PROCESSOR
from rather.tools.push import card, files_in, licence_of
from tests.commands.conftest import json_of, rather, refusal, succeed
from tests.hub import TOKEN, Hub, accepting_uploads


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with accepting_uploads(tmp_path, monkeypatch) as server:
        yield server


def front(card: str) -> Any:
    return yaml.safe_load(card.split("---\n")[1])


def pushed(hub: Hub, repo: str) -> dict[str, bytes]:
    return hub.commits[hub.revisions[repo, "main"]]


def test_a_private_repository_with_model_and_card(run: DPOConfig, model: Path, hub: Hub) -> None:
    done = succeed("push", run.run_dir, "shop/kind")
    assert f"{hub.address}/shop/kind (private)" in done.output
    assert TOKEN not in done.output
    assert hub.private == {"shop/kind": True}
    posts = [request for request in hub.requests if not request.startswith(("GET", "HEAD"))]
    assert [post.split("/")[-1] for post in posts if "lfs/" not in post or "batch" in post] == [
        "create", "validate-yaml", "main", "batch", "main",
    ], posts  # fmt: skip
    files = pushed(hub, "shop/kind")
    assert files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert set(files) == {".gitattributes", *(file.name for file in model.iterdir())}
    card = files["README.md"].decode()
    assert front(card)["license"] == "unknown"
    assert str(run.run_dir.parent.parent) not in card, "no path of this machine"
    for words in ("Held-out accuracy", "Forgetting", "| loss | sigmoid", "40 pairs of `pairs.jsonl`",
                  "Held out: 9 pairs", "The licence of the data is not stated here."):  # fmt: skip
        assert words in card
    opened = AutoModelForCausalLM.from_pretrained("shop/kind")
    local = AutoModelForCausalLM.from_pretrained(model)
    assert all(
        bool((a == b).all()) for a, b in zip(opened.parameters(), local.parameters(), strict=True)
    )


def test_a_dry_run_asks_nobody(run: DPOConfig, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    done = succeed("push", run.run_dir, "shop/kind", "--dry-run")
    assert hub.requests == []
    assert "model.safetensors" in done.output
    assert "Nothing was uploaded. Private repository: shop/kind" in done.output


def test_a_public_repository_is_never_an_accident(run: DPOConfig, hub: Hub) -> None:
    hub.add("shop/open", {"README.md": b"", "model-00001-of-00002.safetensors": b"old"})
    assert "shop/open: exists and is public; add --public" in refusal(
        2, "push", run.run_dir, "shop/open"
    )
    succeed("push", run.run_dir, "shop/open", "--public")
    assert "model.safetensors" in pushed(hub, "shop/open")
    assert "model-00001-of-00002.safetensors" not in pushed(hub, "shop/open"), "an old shard"


def test_a_refused_token_is_not_shown(
    run: DPOConfig, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-another-form")
    done = refusal(5, "push", run.run_dir, "shop/kind")
    assert "shop/kind: not uploaded: " in done
    assert done.strip().endswith("HF_TOKEN must be a token that may write there.")
    assert "secret-of-another-form" not in done
    assert hub.tokens == {"secret-of-another-form"}
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    assert "set HF_TOKEN" in refusal(2, "push", run.run_dir, "shop/kind")


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n", {"license": "apache-2.0"}),
        ("---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\n---\n",
         {"license": "other", "license_name": "llama3", "license_link": "LICENSE"}),
        ("# License: MIT\n", {"license": "unknown"}),
        ("---\nlicense: [\n---\n", {"license": "unknown"}),
        (None, {"license": "unknown"}),
    ],
)  # fmt: skip
def test_the_licence_is_that_of_the_bases_card(
    tmp_path: Path, readme: str | None, licence: dict[str, str]
) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    assert licence_of(str(tmp_path)) == licence


def test_the_licence_of_a_base_on_the_hub(run: DPOConfig, hub: Hub, tmp_path: Path) -> None:
    hub.add("shop/base", {"README.md": b"---\nlicense: mit\n---\n"})
    assert licence_of("shop/base") == {"license": "mit"}
    assert licence_of("shop/other") == {"license": "unknown"}
    folder = tmp_path / "run"
    shutil.copytree(run.run_dir, folder)
    text = (folder / "config.yaml").read_text().replace(str(run.pretrain), "shop/base")
    (folder / "config.yaml").write_text(text)
    report = json_of(folder / "data_report.json")
    report["train"]["commits"] = {"hf://datasets/shop/pairs@main:train": "abc"}
    (folder / "data_report.json").write_text(json.dumps(report))
    # The config was edited, so it may be anybody's.
    refusal(2, "push", folder, "shop/kind", "--dry-run")
    done = rather("push", folder, "shop/kind", "--dry-run", "--trust-paths")
    top = front(done.output)
    assert (top["base_model"], top["license"]) == ("shop/base", "mit")
    assert top["datasets"] == ["shop/pairs"]


STRANGE = (
    "id_rsa", "notes.txt", "notes.json", "training_args.bin", ".env",
    "model_of_mine.safetensors", "deep/config.json",
)  # fmt: skip


@pytest.mark.defect("A7")
def test_only_what_an_export_writes_is_uploaded(lora: DPOConfig, hub: Hub, tmp_path: Path) -> None:
    """Paths of this machine are in none of it, and an adapter names a base that others have."""
    folder = Path(shutil.copytree(lora.run_dir, tmp_path / "run"))
    written = {file.name for file in (folder / "adapter").iterdir()}
    for name in STRANGE:
        (folder / "adapter" / name).parent.mkdir(exist_ok=True)
        (folder / "adapter" / name).write_text("{}")
    (folder / "adapter" / "linked").symlink_to("/etc/passwd")
    tokenizer = folder / "adapter" / "tokenizer_config.json"
    values = {**json_of(tokenizer), "special_tokens_map_file": "/srv/me/map.json"}
    tokenizer.write_text(json.dumps(values))
    assert f"names the folder {lora.pretrain}, which others do not have" in refusal(
        2, "push", folder / "adapter", "shop/kind"
    )
    assert ("shop/kind", "main") not in hub.revisions
    assert rather("push", folder, "shop/kind", "--base", "./base").exit_code == 2
    done = succeed("push", folder / "adapter", "shop/kind", "--base", "shop/base")
    for name in STRANGE:
        assert name.partition("/")[0] in done.output.partition("Left out")[2], name
    files = pushed(hub, "shop/kind")
    assert set(files) == {".gitattributes", *written}
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == front(files["README.md"].decode())["base_model"]
    assert config["base_model_name_or_path"] == "shop/base"
    assert json.loads(files["tokenizer_config.json"])["special_tokens_map_file"] == "map.json"
    for name, content in files.items():
        assert str(tmp_path.parent).encode() not in content, name
        assert str(lora.pretrain).encode() not in content, name


@pytest.mark.defect("A7")
def test_paths_of_this_machine_are_cut_out(tmp_path: Path) -> None:
    """Also of nested configs, but not what a template says about a machine."""
    template = 'Write to "/var/data/x": /var/data/y'
    values = {"text_config": {"_name_or_path": "~/of/me/base"}, "chat_template": template}
    (tmp_path / "config.json").write_text(json.dumps(values))
    content = files_in(tmp_path)["config.json"]
    assert isinstance(content, bytes)
    assert json.loads(content) == {**values, "text_config": {"_name_or_path": "base"}}
    text = card(
        "`/a/b/base` at (~/data/pairs), https://a.b/c/d, </s></s>", "x/y", None, {"at": "/a/b"}
    )
    assert "`base` at (pairs), https://a.b/c/d, </s></s>" in text
    assert front(text)["at"] == "b"


def test_every_file_of_an_export_is_known(model: Path, tmp_path: Path) -> None:
    names = {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    for pattern in PROCESSOR:
        names.add(pattern.replace("*processor*", "video_preprocessor_config"))
        names.add(pattern.replace("*", "", 1).replace("*", "_config"))
    for name in names:
        (tmp_path / name).write_text("{}")
    assert set(files_in(tmp_path)) == names
    assert {file.name for file in model.iterdir()} == {*files_in(model), "README.md"}
