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
    FULL_SEQUENCES,
    HELD_OUT,
    HF,
    HF_DEFAULTS,
    IMAGES,
    SAMPLES,
    adapter,
    address,
    columns_of_all,
    processes,
)
from rather.tools.migrate.rules import (
    NEEDLESS,
    NOT_NEEDED,
    Given,
    Outcome,
    Rules,
    Unsupported,
    facts,
    gives,
    names_of,
    one_or_all,
)

# Columns by their names in dataset_info.json: Rather's own, and another that it finds by itself.
COLUMNS = {
    "prompt": ("instruction", "prompt"),
    "query": ("input",),
    "messages": ("conversations", "messages"),
    "response": ("output",),
    "kto_tag": ("kto_tag", "label"),
    **{name: (name,) for name in ("chosen", "rejected", "system", "history", "tools")},
}
TAGS = {"from", "role", "value", "content", *KNOWN_ROLES, *ROLES}


def registered(value: Any, given: Given, *, path: str) -> Outcome:
    """Look up names in dataset_info.json; with dataset_dir: ONLINE they are names of the hub."""
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
    files = [file_of(name, listed[name]) for name in names]
    columns = [columns_of(name, listed[name], given) for name in names]
    return gives({path: one_or_all(files), **columns_of_all(path, columns)})


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


def columns_of(name: str, entry: JsonObject, given: Given) -> dict[str, str]:
    """Return the columns of a data set that have other names; other kinds of rows are refused."""
    columns, is_paired = entry.get("columns") or {}, bool(entry.get("ranking"))
    if is_paired != (given.get("stage") in ("dpo", "rm")):
        kind = "pairs" if is_paired else "no pairs"
        raise Unsupported(f"{name} has {kind} (ranking in dataset_info.json)")
    if unread := columns.keys() - COLUMNS:
        raise Unsupported(f"{name} has columns that are not read ({', '.join(sorted(unread))})")
    if tags := set((entry.get("tags") or {}).values()) - TAGS:
        raise Unsupported(f"rename roles or keys in the messages of {name} ({', '.join(tags)})")
    return {
        COLUMNS[key][0]: column for key, column in columns.items() if column not in COLUMNS[key]
    }


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
    folder, _ = registry(given)
    return gives({"data.dataset_dir": str(folder or value)})


MERGE = "merge it into the model first (rather merge), and name that model"
WITHOUT_ADAPTER = "reference.model_args.adapter_name_or_path=none"
RULES: Rules = {
    **HF,
    **adapter(
        "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target",
        is_on="finetuning_type!=full or freeze if adapter_name_or_path unset",
    ),
    **facts(f"""
        stage if =kto = task=unpaired pref_loss=kto
        stage if =sft = task=sft pref_loss=sft
        stage if =rm = task=reward pref_loss=bradley_terry
        stage if !=dpo !! is not a training that Rather offers; it converts dpo, kto, sft, rm.
        model_class peft_config train_dataset !! is of the new version 1, whose examples do not \
            name the algorithm.
        model_name_or_path = pretrain
        template = global_template: qwen=qwen2_5 qwen2_5=qwen2_5 qwen3=qwen3 qwen3_nothink=chatml \
            llama3=llama3 chatml=chatml gemma=gemma gemma2=gemma2 gemma3=gemma3 mistral=mistral \
            phi=phi3 zephyr=zephyr vicuna=vicuna
        cutoff_len if !=none = sequence_length data.overlong=truncate_prompt; LLaMA-Factory \
            shortens prompt and answers in proportion; here the prompt is cut from its left
        val_size if set = held_out.split
        finetuning_type if =full = model.lora_rank=none
        finetuning_type @ lora; weights are trained whole or by a LoRA adapter
        adapter_name_or_path if ~, ! {MERGE}
        adapter_name_or_path if set if create_new_adapter set ! {MERGE}
        adapter_name_or_path if set if stage=kto = model.adapter_name_or_path {WITHOUT_ADAPTER}
        adapter_name_or_path if set if stage=dpo if pref_loss!=orpo or simpo = \
            model.adapter_name_or_path {WITHOUT_ADAPTER}
        adapter_name_or_path if set = model.adapter_name_or_path
        create_new_adapter if adapter_name_or_path=none ~ there is no other adapter
        create_new_adapter ! {MERGE}
        trust_remote_code = model.trust_remote_code
        ref_model = reference.model_args.model_name_or_path
        pref_beta if stage=dpo or kto = beta
        moe_aux_loss_coef if stage=sft = model.moe_aux_loss_coef
        (router) = model.moe_aux_loss_coef
        quantization_bit = model.quantization: 4=4bit
        quantization_method @ bnb; weights are rounded by bitsandbytes
        quantization_type @ nf4; weights are rounded to nf4
        enable_thinking @ true none; an empty thought is part of the answers
        pissa_init = model.init_lora_weights: true=pissa false=true
        pref_loss if stage=dpo = pref_loss:: kto_pair=none
        packing if stage=sft ! {FULL_SEQUENCES}
        simpo_gamma if pref_loss=simpo = gamma
        pure_bf16 = model.dtype: true=bf16; weights have exact float32 copies
        mix_strategy @ concat; data_args.weights mixes files
        kto_chosen_weight = desirable_weight
        kto_rejected_weight = undesirable_weight
        pref_ftx = pref_ftx
        dpo_label_smoothing = label_smoothing
        ld_alpha = ld_alpha
        max_samples if set = data.max_samples
        mask_history if stage=sft = data.score: true=last false=assistant
        mask_history = data.score: true=last false=last
        disable_gradient_checkpointing = model.disable_gradient_checkpointing
        model_revision = model.revision
        ref_model_adapters ! merge it into the reference model first
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
    """),
    "dataset": partial(registered, path=SAMPLES),
    "eval_dataset": partial(registered, path=HELD_OUT),
    "dataset_dir": dataset_dir,
    "ray_num_workers": processes,
}  # fmt: skip

PEER = Peer(
    "llama-factory",
    RULES,
    version="0.9.6",
    derived={"lora_alpha": lambda given: 2 * (given.get("lora_rank") or 8)},
    defaults=HF_DEFAULTS + """
        stage=sft cutoff_len=2048 dataset_dir=data finetuning_type=lora lora_rank=8
        lora_target=all pref_beta=0.1 pref_loss=sigmoid mask_history=false simpo_gamma=0.5
        learning_rate=5e-5 logging_steps=500
        (router)=0.0 if mixture model_name_or_path
    """,
    marks="stage finetuning_type pref_beta pref_loss pref_ftx cutoff_len dpo_label_smoothing "
          "quantization_bit plot_loss overwrite_cache",
    whole="dataset_dir lr_scheduler_kwargs deepspeed gradient_checkpointing_kwargs",
    always=("The order of the pairs is another one.",),
)  # fmt: skip
