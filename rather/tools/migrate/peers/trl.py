"""TRL: a config as YAML or JSON. Scripts run with `rather.trl` instead.

Facts of TRL 1.10 (trl/trainer, trl/experimental). An older file (trl_versions.py) has to set what
has another default now. Recipes of the alignment handbook and of SimPO are read as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rather.config.schema import as_list
from rather.files import JsonObject
from rather.tools.migrate.engine import TRAINER, Peer
from rather.tools.migrate.peers import trl_versions
from rather.tools.migrate.peers.shared import (
    COPIES,
    DTYPES,
    FULL_SEQUENCES,
    HELD_OUT,
    HF,
    HF_DEFAULTS,
    READABLE,
    STRATEGY,
    adapter,
    address,
    dataset,
    processes,
)
from rather.tools.migrate.peers.trl_versions import NEW, OLD
from rather.tools.migrate.rules import (
    CHANGED,
    NOT_NEEDED,
    UNSET,
    Given,
    Outcome,
    Rules,
    Unsupported,
    facts,
    gives,
    names_of,
)

ERA = "(era)"
NO_LIMIT = 32768
SIMPO = "simpo"  # the authors' own trainer
TRAINERS = ("dpo", "orpo", "cpo", "kto", "bco", "sft", "reward", SIMPO)


def own_keys(given: Given) -> list[str]:
    return [key for key in given if not key.startswith("(")]


def trainer(given: Given) -> Any:
    """Return the trainer that alone has one of the keys."""
    if "gamma_beta_ratio" in given:
        return SIMPO
    losses = map(str, as_list(given.get("loss_type")))
    return trl_versions.trainer_of(own_keys(given), losses) or UNSET


def era(given: Given) -> str:
    """Return the versions that a file may be for; SimPO's own trainer was made from TRL 0.9."""
    if given.get(TRAINER) == SIMPO:
        return OLD
    return trl_versions.era(given[TRAINER], own_keys(given)) if TRAINER in given else NEW


def alpha(value: Any, given: Given) -> Outcome:
    if given.get("f_divergence_type") != "alpha_divergence":
        return NOT_NEEDED
    if given[ERA] == OLD:
        note = "1 - alpha, as TRL writes it since 0.29"
        return gives({"f_alpha_divergence_coef": 1 - value}, note)
    return gives({"f_alpha_divergence_coef": value})


# ---- data


def named_dataset(value: Any, given: Given) -> Outcome:
    """Set the data; TRL evaluates on another split of the same data set."""
    if not value:
        return NOT_NEEDED
    config, split = given.get("dataset_config"), given.get("dataset_train_split")
    outcome = dataset([address(name, split, config) or name for name in names_of(value)])
    evaluates = {given.get("eval_strategy"), given.get("evaluation_strategy")} & {"steps", "epoch"}
    if not evaluates or value.endswith(READABLE) or given.get("test_split_size"):
        return outcome
    split = given.get("dataset_test_split") or "test"
    held_out = address(value, split, config) or f"{Path(value).name}-{split}.jsonl"
    return outcome._replace(values={**outcome.values, HELD_OUT: held_out})


ENTRY = {"path", "id", "name", "config", "split", "columns", "weight"}
COLUMNS = {"prompt", "chosen", "rejected", "messages", "completion", "label"}


def name_of(entry: JsonObject) -> str:
    """Return the file or the address of a data set, as TRL and the alignment handbook list it."""
    name, config = entry.get("path") or entry["id"], entry.get("name") or entry.get("config")
    if extra := entry.keys() - ENTRY:
        raise Unsupported(f"{', '.join(sorted(extra))}: save the rows to a file of their own")
    if entry.get("weight") not in (None, 1):
        raise Unsupported(
            f"{name}: weight {entry['weight']} is a random part of the rows; save them to a file "
            "of their own"
        )
    if unread := set(entry.get("columns") or ()) - COLUMNS:
        raise Unsupported(f"{name}: the column {', '.join(sorted(unread))} is not read")
    return address(name, entry.get("split"), None if config == "default" else config) or str(name)


def mixture(value: Any, given: Given) -> Outcome:
    return dataset(list(map(name_of, value)))


