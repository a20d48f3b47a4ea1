"""The exported folder opens with transformers alone and holds exactly what was trained."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rather.commands.export import export
from rather.config.run_config import DPOConfig
from rather.config.schema import ActorModelArgs, ModelArgs
from rather.errors import ConfigError, DiskError
from rather.model import export as export_module
from rather.model.export import FileCast, export_model, export_run, export_stored
from rather.model.files import LoadedWeights, ModelFiles, weight_files
from rather.model.policy import PolicyModel
from rather.parallel.load import Start, load_policy
from rather.pipeline.pipeline import DPOPipeline
from tests.model.test_hybrids import hybrid
from tests.tiny import TEXT, in_child, make_config, make_model

Trained = tuple[DPOConfig, DPOPipeline]


def loaded(folder: Path, **model: Any) -> tuple[PolicyModel, Any]:
    """Make a model in the folder `base`; return its policy and its tokenizer."""
    base = make_model(folder / "base", **model)
    return load_policy(str(base), ModelArgs(), "cpu"), AutoTokenizer.from_pretrained(base)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A short run of a model with tied embeddings; every weight moves."""
    config = make_config(
        tmp_path_factory.mktemp("export"), max_steps=2, save_steps=1, save_best=True
    )
    pipeline = DPOPipeline(config)
    assert pipeline.run() == 0
    return config, pipeline


def test_opens_with_transformers_and_gives_the_trained_logits(trained: Trained) -> None:
    config, pipeline = trained
    folder = config.run_dir / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("w1 w2 w30", return_tensors="pt")
    assert ids["input_ids"].tolist() == [[1, 4, 5, 33]]
    policy: Any = pipeline.actor_train.trainer.policy.causal_lm
    policy.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.allclose(model(**ids).logits, policy(**ids).logits, atol=1e-6)
    base: Any = AutoModelForCausalLM.from_pretrained(config.actor_train.model_path)
    assert all(
        not torch.equal(*pair) for pair in zip(model.parameters(), base.parameters(), strict=True)
    )


