"""TRL: a config as YAML or JSON. Scripts run with `rather.trl` instead.

Facts of TRL 1.10 (trl/trainer, trl/experimental), or of the last version that has all keys of a
file (trl_versions.py). Recipes of the alignment handbook and of SimPO are read as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rather.tools.migrate.engine import TRAINER, Peer
from rather.tools.migrate.peers import trl_versions
from rather.tools.migrate.peers.shared import (
    DTYPES,
    HELD_OUT,
    HF,
    HF_DEFAULTS,
    READABLE,
    STRATEGY,
    adapter,
    address,
    dataset,
    devices,
    length,
    processes,
)
from rather.tools.migrate.rules import (
    CHANGED,
    KTO,
    MISSING,
    NEEDLESS,
    NOT_NEEDED,
    OPEN,
    REWARD,
    SFT,
    UNSET,
    Given,
    Outcome,
    Rules,
    Unsupported,
    algorithm,
    converted,
    defaults,
    facts,
    gives,
)

VERSIONS, OLD, UNCERTAIN = "(versions)", "(old)", "(defaults)"
LAST_OLD = "0.28"  # 0.29 changed DPOConfig's meaning
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")  # in 1.x; before also sigmoid
BCO: dict[str, str] = {"task": "unpaired", "pref_loss": "bco"}
SIMPO = "simpo"  # the authors' own trainer
# What each trainer of TRL trains; None: loss_type says it.
TRAINERS: dict[str, str | dict[str, str] | None] = {
    "dpo": None, "orpo": "orpo", "cpo": None, "kto": KTO, "bco": BCO, "sft": SFT, "reward": REWARD,
}  # fmt: skip
TRAINS = {**TRAINERS, SIMPO: "simpo"}
# Settings that decide a training and whose defaults changed; a file that does not set them has to
# be of versions that agree.
DECISIVE = ("learning_rate", "bf16", "max_length", "max_prompt_length", "truncation_mode")
HOW = "a file does not name its trainer; pass --trainer dpo (kto, orpo, ...)"
# Files of accelerate that TRL has: the strategy, and how many processes they start.
LAUNCHED = {name: (name, 8) for name in ("zero1", "zero2", "zero3")} | {
    "fsdp1": ("fsdp2_train", 8),
    "fsdp2": ("fsdp2_train", 8),
    "multi_gpu": ("ddp", 8),
    "single_gpu": ("ddp", 1),
}


def losses_of(given: Given) -> list[str]:
    losses = given.get("loss_type") or []
    return [str(name) for name in (losses if isinstance(losses, list) else [losses])]


def own_keys(given: Given) -> list[str]:
    return [key for key in given if not key.startswith("(")]


def trainer(given: Given) -> Any:
    """Return the trainer that alone has one of the keys."""
    if "gamma_beta_ratio" in given:
        return SIMPO
    return trl_versions.trainer_of(own_keys(given), losses_of(given)) or UNSET


def versions(given: Given) -> Any:
    """Return the versions that a file may be for: the newest, or all that have its keys."""
    name = given.get(TRAINER)
    if name is None:
        return UNSET
    if name == SIMPO:  # made from TRL 0.9
        return ["0.9"]
    among = trl_versions.versions()
    if "dataset_mixture" in given:  # the handbook needs trl>=0.19.1
        among = among[among.index("0.19") :]
    keys_of_trainer = trl_versions.keys_ever(name) | trl_versions.keys_ever(trl_versions.SHARED)
    keys = keys_of_trainer.intersection(own_keys(given))
    fitting = [version for version in trl_versions.versions_with(name, keys) if version in among]
    fitting = fitting or among
    return fitting[-1:] if fitting[-1] == trl_versions.HEAD else fitting


def is_old(given: Given) -> bool:
    order = trl_versions.versions()
    newest = given.get(VERSIONS, order)[-1]
    return order.index(newest) <= order.index(LAST_OLD)


def versioned(key: str) -> Callable[[Given], Any]:
    """Return the default of a setting, unless it differs between the versions of a file."""

    def default(given: Given) -> Any:
        if key == "bf16" and given.get("fp16"):
            return False
        names = [given[TRAINER]] if TRAINER in given else list(TRAINERS)
        among = given.get(VERSIONS, [trl_versions.HEAD])
        defaults = trl_versions.defaults_in(names, key, among)
        return defaults[0] if len(defaults) == 1 else UNSET

    return default


def uncertain(given: Given) -> Any:
    """Return the settings that a file leaves to defaults which differ between its versions."""
    if TRAINER not in given:
        return UNSET
    name, among = given[TRAINER], given[VERSIONS]
    keys = [*DECISIVE, *(("ref_model_mixup_alpha",) if given.get("sync_ref_model") else ())]
    unset = [key for key in keys if given.get(key) is None]
    set_by_others = {"bf16": "fp16", "max_length": "max_seq_length"}
    unset = [key for key in unset if not given.get(set_by_others.get(key, ""))]
    differing = [key for key in unset if len(trl_versions.defaults_in([name], key, among)) > 1]
    return differing or UNSET


def differ(value: Any, given: Given) -> Outcome:
    first, last = given[VERSIONS][0], given[VERSIONS][-1]
    note = (
        f"its default differs between TRL {first} and {last}, which have this file's keys; set it"
    )
    return Outcome(MISSING, note=note)


def label_smoothing(value: Any, given: Given) -> Outcome:
    names = losses_of(given) or ["sigmoid"]
    if not value:
        return NOT_NEEDED
    smoothed = (*SMOOTHED, "sigmoid") if given[OLD] else SMOOTHED
    if given.get(TRAINER) in ("cpo", SIMPO) or any(name in smoothed for name in names):
        return gives({"label_smoothing": value})
    lost = ", ".join(names)
    return gives({}, f"TRL 1.x ignores it for {lost}; set it in the YAML if you want it")


def truncation(value: Any, given: Given) -> Outcome:
    if value in (None, "keep_start"):
        note = (
            "rows whose last answer begins after max_length are dropped; TRL trains on their start"
        )
        is_sft = given.get(TRAINER) == "sft"
        return gives({"data.overlong": "truncate_response"}, note if is_sft else "")
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
    outcome = weights_dtype(value.get("dtype") or value.get("torch_dtype"), given)
    if lost := set(value) - {"dtype", "torch_dtype", "attn_implementation", "use_cache"}:
        raise Unsupported(f"{', '.join(sorted(lost))}: change the model's folder instead")
    return outcome


def named_dataset(value: Any, given: Given) -> Outcome:
    """Set the data; TRL evaluates on another split of the same data set."""
    outcome = dataset(value, given, split="dataset_train_split", config="dataset_config")
    is_local = str(value).endswith(READABLE)
    evaluates = str(given.get("eval_strategy", "no")) != "no"
    if not evaluates or is_local or given.get("test_split_size"):
        return outcome
    split = given.get("dataset_test_split") or "test"
    held_out = address(str(value), split, given.get("dataset_config"))
    held_out_file = held_out or f"{Path(str(value)).name}-{split}.jsonl"
    return Outcome(outcome.status, {**outcome.values, HELD_OUT: held_out_file}, outcome.note)


COLUMNS = {"prompt", "chosen", "rejected", "messages", "completion", "label"}
SOME_ROWS = "a random part of the rows; save them to a file of their own"


def handbook_mixture(value: Any, given: Given) -> Outcome:
    """Convert dataset_mixture of the alignment handbook: rows of several data sets."""
    entries = value["datasets"]
    names = []
    for entry in entries:
        if extra := set(entry) - {"id", "config", "split", "columns", "weight"}:
            raise Unsupported(f"{', '.join(sorted(extra))}: not a setting of a data set")
        if entry.get("weight", 1.0) not in (None, 1):
            raise Unsupported(f"{entry['id']}: weight {entry['weight']} is {SOME_ROWS}")
        if unread := set(entry.get("columns") or ()) - COLUMNS:
            raise Unsupported(f"{entry['id']}: the column {', '.join(sorted(unread))} is not read")
        config = entry.get("config") if entry.get("config") != "default" else None
        names.append(address(entry["id"], entry.get("split"), config) or entry["id"])
    outcome = dataset(names, given)
    values = dict(outcome.values)
    if given.get(TRAINER) == "sft" and all(
        entry.get("columns") == ["messages"] for entry in entries
    ):
        values["data.score"] = "assistant" if given.get("assistant_only_loss") else "all"
    if not value.get("test_split_size"):
        return Outcome(outcome.status, values, outcome.note)
    values["held_out.split"] = value["test_split_size"]
    note = "as many rows are held out, but others: the seeds draw differently"
    return Outcome(outcome.status if outcome.note else CHANGED, values, outcome.note or note)


def handbook_mixer(value: Any, given: Given) -> Outcome:
    """Convert dataset_mixer, the handbook's older form: a share of each data set, and splits."""
    shares = {name: share for name, share in value.items() if share != 1}
    if shares:
        raise Unsupported(f"{', '.join(shares)}: {SOME_ROWS}")
    splits = given.get("dataset_splits") or ["train", "test"]
    if odd := [split for split in splits if "train" not in split and "test" not in split]:
        raise Unsupported(f"the split {odd[0]} is neither train nor test")
    configs = given.get("dataset_configs") or [None] * len(value)
    files: dict[str, list[str]] = {"train": [], "test": []}
    for name, config in zip(value, configs, strict=True):
        for split in splits:
            kind = "train" if "train" in split else "test"
            files[kind].append(address(name, split, config) or name)
    outcome = dataset(files["train"], given)
    held_out = dataset(files["test"], given, HELD_OUT) if files["test"] else NOT_NEEDED
    values = {**outcome.values, **held_out.values}
    return Outcome(outcome.status, values, outcome.note)