def handbook_mixture(value: Any, given: Given) -> Outcome:
    """Convert dataset_mixture of the alignment handbook."""
    entries, held_out = value["datasets"], value.get("test_split_size")
    outcome = mixture(entries, given)
    values = dict(outcome.values)
    if given.get(TRAINER) == "sft" and all(row.get("columns") == ["messages"] for row in entries):
        values["data.score"] = "assistant" if given.get("assistant_only_loss") else "all"
    if held_out:
        values["held_out.split"] = held_out
        if not outcome.note:
            note = "as many rows are held out, but others: the seeds draw differently"
            return Outcome(CHANGED, values, note)
    return outcome._replace(values=values)


def handbook_mixer(value: Any, given: Given) -> Outcome:
    """Convert dataset_mixer, the handbook's older form: a share of each data set, and splits."""
    configs = given.get("dataset_configs") or [None] * len(value)
    train, test = [], []
    for (name, share), config in zip(value.items(), configs, strict=True):
        for split in given.get("dataset_splits") or ["train", "test"]:
            file = name_of({"path": name, "name": config, "split": split, "weight": share})
            if "train" in split:
                train.append(file)
            elif "test" in split:
                test.append(file)
            else:
                raise Unsupported(f"the split {split} is neither train nor test")
    outcome = dataset(train)
    held_out = dataset(test, HELD_OUT).values if test else {}
    return outcome._replace(values={**outcome.values, **held_out})


# ---- keys

