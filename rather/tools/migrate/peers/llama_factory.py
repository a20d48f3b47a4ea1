"""LLaMA-Factory: the YAML of `llamafactory-cli train`, stages dpo, kto, rm and sft.

Facts of 0.9.6 (src/llamafactory/hparams).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rather.data.messages import KNOWN_ROLES, ROLES
from rather.files import HUB_NAME, JsonObject, parse_json, yaml_text
from rather.tools.migrate.engine import FOLDER, Peer
from rather.tools.migrate.peers.shared import (
    HELD_OUT,
    HF,
    HF_DEFAULTS,
    IMAGES,
    SAMPLES,
    SPLIT,
    adapter,
    address,
    length,
    processes,
)
from rather.tools.migrate.rules import (
    KTO,
    NEEDLESS,
    NOT_NEEDED,
    REWARD,
    SFT,
    Given,
    Outcome,
    Rule,
    Rules,
    Unsupported,
    algorithm,
    defaults,
    facts,
    gives,
    names_of,
    one_or_all,
    pairs,
    to,
)

# Columns by their names in dataset_info.json: Rather's own, and another that it finds by itself.
COLUMNS = {
    "prompt": ("instruction", "prompt"),
    "query": ("input",),
    "messages": ("conversations", "messages"),
    "response": ("output",),
    "kto_tag": ("kto_tag", "label"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "system": ("system",),
    "history": ("history",),
    "tools": ("tools",),
}
TAGS = {"from", "role", "value", "content", *KNOWN_ROLES, *ROLES}
TEMPLATES = pairs(
    "qwen=qwen2_5 qwen2_5=qwen2_5 qwen3=qwen3 qwen3_nothink=chatml llama3=llama3 chatml=chatml "
    "gemma=gemma gemma2=gemma2 gemma3=gemma3 mistral=mistral phi=phi3 zephyr=zephyr vicuna=vicuna"
)  # fmt: skip


def registered(path: str) -> Rule:
    """Look up names in dataset_info.json; with dataset_dir: ONLINE they are names of the hub."""

    def rule(value: Any, given: Given) -> Outcome:
        if not value:
            return NOT_NEEDED
        names = names_of(value)
        if given.get("dataset_dir") == "ONLINE":
            return gives({path: one_or_all([hub_address(name, {}) for name in names])})
        _, listed = registry(given)
        if missing := [name for name in names if name not in listed]:
            raise Unsupported(
                f"no dataset_info.json here lists {', '.join(missing)}; run this in the folder "
                "where you start LLaMA-Factory, or set dataset_dir"
            )
        entries = [listed[name] for name in names]
        renamed = [columns(name, listed[name], given) for name in names]
        if any(columns_of_file != renamed[0] for columns_of_file in renamed):
            raise Unsupported("the files have columns of different names; rename them")
        files = [file_of(name, entry) for name, entry in zip(names, entries, strict=True)]
        values = {path: one_or_all(files)}
        if renamed[0]:
            values[path.replace("file_name", "columns")] = renamed[0]
        return gives(values)

    return rule


def file_of(name: str, entry: JsonObject) -> str:
    """Return the file or the address of a data set; LLaMA-Factory prefers a hub to a file."""
    if entry.get("num_samples"):
        raise Unsupported(f"num_samples of {name} draws rows at random; save them to a file")
    if "hf_hub_url" in entry:
        return hub_address(entry["hf_hub_url"], entry)
    if "file_name" in entry and not {"ms_hub_url", "om_hub_url", "script_url"} & entry.keys():
        return str(entry["file_name"])
    raise Unsupported(f"{name} is neither a local file nor of Hugging Face's hub; save its rows")


def hub_address(name: str, entry: JsonObject) -> str:
    if entry.get("folder") or not HUB_NAME.fullmatch(name):
        raise Unsupported(f"{name}: save its rows to a file and name it in dataset_info.json")
    return address(name, entry.get("split"), entry.get("subset")) or name


def registry(given: Given) -> tuple[Path | None, JsonObject]:
    """Return the folder of dataset_info.json, and its content.

    LLaMA-Factory looks where it is started: here, or in a folder that contains the source.
    """
    folder = Path(str(given.get("dataset_dir") or "data"))
    above = [parent / folder for parent in given[FOLDER].absolute().parents]
    for candidate in (folder, given[FOLDER] / folder, given[FOLDER], *above):
        file = candidate / "dataset_info.json"
        if file.is_file():
            try:
                content = parse_json(yaml_text(file))
            except ValueError as error:
                raise Unsupported(f"{file} is not JSON ({error})") from None
            return candidate, content if isinstance(content, dict) else {}
    return None, {}


def dataset_dir(value: Any, given: Given) -> Outcome:
    if value == "ONLINE":
        return Outcome(NEEDLESS, note="the data sets are of the hub")
    if not isinstance(value, str) or value.startswith("REMOTE:"):
        raise Unsupported("the list of data sets is not a local file; save it as dataset_info.json")
    found_folder, _ = registry(given)
    return gives({"data.dataset_dir": str(found_folder or value)})


def resumed(value: Any, given: Given) -> Outcome:
    """Train an adapter further. LLaMA-Factory's reference is the model without it."""
    names = names_of(value) if value else []
    if not names:
        return NOT_NEEDED
    if len(names) > 1 or given.get("create_new_adapter"):
        raise Unsupported("merge it into the model first (rather merge), and name that model")
    values: JsonObject = {"model.adapter_name_or_path": names[0]}
    if given.get("stage") == "kto" or (
        given.get("stage") == "dpo" and given.get("pref_loss") not in ("orpo", "simpo")
    ):
        values["reference.model_args.adapter_name_or_path"] = None
    return gives(values)