def test_tied_weights_are_stored_once(trained: Trained) -> None:
    names = load_file(trained[0].run_dir / "model" / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_untied_weights_are_stored_both(tmp_path: Path) -> None:
    policy, tokenizer = loaded(tmp_path, tie_word_embeddings=False)
    names = dict(policy.named_parameters())
    weights = {name: p.detach() + (1 if "lm_head" in name else 2) for name, p in names.items()}
    export_model(policy, weights, tokenizer, tmp_path / "model", "card")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {f"causal_lm.{name}" for name in stored} == names.keys()
    for name, weight in stored.items():
        assert torch.equal(weight, weights[f"causal_lm.{name}"])


def test_the_model_card_says_what_it_is(trained: Trained) -> None:
    config = trained[0]
    card = (config.run_dir / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    figures = "40 in training, 8 per step, 2 steps"
    for fact in (config.exp_name, "sigmoid", config.actor_train.model_path, figures):
        assert fact in card


def test_no_file_of_the_run_holds_reference_weights(trained: Trained) -> None:
    config, pipeline = trained
    reference = list(pipeline.reference.trainer.weights().values())
    files = [file for file in config.run_dir.rglob("*") if file.is_file()]
    tensors = [file for file in files if file.suffix == ".safetensors"]
    assert (
        len(tensors) == 2 * 3 + 2
    )  # model, optimizer and rng of two checkpoints; model; best model
    texts = (".json", ".jsonl", ".yaml", ".md", ".log", ".html", ".arrows", "")
    assert all(file.suffix in texts for file in set(files) - set(tensors))
    for tensor in (tensor for file in tensors for tensor in load_file(file).values()):
        assert not any(
            tensor.shape == w.shape and torch.equal(tensor.float(), w.float()) for w in reference
        )


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_dtype_of_the_source_whatever_it_was_trained_in(
    tmp_path: Path, source: torch.dtype, dtype: Any
) -> None:
    base = make_model(tmp_path / "base", dtype=source)
    policy = load_policy(str(base), ModelArgs(dtype=dtype), "cpu")
    masters = {name: p.detach().float() + 1e-3 for name, p in policy.named_parameters()}
    tokenizer = AutoTokenizer.from_pretrained(base)
    for name in ("first", "second"):  # exporting must not change what is exported next
        export_model(policy, masters, tokenizer, tmp_path / name, "card")
        stored = load_file(tmp_path / name / "model.safetensors")
        for key, weight in stored.items():
            assert torch.equal(weight, masters[f"causal_lm.{key}"].to(source))
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(
            source
        ).removeprefix("torch.")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == source


def test_sampling_settings_that_transformers_would_not_save(tmp_path: Path) -> None:
    """Published models set a temperature beside do_sample: false; that must not cost the trained weights."""
    base = make_model(tmp_path / "base")
    settings = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False, "temperature": 0.7}
    settings["top_p"] = 0.9
    (base / "generation_config.json").write_text(json.dumps(settings))
    policy = load_policy(str(base), ModelArgs(), "cpu")
    export_model(policy, {}, AutoTokenizer.from_pretrained(base), tmp_path / "model", "card")
    stored = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert {key: stored[key] for key in settings} == settings
    assert policy.causal_lm.generation_config.temperature == 0.7


def test_replaces_an_older_model_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Also not what an export that was killed had left."""
    policy, tokenizer = loaded(tmp_path)
    out = tmp_path / "run"
    for name in ("model", ".tmp-model", ".old-model"):
        (out / name).mkdir(parents=True)
        (out / name / "leftover").touch()
    export_model(policy, {}, tokenizer, out / "model", "card")
    assert [path.name for path in out.iterdir()] == ["model"]
    assert not (out / "model" / "leftover").exists()
    assert (out / "model" / "README.md").read_text() == "card"


def _exported_twice(base: Path, out: Path) -> int:
    """In a process whose files may not grow, and then may."""
    policy = load_policy(str(base), ModelArgs(dtype="fp32"), "cpu")
    tokenizer = AutoTokenizer.from_pretrained(base)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limit[1]))
    with pytest.raises(
        DiskError, match=r"model: could not be written \(.*File too large.*\)\. Free some"
    ):
        export_model(policy, {}, tokenizer, out / "model", "card")
    assert [path.name for path in out.rglob("*")] == ["model", "older"]
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    export_model(policy, {}, tokenizer, out / "model", "card")
    assert [path.name for path in out.iterdir()] == ["model"]
    stored = load_file(out / "model" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    return 0


def test_a_full_disk_keeps_the_old_model_and_the_next_export_is_complete(
    tmp_path: Path,
) -> None:
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "older").touch()
    assert in_child(_exported_twice, base, tmp_path / "out") == 0


def _export(folder: Path) -> Path:
    policy, tokenizer = loaded(folder)
    export_model(policy, {}, tokenizer, folder / "model", "card")
    return folder / "model"


def test_the_model_that_was_moved_aside_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, rename = _export(tmp_path) / "README.md", Path.rename
    card.write_text("older")

    def full(path: Path, target: Path) -> Path:
        if path.name == ".tmp-model":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(DiskError, match="No space left on device"):
        _export(tmp_path)
    assert card.read_text() == "older"
    assert not list(tmp_path.glob(".*"))


def test_everything_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names in the new folder too: without them a loss of power leaves an empty one."""
    synced: list[str] = []
    sync, rename = os.fsync, Path.rename

    def telling(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        sync(handle)

    def renamed(path: Path, target: Path) -> Path:
        assert {*(file.name for file in path.iterdir()), ".tmp-model"} == set(synced)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", telling)
    monkeypatch.setattr(Path, "rename", renamed)
    assert _export(tmp_path).is_dir()
    assert synced[-1] == tmp_path.name


def test_large_models_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, tokenizer = loaded(tmp_path)
    monkeypatch.setattr("rather.model.export.LARGEST_FILE", 20_000)
    export_model(policy, {}, tokenizer, tmp_path / "model", "card")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(map(torch.equal, opened.parameters(), policy.parameters()))


@pytest.mark.defect("R11")
def test_the_kept_share_compares_a_reward_model_with_the_files_it_started_from(
    tmp_path: Path,
) -> None:
    """A new head is not in these files, and would outweigh the update of an adapter."""
    folder = make_model(tmp_path / "base")
    args = ActorModelArgs(lora_rank=4, lora_alpha=4)
    policy = load_policy(str(folder), args, "cpu", start=Start(seed=5), reward=True)
    trained = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    square = 0.0
    for name, lora_b in trained.items():
        if ".lora_B." in name:
            lora_b.fill_(1e-3)
            update = lora_b @ trained[name.replace(".lora_B.", ".lora_A.")]
            square += float(update.square().sum())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = tmp_path / "model"
    kept = export_run(policy, trained, (str(folder), args), tokenizer, model, "card")
    assert kept.square == pytest.approx(square, rel=1e-3)
    export(str(tmp_path / "adapter"), tmp_path / "merged")
    assert f"{kept.share:.2%} of the update" in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.parametrize("family", ["olmo_hybrid", "nemotron_h"])
def test_what_several_ranks_export_opens_as_what_one_exports(family: str, tmp_path: Path) -> None:
    """Names in the files may differ: several ranks write those of the model, which it reads too."""
    model = hybrid(family)
    make_model(tmp_path / "words")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "words")
    model.save_pretrained(tmp_path / "base")
    model.config.dtype = torch.float32
    policy = PolicyModel(model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.125)
    source = ModelFiles(sorted((tmp_path / "base").glob("*.safetensors")))
    weights = dict(policy.named_parameters())
    export_model(policy, weights, tokenizer, tmp_path / "one", "card", source)
    stored = LoadedWeights({name: weight.detach() for name, weight in weights.items()})
    cast = FileCast(torch.float32, policy.rounding, source)
    export_stored(model, stored, tokenizer, tmp_path / "two", "card", cast)
    for folder in ("one", "two"):
        opened, info = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), folder
        exported = dict(opened.named_parameters())
        assert exported.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(exported[name], p) for name, p in model.named_parameters())


