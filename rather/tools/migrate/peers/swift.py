"""ms-swift: the arguments of `swift rlhf` and `megatron rlhf`.

Facts of 4.6 (swift/arguments, swift/trainers/arguments.py, swift/megatron/arguments).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rather.files import parse_json, yaml_text
from rather.tools.migrate.engine import COUNT, FOLDER, PROGRAM, Peer
from rather.tools.migrate.peers.shared import (
    HELD_OUT,
    HF,
    HF_DEFAULTS,
    STRATEGY,
    TRL_LOSS,
    adapter,
    dataset,
    length,
    optimizer,
)
from rather.tools.migrate.rules import (
    KTO,
    NOT_NEEDED,
    REWARD,
    SFT,
    UNSET,
    Given,
    Outcome,
    Rule,
    Rules,
    Unsupported,
    algorithm,
    all_of,
    defaults,
    facts,
    gives,
    names_of,
    pairs,
    to,
    when,
)

KINDS = {"dpo": None, "kto": KTO, "orpo": "orpo", "simpo": "simpo", "cpo": None,
         "rm": REWARD}  # None: loss_type says it  # fmt: skip
# Names of Megatron's arguments, and of older versions.
ALIASES = pairs(
    "train_type=tuner_type lr=learning_rate clip_grad=max_grad_norm adam_eps=adam_epsilon "
    "lr_decay_style=lr_scheduler_type lr_warmup_fraction=warmup_ratio lr_warmup_iters=warmup_steps "
    "train_iters=max_steps save=output_dir max_epochs=num_train_epochs save_interval=save_steps "
    "eval_interval=eval_steps context_parallel_size=sequence_parallel_size"
)  # fmt: skip


def accumulation(given: Given) -> Any:
    """Return the default: a batch of up to 16 pairs; Megatron names the whole batch."""
    if "megatron" in str(given.get(PROGRAM)):
        return UNSET
    return max(1, -(-16 // (given["per_device_train_batch_size"] * given[COUNT])))


def own_dtype(given: Given) -> Any:
    """Return the default of torch_dtype: that of the model's config.json, if it is here."""
    for folder in (given[FOLDER], Path()):
        file = folder / str(given.get("model")) / "config.json"
        if file.is_file():
            config = parse_json(yaml_text(file))
            return config.get("dtype") or config.get("torch_dtype") or UNSET
    return UNSET


def columns(value: Any, given: Given) -> Outcome:
    """Translate names of columns: swift writes {the file's: its own}, Rather the reverse."""
    if unread := set(value.values()) - {"messages", "rejected_response", "system", "tools"}:
        raise Unsupported(f"{', '.join(sorted(unread))}: rename the columns in the file")
    return gives({"data.columns": {ours: theirs for theirs, ours in value.items()}})


def min_lr(value: Any, given: Given) -> Outcome:
    if value and given.get("lr_scheduler_type") != "cosine":
        raise Unsupported("only a cosine has a least learning rate")
    return gives({"training.lr_scheduler_kwargs": {"min_lr": value}}) if value else NOT_NEEDED


REFERENCE_ADAPTER = "reference.model_args.adapter_name_or_path"


def has_reference(given: Given) -> bool:
    return given.get("rlhf_type") in ("dpo", "kto") and "sft" not in str(given.get(PROGRAM))


def one_adapter(value: Any, given: Given) -> str:
    names = names_of(value)
    if len(names) > 1 or given.get("tuner_type") == "full" or given.get("ref_model"):
        raise Unsupported("merge it into its model first (rather merge), and name that model")
    return names[0]


def resumed(value: Any, given: Given) -> Outcome:
    """Train an adapter further; its reference is the model alone, unless ref_adapters is set."""
    if not value:
        return NOT_NEEDED
    values = {"model.adapter_name_or_path": one_adapter(value, given)}
    without = has_reference(given) and not given.get("ref_adapters")
    return gives(values | {REFERENCE_ADAPTER: None} if without else values)


def reference_adapter(value: Any, given: Given) -> Outcome:
    if not value:
        return NOT_NEEDED
    if not has_reference(given):
        raise Unsupported("this training has no reference")
    return gives({REFERENCE_ADAPTER: one_adapter(value, given)})


def degree(path: str) -> Rule:
    return when(
        all_of([">1"]), lambda value, given: gives({STRATEGY: "megatron_train", path: value})
    )


