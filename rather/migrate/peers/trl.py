"""TRL: DPOConfig as YAML or JSON, or a line with `trl dpo`, dpo.py, orpo.py, cpo.py, kto, sft.

Facts of TRL 1.10 (trl/trainer/dpo_config.py, trl/experimental/{orpo,cpo}), or of 0.28 if a file
has keys that 0.29 removed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rather.migrate.engine import PROGRAM, Peer
from rather.migrate.peers.shared import (
    DTYPES,
    HELD_OUT,
    HF,
    HF_DEFAULTS,
    READABLE,
    STRATEGY,
    TRL_LOSS,
    adapter,
    address,
    dataset,
    devices,
    length,
)
from rather.migrate.rules import (
    KTO,
    NEEDLESS,
    NOT_NEEDED,
    REWARD,
    SFT,
    Given,
    Outcome,
    Rules,
    Unsupported,
    converted,
    defaults,
    facts,
    gives,
)

OLD = "(old)"  # whether a config was written for TRL before 0.29
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")  # in 1.x; before also sigmoid
REMOVED = (
    "max_prompt_length max_completion_length generate_during_eval reference_free rpo_alpha force_use_ref_model "
    "ref_adapter_name model_adapter_name label_pad_token_id use_logits_to_keep ref_model_init_kwargs "
    "base_model_attribute_name is_encoder_decoder "
)  # fmt: skip
DPO_ONLY = (
    "precompute_ref_log_probs precompute_ref_batch_size f_divergence_type sync_ref_model f_alpha_divergence_coef "
    "use_weighting discopop_tau ld_alpha loss_weights truncation_mode"
)  # fmt: skip
# Files of accelerate that TRL has: the strategy, and how many processes they start.
LAUNCHED = {name: (name, 8) for name in ("zero1", "zero2", "zero3")} | {
    "fsdp1": ("fsdp2_train", 8), "fsdp2": ("fsdp2_train", 8), "multi_gpu": ("ddp", 8), "single_gpu": ("ddp", 1),
}  # fmt: skip


def has_any(names: str) -> Callable[[Given], bool]:
    return lambda given: any(key in given for key in names.split())


def label_smoothing(value: Any, given: Given) -> Outcome:
    losses = given.get("loss_type") or ["sigmoid"]
    names = losses if isinstance(losses, list) else [losses]
    if not value:
        return NOT_NEEDED
    known = (*SMOOTHED, "sigmoid") if given[OLD] else SMOOTHED
    if "cpo" in str(given.get(PROGRAM)) or any(name in known for name in names):
        return gives({"label_smoothing": value})
    lost = ", ".join(names)
    return gives({}, f"TRL 1.x ignores it for {lost}; set it in the YAML if you want it")


def truncation(value: Any, given: Given) -> Outcome:
    if value in (None, "keep_start"):
        return gives({"data.overlong": "truncate_response"})
    note = "the common prompt is cut; pairs with an answer that is too long alone are dropped"
    return gives({"data.overlong": "truncate_prompt"}, note)


def alpha(value: Any, given: Given) -> Outcome:
    if given.get("f_divergence_type") != "alpha_divergence":
        return NOT_NEEDED
    key = "f_alpha_divergence_coef"
    old = gives({key: 1 - value}, "1 - alpha, as TRL writes it since 0.29")
    return old if given[OLD] else gives({key: value})


def weights_dtype(value: Any, given: Given) -> Outcome:
    """TRL's dtype is that of the weights; it computes in bf16 or fp16."""
    if value == "float16" and given.get("bf16") and not given.get("fp16"):
        raise Unsupported("weights in float16 and products in bf16; choose one: model_args.dtype")
    if value in (None, "auto", "float32"):
        return Outcome(NEEDLESS, note="the optimizer always has float32 weights")
    note = "weights have exact float32 copies, so no small update is lost"
    return gives({"model.dtype": DTYPES[value]}, note)