def columns(file: str, entry: JsonObject, given: Given) -> dict[str, str]:
    """Return the columns of a data set that have other names; other kinds of rows are refused."""
    column_names = entry.get("columns") or {}
    is_paired = bool(entry.get("ranking"))
    if is_paired != (given.get("stage") in ("dpo", "rm")):
        raise Unsupported(
            f"{file} has {'' if is_paired else 'no '}pairs (ranking in dataset_info.json)"
        )
    if unread := [name for name in column_names if name not in COLUMNS]:
        raise Unsupported(f"{file} has columns that are not read ({', '.join(unread)})")
    if tags := set((entry.get("tags") or {}).values()) - TAGS:
        raise Unsupported(f"rename roles or keys in the messages of {file} ({', '.join(tags)})")
    return {COLUMNS[key][0]: name for key, name in column_names.items() if name not in COLUMNS[key]}


RULES: Rules = {
    **HF,
    **adapter(
        "lora_rank lora_alpha lora_dropout lora_target additional_target",
        "finetuning_type",
        "full",
        "freeze",
        resumed="adapter_name_or_path",
    ),
    **facts(f"""
        model_name_or_path = pretrain
        finetuning_type = model.lora_rank: full=none if finetuning_type=full
        finetuning_type @ lora; weights are trained whole or by a LoRA adapter
        trust_remote_code = model.trust_remote_code
        ref_model = reference.model_args.model_name_or_path
        pref_beta = beta if stage=dpo|kto
        moe_aux_loss_coef = model.moe_aux_loss_coef if stage=sft
        (router) = model.moe_aux_loss_coef
        quantization_bit = model.quantization: 4=4bit
        quantization_method @ bnb; weights are rounded by bitsandbytes
        quantization_type @ nf4; weights are rounded to nf4
        enable_thinking @ true none; an empty thought is part of the answers
        pissa_init = model.init_lora_weights: true=pissa false=true
        pref_loss = pref_loss:: kto_pair=none if stage=dpo
        packing if stage=sft ! a step has a number of full sequences there, here a number of pairs \
            or answers; set train_batch_size
        simpo_gamma = gamma if pref_loss=simpo
        pure_bf16 = model.dtype: true=bf16; weights have exact float32 copies
        mix_strategy @ concat; data_args.weights mixes files
        kto_chosen_weight = desirable_weight
        kto_rejected_weight = undesirable_weight
        pref_ftx = pref_ftx
        dpo_label_smoothing = label_smoothing
        ld_alpha = ld_alpha
        max_samples = data.max_samples if set
        mask_history = data.score: true=last false=assistant if stage=sft
        mask_history = data.score: true=last false=last
        disable_gradient_checkpointing = model.disable_gradient_checkpointing
        model_revision = model.revision
        ref_model_adapters ! merge it into the reference model first
        create_new_adapter if adapter_name_or_path=none ~ there is no other adapter
        create_new_adapter ! merge the adapter into the model first (rather merge), and name that \
            model
        do_predict if do_train!=true ! it generates answers and does not train
        ref_model_quantization_bit ! the reference is not quantised by itself
        pref_bco_weight ! not supported; pref_loss takes a list with loss_weights
        use_galore use_badam use_apollo use_muon use_adam_mini loraplus_lr_ratio
        freeze_trainable_layers
        train_on_prompt resize_vocab rope_scaling neat_packing use_unsloth use_mca ! not supported
        tokenized_path ! tokenised rows of LLaMA-Factory; name the files of the rows
        hf_hub_token ms_hub_token om_hub_token ? set it in the environment
        flash_attn ~ Rather has its own attention
        overwrite_cache plot_loss use_fast_tokenizer low_cpu_mem_usage enable_liger_kernel
        cache_dir upcast_layernorm preprocessing_batch_size use_swanlab
        double_quantization ray_run_name ray_storage_path print_param_status
        include_effective_tokens_per_second eval_num_beams infer_backend infer_dtype offload_folder
        use_kv_cache use_reentrant_gc use_unsloth_gc master_addr master_port compute_accuracy
        data_shared_file_system ray_init_kwargs ignore_pad_token_for_loss
        swanlab_project swanlab_mode use_v1_kernels ~
        image_max_pixels = data.image_max_pixels
        image_min_pixels = data.image_min_pixels
        media_dir = data.image_dir
        freeze_vision_tower freeze_multi_modal_projector @ true; set model_args.freeze by hand
        video_max_pixels video_min_pixels video_fps video_maxlen audio_sampling_rate ~ {IMAGES}
        model_class peft_config train_dataset !! a setting of the new version 1, whose examples do \
            not name the algorithm.
    """),
    "stage": algorithm({"dpo": None, "kto": {**KTO, "pref_loss": "kto"}, "sft": SFT, "rm": REWARD}),
    "dataset": registered(SAMPLES),
    "eval_dataset": registered(HELD_OUT),
    "val_size": SPLIT,
    "template": to("global_template", TEMPLATES),
    "cutoff_len": partial(
        length,
        cut="truncate_prompt",
        note="LLaMA-Factory shortens prompt and "
        "answers in proportion; here "
        "the prompt is cut from its left",
    ),
    "dataset_dir": dataset_dir,
    "adapter_name_or_path": resumed,
    "ray_num_workers": processes,
}

PEER = Peer(
    "llama-factory",
    RULES,
    version="0.9.6",
    defaults={
        **HF_DEFAULTS,
        **defaults("""
            stage=sft cutoff_len=2048 dataset_dir=data finetuning_type=lora lora_rank=8
            lora_target=all pref_beta=0.1 pref_loss=sigmoid mask_history=false simpo_gamma=0.5
            (router)=0.0 if mixture model_name_or_path
        """),
        "lora_alpha": lambda given: 2 * given["lora_rank"],
    },
    marks="stage finetuning_type pref_beta pref_loss pref_ftx cutoff_len dpo_label_smoothing "
          "quantization_bit plot_loss overwrite_cache",
    whole="dataset_dir lr_scheduler_kwargs deepspeed gradient_checkpointing_kwargs "
          "accelerator_config",
    always=("The order of the pairs is another one.",),
)  # fmt: skip