def system_message(value: Any, given: Given) -> Outcome:
    """Report the empty system message that scripts with dataset_mixer add to rows."""
    template = str(given.get("chat_template") or "")
    if not value or (template and "system" not in template and "<|im_start|>" not in template):
        return NOT_NEEDED
    note = ("rows without a system message get an empty one if the chat template has system "
            "messages; add it to the rows and set auto_insert_empty_system_msg: false")  # fmt: skip
    return Outcome(MISSING, note=note)


def inline_template(value: Any, given: Given) -> Outcome:
    if not value:
        return NOT_NEEDED
    return Outcome(
        OPEN, {"global_template": "chat_template.jinja"}, "save the template to this file"
    )


def mixture(value: Any, given: Given) -> Outcome:
    if extra := {key for entry in value for key in entry} - {"path", "name", "split"}:
        raise Unsupported(f"{', '.join(sorted(extra))}: save the rows to a file of their own")
    names = [
        address(entry["path"], entry.get("split"), entry.get("name")) or entry["path"]
        for entry in value
    ]
    return dataset(names, given)


def launched(value: Any, given: Given) -> Outcome:
    """Translate accelerate's file of `trl dpo`; --num_processes replaces its processes."""
    strategy, count = converted(LAUNCHED, value)
    return gives({STRATEGY: strategy} | devices(given.get("num_processes") or count))