INSERTED = (
    "rows without a system message get an empty one if the chat template has system messages; add "
    "it to the rows and set auto_insert_empty_system_msg: false"
)
RULES: Rules = {
    **HF,
    **adapter(
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save",
        is_on="use_peft set",
    ),
    **facts(
        f"""
        {TRAINER} if =kto = task=unpaired
        {TRAINER} if =bco = task=unpaired pref_loss=bco
        {TRAINER} if =sft = task=sft pref_loss=sft
        {TRAINER} if =reward = task=reward pref_loss=bradley_terry
        {TRAINER} if =orpo or simpo = pref_loss
        (loss) ?? a file does not name its trainer; pass --trainer dpo (kto, orpo, ...)
        (bf16) (max_length) (max_prompt_length) (ref_model_mixup_alpha) (truncation_mode) ?? the \
            file is for an older TRL, whose versions have different defaults; set it
        (layers) ?? PEFT's own choice depends on the model; set lora_target_modules
        model_name_or_path = pretrain
        model_revision = model.revision
        trust_remote_code = model.trust_remote_code
        test_split_size = held_out.split
        chat_template_path ! name a template or a Jinja file: global_template
        chat_template if set > global_template=chat_template.jinja; save the template to this file
        auto_insert_empty_system_msg if set if chat_template unset ?? {INSERTED}
        auto_insert_empty_system_msg if set if chat_template~system or im_start ?? {INSERTED}
        eos_token ! change the tokenizer's folder instead
        use_weighting = use_weighting
        rpo_alpha = rpo_alpha; the NLL is a mean over all tokens of the step, whatever the \
            micro-batches
        max_length max_seq_length if =none = sequence_length={NO_LIMIT}; Rather needs a length; \
            pairs above {NO_LIMIT} tokens are dropped and counted
        max_length max_seq_length = sequence_length
        max_prompt_length = data.max_prompt_length
        truncation_mode if (trainer)=sft = data.overlong: keep_start=truncate_response \
            none=truncate_response; rows whose last answer begins after max_length are dropped; \
            TRL trains on their start
        truncation_mode if =keep_start or none = data.overlong=truncate_response
        truncation_mode = data.overlong: keep_end=truncate_prompt; the common prompt is cut; \
            pairs with an answer that is too long alone are dropped
        precompute_ref_batch_size = reference.infer_batch_size
        sync_ref_model = sync_ref_model
        alpha ! AlphaPO is another loss: pref_loss: alphapo
        lora_target_parameters ! add stacked experts to lora_target, as in experts.down_proj
        max_completion_length ! the answer alone has no limit; overlong: truncate_response cuts it
        generate_during_eval ? no answers are generated during evaluation
        dataset_config dataset_train_split dataset_test_split ~ name the files of the split you want
        force_use_ref_model ~ the loss decides whether there is a reference
        padding_free ~ pairs are always packed, which changes no result
        ref_adapter_name model_adapter_name ~ the starting adapter is the reference
        tools ~ tools are a column of the rows
        dataset_streaming packing_strategy eval_packing shuffle_dataset ignore_bias_buffers
        pad_to_multiple_of pad_token label_pad_token_id use_logits_to_keep activation_offloading
        model_init_kwargs.attn_implementation model_init_kwargs.use_cache ~
        model_init_kwargs model_init_kwargs.revision model_init_kwargs.trust_remote_code \
            model_init_kwargs.device_map
        model_init_kwargs.rope_scaling model_init_kwargs.quantization_config ! change the model's \
            folder instead
        dtype torch_dtype model_init_kwargs.dtype model_init_kwargs.torch_dtype if =float16 if \
            bf16 set if fp16 unset ! weights in float16 and products in bf16; choose one: \
            model_args.dtype
        dtype torch_dtype model_init_kwargs.dtype model_init_kwargs.torch_dtype if =none or auto \
            or float32 ~ the optimizer always has float32 weights
        dtype torch_dtype model_init_kwargs.dtype model_init_kwargs.torch_dtype = model.dtype: \
            {DTYPES}; {COPIES}, so no small change is lost
        packing ! {FULL_SEQUENCES}
        completion_only_loss = data.score: true=last false=all
        assistant_only_loss if set = data.score: true=assistant
        use_peft if !=true = model.lora_rank: false=none
        precompute_ref_log_probs = reference.cache.enabled: true=true false=true; the reference \
            is always computed once and kept on disk
        ref_model_mixup_alpha if sync_ref_model=true = ref_model_mixup_alpha
        ref_model_sync_steps if sync_ref_model=true = ref_model_sync_steps
        (tower) = model.freeze
        disable_dropout @ true; dropout is always off in preference training
        beta if (trainer)!=sft or reward if loss_type!=sft or [sft] = beta
        loss_type if (trainer)=kto = pref_loss: kto=kto bco=bco apo_zero_unpaired=apo_zero_unpaired
        loss_type if (trainer)=sft = pref_loss: nll=sft chunked_nll=sft
        loss_type if (trainer)=cpo = pref_loss: sigmoid=cpo simpo=simpo
        loss_type if (trainer)=simpo = pref_loss: sigmoid=simpo
        loss_type if (trainer)=dpo = pref_loss:: kto_pair=none bco_pair=bco_pair \
            aot_pair=aot_unpaired
        loss_type if (trainer)!=none ! this trainer has no such setting
        loss_type ~ its meaning depends on the trainer
        label_smoothing if set if (trainer)=cpo or simpo = label_smoothing
        label_smoothing if set if loss_type~robust or exo_pair or aot = label_smoothing
        label_smoothing if set if (era)=old if loss_type~sigmoid = label_smoothing
        label_smoothing if set = ; TRL 1.x ignores it for this loss; set it in the YAML if you \
            want it
        cpo_alpha if (trainer)=cpo if loss_type=simpo = rpo_alpha
        cpo_alpha if (trainer)=cpo = cpo_alpha
        cpo_alpha ! a setting of cpo.py; pass --trainer cpo
        gamma_beta_ratio = gamma_beta_ratio
        sft_weight ! the NLL is a mean over each micro-batch; set rpo_alpha, a mean over the step
        tokenizer_name_or_path = model.tokenizer_name_or_path
        dataset_splits dataset_configs ~ parts of dataset_mixer
        use_flash_attention_2 use_liger use_liger_loss dataset_batch_size chars_per_token
        num_of_sequences
        use_num_logits_to_keep model_code_revision base_model_revision hub_model_revision ~
        dataset_kwargs ! tokens are those of the chat template
        max_target_length ! only encoder-decoder models have it
        dataset_text_field is_encoder_decoder padding_value base_model_attribute_name
        ref_model_init_kwargs streaming fraction dataset_train_name
        dataset_test_name !
        {ERA} ~ shows which version of TRL the file is for
        loss_weights = loss_weights
        ld_alpha = ld_alpha
        reference_free = reference_free
        desirable_weight = desirable_weight
        undesirable_weight = undesirable_weight
        center_rewards_coefficient = center_rewards_coefficient
        discopop_tau if loss_type~discopop = discopop_tau
        f_divergence_type = f_divergence_type: reverse_kl=reverse_kl forward_kl=forward_kl \
            js_divergence=js alpha_divergence=alpha
        router_aux_loss_coef = model.moe_aux_loss_coef; over all tokens of the step, not a mean \
            of micro-batches
        simpo_gamma if loss_type=simpo = gamma
        accelerate_config = {STRATEGY}: zero1=zero1 zero2=zero2 zero3=zero3 fsdp1=fsdp2_train \
            fsdp2=fsdp2_train multi_gpu=ddp single_gpu=ddp
    """
    ),
    "dataset_mixture": handbook_mixture,
    "dataset_mixer": handbook_mixer,
    "dataset_name": named_dataset,
    "datasets": mixture,
    "num_processes": processes,
    "f_alpha_divergence_coef": alpha,
}  # fmt: skip