def exported(base: Path, out: Path, *, has_source: bool = True) -> dict[str, torch.Tensor]:
    """Add one to every weight of a checkpoint; return the tensors of the export."""
    policy = load_policy(str(base), ModelArgs(), "cpu")
    weights = {name: p.detach() + 1 for name, p in policy.named_parameters()}
    source = ModelFiles(weight_files(base)) if has_source else None
    tokenizer = AutoTokenizer.from_pretrained(base)
    export_model(policy, weights, tokenizer, out / "model", "card", source)
    stored = ModelFiles(weight_files(out / "model")).stored
    return {name: stored[name] for name in stored}


@pytest.mark.defect("M1")
@pytest.mark.parametrize("has_source", [True, False], ids=["source", "alone"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 tensors are missing.*: model\.norm\.weight"),
        (lambda t: t.update(odd=t["model.norm.weight"]), r"1 tensors are (not in|unknown).*: odd"),
        (
            lambda t: t.update({"model.norm.weight": t["model.embed_tokens.weight"]}),
            r"1 tensors have other shapes than .*: .*model\.norm\.weight",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_an_export_that_would_not_open_is_not_published(
    change: Any, problem: str, has_source: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_model(tmp_path / "base")
    before = (base / "model.safetensors").read_bytes()
    earlier = exported(base, tmp_path / "run")

    def changed(*args: Any, **options: Any) -> dict[str, Any]:
        tensors = as_in_files(*args, **options)
        change(tensors)
        return tensors

    as_in_files = export_module._as_in_files
    monkeypatch.setattr(export_module, "_as_in_files", changed)
    with pytest.raises(ConfigError, match=f"run/model: not written: {problem}"):
        exported(base, tmp_path / "run", has_source=has_source)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"]
    stored = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert stored.keys() == earlier.keys()
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.defect("M1")
def test_an_adapter_that_would_not_open_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, args = make_model(tmp_path / "base"), ActorModelArgs(lora_rank=4)
    policy = load_policy(str(folder), args, "cpu")
    trained = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    lost = trained.popitem()[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    layer = lost.removeprefix("causal_lm.").partition(".lora_")[0]
    with pytest.raises(
        ConfigError, match=rf"adapter: not written: 1 tensors are missing: .*{layer}"
    ):
        export_run(policy, trained, (str(folder), args), tokenizer, tmp_path / "run/model", "card")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.defect("M1")
@pytest.mark.parametrize("form", ["several files", "a tied head twice", "a tensor of no module"])
def test_the_names_of_the_source_decide(form: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    if form == "several files":
        settings = {"num_hidden_layers": 3, "num_experts": 3, "num_experts_per_tok": 2}
        config = AutoConfig.for_model("qwen3_moe", **{**TEXT, **settings})
        model = AutoModelForCausalLM.from_config(config)
        (base / "model.safetensors").unlink()
        model.save_pretrained(base, max_shard_size="20KB")
    elif form == "a tied head twice":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    else:  # such as a layer that predicts tokens further ahead
        tensors["model.layers.9.eh_proj.weight"] = torch.ones(3)
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    source = ModelFiles(weight_files(base)).stored
    written = exported(base, tmp_path / "run")
    assert {name: source.shape(name) for name in source} == {n: t.shape for n, t in written.items()}
    unchanged = {name for name in source if torch.equal(source[name], written[name])}
    assert unchanged == {name for name in source if ".9." in name}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert torch.equal(
        model.lm_head.weight, AutoModelForCausalLM.from_pretrained(base).lm_head.weight + 1
    )