RULES: Rules = {
    **HF,
    **adapter(
        "lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save",
        "use_peft",
        False,
        None,
    ),
    **facts(
        """
        model_name_or_path = pretrain
        model_revision = model.revision
        trust_remote_code = model.trust_remote_code
        test_split_size = held_out.split
        chat_template_path ! name a template or a Jinja file: global_template
        eos_token ! change the tokenizer's folder instead
        use_weighting = use_weighting
        rpo_alpha = rpo_alpha; the NLL is a mean over all tokens of the step, whatever the \
            micro-batches
        max_prompt_length = data.max_prompt_length
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
        pad_to_multiple_of pad_token label_pad_token_id
        use_logits_to_keep activation_offloading ~
        packing ! a step has a number of full sequences there, here a number of pairs or answers; \
            set train_batch_size
        completion_only_loss = data.score: true=last false=all
        assistant_only_loss = data.score: true=assistant if set
        use_peft = model.lora_rank: false=none if use_peft!=true
        precompute_ref_log_probs = reference.cache.enabled: true=true false=true; the reference is \
            always computed once and kept on disk
        ref_model_mixup_alpha = ref_model_mixup_alpha if sync_ref_model=true
        ref_model_sync_steps = ref_model_sync_steps if sync_ref_model=true
        disable_dropout @ true; dropout is always off in preference training
        beta = beta if (trainer)!=sft|reward if loss_type!=sft|[sft]
        loss_type = pref_loss: kto=kto bco=bco apo_zero_unpaired=apo_zero_unpaired if (trainer)=kto
        loss_type = pref_loss: nll=sft chunked_nll=sft if (trainer)=sft
        loss_type = pref_loss: sigmoid=cpo simpo=simpo if (trainer)=cpo
        loss_type = pref_loss: sigmoid=simpo if (trainer)=simpo
        loss_type = pref_loss:: kto_pair=none bco_pair=bco_pair aot_pair=aot_unpaired \
            if (trainer)=dpo
        loss_type if (trainer)!=none ! this trainer has no such setting
        loss_type ~ its meaning depends on the trainer
        cpo_alpha = rpo_alpha if (trainer)=cpo if loss_type=simpo
        cpo_alpha = cpo_alpha if (trainer)=cpo
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
        dataset_test_name -
        (old) (versions) ~ shows which version of TRL the file is for
        loss_weights = loss_weights
        rpo_alpha = rpo_alpha
        ld_alpha = ld_alpha
        reference_free = reference_free
        desirable_weight = desirable_weight
        undesirable_weight = undesirable_weight
        center_rewards_coefficient = center_rewards_coefficient
        discopop_tau = discopop_tau if loss_type~discopop
        f_divergence_type = f_divergence_type: reverse_kl=reverse_kl forward_kl=forward_kl \
            js_divergence=js alpha_divergence=alpha
        router_aux_loss_coef = model.moe_aux_loss_coef; over all tokens of the step, not a mean of \
            micro-batches
        simpo_gamma = gamma if loss_type=simpo
    """
    ),
    TRAINER: algorithm(TRAINS),
    UNCERTAIN: differ,
    "(loss)": lambda value, given: Outcome(MISSING, note=HOW),
    "dataset_mixture": handbook_mixture,
    "dataset_mixer": handbook_mixer,
    "auto_insert_empty_system_msg": system_message,
    "chat_template": inline_template,
    "max_seq_length": length,
    "dtype": weights_dtype,
    "torch_dtype": weights_dtype,
    "model_init_kwargs": init_kwargs,
    "dataset_name": named_dataset,
    "datasets": mixture,
    "num_processes": processes,
    "accelerate_config": launched,
    "label_smoothing": label_smoothing,
    "f_alpha_divergence_coef": alpha,
    "max_length": length,
    "truncation_mode": truncation,
}