RULES: Rules = {
    **HF,
    **adapter(
        "lora_rank lora_alpha lora_dropout target_modules modules_to_save",
        "tuner_type",
        "full",
        resumed="adapters",
    ),
    **facts(
        """
        global_batch_size = train_batch_size
        model = pretrain
        tuner_type = model.lora_rank: full=none if tuner_type=full
        tuner_type @ lora; weights are trained whole or by a LoRA adapter
        model_revision = model.revision
        task_type @ causal_lm; Rather trains language models only
        expert_tensor_parallel_size @ 1 none; experts are divided by ep_size only
        quant_bits = model.quantization: 4=4bit
        split_dataset_ratio = held_out.split if set
        loss_scale = data.score: last_round=last default=assistant all=all
        ref_model = reference.model_args.model_name_or_path
        label_smoothing = label_smoothing
        beta = beta if (program)!~sft if rlhf_type!=rm
        loss_type = pref_loss: sigmoid=cpo simpo=simpo if set if rlhf_type=cpo
        loss_type = pref_loss: kto=kto apo_zero_unpaired=apo_zero_unpaired if set if rlhf_type=kto
        loss_type if set if (program)~megatron if loss_type!=sigmoid ! megatron rlhf trains \
            sigmoid whatever is written here
        loss_type = pref_loss:: kto_pair=none if set if rlhf_type=dpo
        simpo_gamma = gamma if rlhf_type=simpo
        cpo_alpha = rpo_alpha if rlhf_type=cpo|simpo if loss_type=simpo
        cpo_alpha = rpo_alpha if rlhf_type=simpo
        cpo_alpha = cpo_alpha if rlhf_type=cpo
        truncation_strategy = data.overlong: delete=drop if truncation_strategy=delete
        truncation_strategy = data.overlong: delete=drop left=truncate_prompt \
            right=truncate_response; left cuts the prompt, right the answers
        torch_dtype = model.dtype: bfloat16=bf16 float16=fp16 float32=fp16 if bf16=none if fp16=none
        sequence_parallel_size = actor_train.strategy_args.cp_size
        moe_aux_loss_coeff ! Megatron adds it up over layers and micro-batches; choose \
            moe_aux_loss_coef
        template ! name one of ours: global_template
        system ! write the system message into the rows
        packing ! a step has a number of full sequences there, here a number of pairs or answers; \
            set train_batch_size
        optimizer_cpu_offload ? strategy_name: zero2_cpu keeps the optimizer on the host
        micro_batch_size ~ micro-batches follow a token budget
        sequence_parallel ~ norms by sequence change no result
        padding_free ~ pairs are always packed
        attn_impl ~ Rather has its own attention
        freeze_vit freeze_aligner @ true; set model_args.freeze by hand
        freeze_llm @ false; the language model trains
        save_safetensors finetune cross_entropy_loss_fusion attention_backend recompute_method
        recompute_num_layers recompute_modules no_save_optim no_save_rng
        use_precision_aware_optimizer optimizer_offload_fraction no_load_optim no_load_rng
        moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap merge_lora group_by_length
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather tensorboard_dir
        wandb_project wandb_exp_name async_save packing_length check_model use_logits_to_keep use_hf
        model_type add_version dataset_shuffle lazy_tokenize load_from_cache_file
        create_checkpoint_symlink model_author model_name gradient_accumulation_fusion
        masked_softmax_fusion experts_impl strict
        ignore_args_error streaming num_labels ~
        max_pixels = data.image_max_pixels
        vit_gradient_checkpointing ~
        vit_lr aligner_lr ! all weights have one learning rate
    """
        + TRL_LOSS
    ),
    "rlhf_type": algorithm(KINDS),
    "min_lr": min_lr,
    "recompute_granularity": to(
        "model.disable_gradient_checkpointing", {"full": False, "selective": False, "none": True}
    ),
    "tensor_model_parallel_size": degree("strategy.tp_size"),
    "pipeline_model_parallel_size": degree("strategy.pp_size"),
    "expert_model_parallel_size": degree("strategy.ep_size"),
    "optimizer": optimizer,
    "adapters": resumed,
    "ref_adapters": reference_adapter,
    "columns": columns,
    "dataset": dataset,
    "val_dataset": partial(dataset, path=HELD_OUT),
    "max_length": length,
}

PEER = Peer(
    "swift",
    RULES,
    version="4.6",
    programs={"swift rlhf": None, "megatron rlhf": None, "swift sft": SFT, "megatron sft": SFT},
    aliases=ALIASES,
    defaults={
        **{
            key: value
            for key, value in HF_DEFAULTS.items()
            if key not in ("learning_rate", "gradient_accumulation_steps")
        },
        "eval_strategy": lambda given: "steps" if given.get("eval_steps") else "no",
        **defaults("""
            rlhf_type=dpo if (program)!~sft
            loss_scale=default if (program)~sft
            tuner_type=full global_batch_size=16 if (program)~megatron
            tuner_type=lora if (program)!=none
            learning_rate=1e-5 if tuner_type=full
            learning_rate=1e-4 if tuner_type=lora
            lora_rank=8 lora_alpha=32 logging_steps=5 max_length=none lr_scheduler_type=cosine
            weight_decay=0.1 adam_beta2=0.95 simpo_gamma=1.0 cpo_alpha=1.0
            beta=2.0 if rlhf_type=simpo
            beta=0.1
            loss_type=sigmoid if rlhf_type=dpo|cpo
            loss_type=kto if rlhf_type=kto
            per_device_train_batch_size=1 num_train_epochs=3.0 if (program)!~megatron
            router_aux_loss_coef=0.0 if mixture model
        """),
        "gradient_accumulation_steps": accumulation,
        "torch_dtype": own_dtype,
    },
    marks="rlhf_type train_type tuner_type split_dataset_ratio loss_scale ref_adapters "
    "truncation_strategy attn_impl quant_bits",
    words=(" swift ", " megatron "),
    whole="lr_scheduler_kwargs columns deepspeed gradient_checkpointing_kwargs accelerator_config",
    always=("swift computes label_smoothing, LD and the divergences as TRL before 0.29 did.",),
)