def init_kwargs(value: Any, given: Given) -> Outcome:
    if not value:
        return NOT_NEEDED
    known = weights_dtype(value.get("dtype") or value.get("torch_dtype"), given)
    if lost := set(value) - {"dtype", "torch_dtype", "attn_implementation", "use_cache"}:
        raise Unsupported(f"{', '.join(sorted(lost))}: change the model's folder instead")
    return known


def named_dataset(value: Any, given: Given) -> Outcome:
    """TRL evaluates on another split of the same data set."""
    found = dataset(split="dataset_train_split", config="dataset_config")(value, given)
    is_local = str(value).endswith(READABLE)
    if str(given.get("eval_strategy", "no")) == "no" or is_local or given.get("test_split_size"):
        return found
    split = given.get("dataset_test_split") or "test"
    held_out = address(str(value), split, given.get("dataset_config"))
    own = held_out or f"{Path(str(value)).name}-{split}.jsonl"
    return Outcome(found.status, {**found.values, HELD_OUT: own}, found.note)


def mixture(value: Any, given: Given) -> Outcome:
    if more := {key for entry in value for key in entry} - {"path", "name", "split"}:
        raise Unsupported(f"{', '.join(sorted(more))}: save the rows to a file of their own")
    names = [
        address(entry["path"], entry.get("split"), entry.get("name")) or entry["path"]
        for entry in value
    ]
    return dataset()(names, given)


def launched(value: Any, given: Given) -> Outcome:
    """Of `trl dpo`: accelerate's file, of which --num_processes replaces the processes."""
    strategy, count = converted(LAUNCHED, value)
    return gives({STRATEGY: strategy} | devices(given.get("num_processes") or count))


RULES: Rules = {
    **HF,
    **adapter("lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save", "use_peft", False, None),
    **facts("""
        model_name_or_path = pretrain
        model_revision = model.revision
        trust_remote_code = model.trust_remote_code
        test_split_size = held_out.split
        chat_template_path ! name a template or a Jinja file: global_template
        eos_token ! change the tokenizer's folder instead
        use_weighting = use_weighting
        rpo_alpha = rpo_alpha; the NLL is a mean over all tokens of the step, whatever the micro-batches
        max_prompt_length = data.max_prompt_length
        precompute_ref_batch_size = reference.infer_batch_size
        sync_ref_model = sync_ref_model
        alpha ! AlphaPO is another loss: pref_loss: alphapo
        lora_target_parameters ! only linear layers take an adapter
        max_completion_length ! the answer alone has no limit; overlong: truncate_response cuts it
        generate_during_eval ? no answers are generated during evaluation
        dataset_config dataset_train_split dataset_test_split ~ name the files of the split you want
        force_use_ref_model ~ the loss decides whether there is a reference
        padding_free ~ pairs are always packed, which changes no result
        ref_adapter_name model_adapter_name ~ the starting adapter is the reference
        tools ~ tools are a column of the rows
        dataset_streaming packing_strategy eval_packing shuffle_dataset ignore_bias_buffers pad_to_multiple_of pad_token label_pad_token_id
        use_logits_to_keep activation_offloading ~
        packing ! a step has a number of full sequences there, here a number of pairs or answers; set train_batch_size
        completion_only_loss = data.score: true=last false=all
        assistant_only_loss = data.score: true=assistant if set
        use_peft = model.lora_rank: false=none if use_peft!=true
        precompute_ref_log_probs = reference.cache.enabled: true=true false=true; the reference is always computed once and kept on disk
        ref_model_mixup_alpha = ref_model_mixup_alpha if sync_ref_model=true
        ref_model_sync_steps = ref_model_sync_steps if sync_ref_model=true
        disable_dropout @ true; dropout is always off in preference training
        beta = beta if (program)!~sft|reward if loss_type!=sft|[sft]
        loss_type = pref_loss: kto=kto apo_zero_unpaired=apo_zero_unpaired if (program)~kto
        loss_type = pref_loss: nll=sft chunked_nll=sft if (program)~sft
        loss_type = pref_loss: sigmoid=cpo simpo=simpo if (program)~cpo
        loss_type = pref_loss:: kto_pair=none bco_pair=bco_pair aot_pair=aot_unpaired
        cpo_alpha = rpo_alpha if (program)~cpo if loss_type=simpo
        cpo_alpha = cpo_alpha if (program)~cpo
        cpo_alpha ! a setting of cpo.py; pass the command line
        dataset_text_field dataset_kwargs is_encoder_decoder padding_value
        base_model_attribute_name ref_model_init_kwargs streaming fraction -
        (old) (dpo) ~
    """ + TRL_LOSS),
    "dtype": weights_dtype,
    "torch_dtype": weights_dtype,
    "model_init_kwargs": init_kwargs,
    "dataset_name": named_dataset,
    "datasets": mixture,
    "num_processes": lambda value, given: gives(devices(value)),
    "accelerate_config": launched,
    "label_smoothing": label_smoothing,
    "f_alpha_divergence_coef": alpha,
    "max_length": length(),
    "truncation_mode": truncation,
}  # fmt: skip