PEER = Peer(
    "trl",
    RULES,
    version="1.10",
    trainers=tuple(TRAINS),
    defaults={
        TRAINER: trainer, VERSIONS: versions, OLD: is_old, UNCERTAIN: uncertain, **HF_DEFAULTS,
        "(loss)": lambda given: UNSET if TRAINER in given else None,
        **{key: versioned(key) for key in (*DECISIVE, "logging_steps", "f_alpha_divergence_coef")},
        "auto_insert_empty_system_msg": lambda given: True if "dataset_mixer" in given else UNSET,
        # Before 0.29, and in orpo.py and cpo.py, the router loss depends on config.json: it is on
        # with output_router_logits, which is false in Mixtral's. PEFT chooses q_proj and v_proj
        # for these families, and other layers for others.
        **defaults("""
            loss_type=kto if (trainer)=kto
            loss_type=sigmoid if (trainer)=dpo|cpo
            router_aux_loss_coef=0.001 if (trainer)=dpo|kto|sft if (old)=false if mixture \
                model_name_or_path
            router_aux_loss_coef=0.0 if (trainer)=orpo|cpo if model_name_or_path~Mixtral|mixtral
            cpo_alpha=1.0 simpo_gamma=0.5 if (trainer)=cpo
            beta=2.0 gamma_beta_ratio=0.25 if (trainer)=simpo
            beta=0.1 use_peft=false lora_r=16 lora_alpha=32
            lora_target_modules=[q_proj,v_proj] \
                if model_name_or_path~Llama|llama|istral|ixtral|Qwen|qwen|emma|SmolLM|ephyr
        """),
    },
    marks=f"{' '.join(key for key, own in trl_versions.unique_keys().items() if own in TRAINERS)} "
          "dataset_mixture dataset_mixer gamma_beta_ratio max_prompt_length generate_during_eval "
          "loss_weights precompute_ref_log_probs model_init_kwargs dataset_train_split use_peft "
          "truncation_mode f_alpha_divergence_coef use_weighting sync_ref_model "
          "ref_model_mixup_alpha ref_model_sync_steps discopop_tau lora_target_modules "
          "model_revision padding_free",
    whole="dataset_kwargs dataset_mixture dataset_mixer model_init_kwargs "
          "lr_scheduler_kwargs gradient_checkpointing_kwargs fsdp_config accelerator_config "
          "deepspeed",
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