UNIQUE = [key for key, trainers in trl_versions.owners().items()
          if len(trainers) == 1 and trainers <= set(TRAINERS)]  # fmt: skip
PEER = Peer(
    "trl",
    RULES,
    version="1.10",
    trainers=TRAINERS,
    derived={TRAINER: trainer, ERA: era},
    # Before 0.29, and in orpo.py and cpo.py, the router loss depends on config.json: it is on
    # with output_router_logits, which is false in Mixtral's. PEFT chooses q_proj and v_proj
    # for these families, and other layers for others. accelerate's files start 8 processes.
    defaults=HF_DEFAULTS + """
        learning_rate=1e-6 if (trainer)=dpo or kto or orpo or cpo if (era)=new
        learning_rate=2e-5 if (trainer)=sft if (era)=new
        learning_rate=1e-4 if (trainer)=reward if (era)=new
        learning_rate=5e-7 if (trainer)=bco if (era)=new
        bf16=false if fp16 set
        bf16=true max_length=1024 logging_steps=10 if (era)=new
        (bf16)=none if (era)!=new if bf16=none if fp16 unset
        (max_length)=none if (era)!=new if max_length=none if max_seq_length unset
        (max_prompt_length)=none if (era)!=new if max_prompt_length=none if (trainer)!=sft or reward
        (ref_model_mixup_alpha)=none if (era)!=new if ref_model_mixup_alpha=none if \
            sync_ref_model set
        (truncation_mode)=none if (era)=between if truncation_mode=none
        truncation_mode=keep_end if (era)=old if (trainer)!=sft or reward
        truncation_mode=keep_start if (era)!=between
        f_alpha_divergence_coef=1.0 if (era)=old
        f_alpha_divergence_coef=0.5
        (loss)=none if (trainer)=none
        auto_insert_empty_system_msg=true if dataset_mixer set
        loss_type=kto if (trainer)=kto
        loss_type=sigmoid if (trainer)=dpo or cpo
        router_aux_loss_coef=0.001 if (trainer)=dpo or kto or sft if (era)=new if mixture \
            model_name_or_path
        router_aux_loss_coef=0.0 if (trainer)=orpo or cpo if model_name_or_path~Mixtral or mixtral
        cpo_alpha=1.0 simpo_gamma=0.5 if (trainer)=cpo
        beta=2.0 gamma_beta_ratio=0.25 if (trainer)=simpo
        beta=0.1 use_peft=false lora_r=16 lora_alpha=32
        (tower)=[] if vision model_name_or_path if use_peft unset
        num_processes=8 if accelerate_config=zero1 or zero2 or zero3 or fsdp1 or fsdp2 or multi_gpu
        lora_target_modules=[q_proj,v_proj] if model_name_or_path~Llama or llama or istral or \
            ixtral or Qwen or qwen or emma or SmolLM or ephyr
        (layers)=none if use_peft set if lora_target_modules=none
    """,
    marks=f"{' '.join(UNIQUE)} "
          "dataset_mixture dataset_mixer gamma_beta_ratio max_prompt_length generate_during_eval "
          "loss_weights precompute_ref_log_probs model_init_kwargs dataset_train_split use_peft "
          "truncation_mode f_alpha_divergence_coef use_weighting sync_ref_model "
          "ref_model_mixup_alpha ref_model_sync_steps discopop_tau lora_target_modules "
          "model_revision padding_free",
    whole="dataset_kwargs dataset_mixture dataset_mixer lr_scheduler_kwargs "
          "gradient_checkpointing_kwargs fsdp_config deepspeed",
    always=(
        "Rows of plain text: TRL adds no chat template to them; we apply the tokenizer's own, "
        "where it has one.",
        "TRL scores all that follows the prompt, the line end after the last end-of-turn token "
        "too; we score the last answer up to its end-of-turn token.",
        "`sft` and `aot` depend on micro-batches in TRL; here they count over the whole step.",
        "The order of the pairs is another one.",
        "`from rather.trl import DPOConfig, DPOTrainer` trains on TRL's tokens, in TRL's order.",
    ),
)  # fmt: skip