PEER = Peer(
    "trl",
    RULES,
    version="1.10",
    programs={"dpo": None, "trl dpo": None, "orpo": "orpo", "cpo": None, "kto": KTO, "trl kto": KTO, "sft": SFT, "trl sft": SFT,
              "reward": REWARD, "trl reward": REWARD},
    defaults={
        OLD: has_any(REMOVED), "(dpo)": has_any(REMOVED + DPO_ONLY), **HF_DEFAULTS,
        # A file does not say which trainer reads it, unless it has a key that only DPOConfig has. Before 0.29, and in
        # orpo.py and cpo.py, the router loss depends on config.json. PEFT chooses q_proj and v_proj for most families.
        **defaults("""
            learning_rate=2e-5 if (program)~sft
            learning_rate=1e-4 if (program)~reward
            learning_rate=1e-6
            loss_type=kto if (program)~kto
            loss_type=sigmoid if (program)~dpo|orpo|cpo
            loss_type=sigmoid if (dpo)=true if (program)!~sft|reward
            router_aux_loss_coef=0.001 if (program)~dpo|kto|sft if (old)=false if mixture model_name_or_path
            cpo_alpha=1.0 simpo_gamma=0.5 if (program)~cpo
            truncation_mode=keep_end max_prompt_length=512 f_alpha_divergence_coef=1.0 if (old)=true
            truncation_mode=keep_start if (program)!~reward
            logging_steps=10 bf16=true max_length=1024 beta=0.1 use_peft=false lora_r=16 lora_alpha=32
            lora_target_modules=[q_proj,v_proj]
        """),
    },
    marks=f"{REMOVED} loss_weights precompute_ref_log_probs model_init_kwargs dataset_train_split use_peft truncation_mode "
          "f_alpha_divergence_coef use_weighting sync_ref_model ref_model_mixup_alpha ref_model_sync_steps discopop_tau "
          "lora_target_modules model_revision padding_free",
    words=(" trl ", "trl.scripts.", "trl/scripts/", "examples/scripts/"),
    whole="model_init_kwargs lr_scheduler_kwargs gradient_checkpointing_kwargs fsdp_config accelerator_config deepspeed",
    always=(
        "Rows of plain text: TRL adds no chat template to them; we apply the tokenizer's own, where it has one.",
        "TRL scores all that follows the prompt, the line end after the last end-of-turn token too; we score the last "
        "answer up to its end-of-turn token.",
        "`sft` and `aot` depend on micro-batches in TRL; here they count over the whole step.",
        "Metrics in TRL are averages over micro-batches; here they are averages over pairs.",
        "The order of the pairs is another one.",
        "`parity: trl-1.x` makes TRL's tokens and rejects settings that mean something else there.",
    ),
)  # fmt: skip
