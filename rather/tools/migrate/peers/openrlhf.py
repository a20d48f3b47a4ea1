"""OpenRLHF: the flags of openrlhf.cli.train_dpo, train_sft and train_rm.

Facts of 0.11 (openrlhf/cli), whose flags are in groups; and of 0.8, where they are not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rather.tools.migrate.engine import ALIASED, PROGRAM, Peer
from rather.tools.migrate.peers.shared import (
    HELD_OUT,
    SAMPLES,
    SCHEDULES,
    adapter,
    betas,
    bf16,
    dataset,
    length,
    run_folder,
    switches,
)
from rather.tools.migrate.rules import (
    NOT_NEEDED,
    RENAMED,
    REWARD,
    SFT,
    UNSET,
    Given,
    Outcome,
    Rule,
    Rules,
    Unsupported,
    defaults,
    facts,
    gives,
    names_of,
    pairs,
    to,
)

UNLIMITED = (100000000, 1000000)  # defaults of different versions


def schedule(value: Any, given: Given) -> Outcome:
    """Translate the schedule; a cosine ends at a share of the peak."""
    values: dict[str, Any] = {"training.lr_scheduler_type": SCHEDULES[value]}
    if value == "cosine_with_min_lr":
        values["training.lr_scheduler_kwargs.min_lr_rate"] = given["min_lr_ratio"]
    return gives(values)


def is_sft(given: Given) -> bool:
    return given.get(PROGRAM) == "train_sft"


def column(own: str) -> Rule:
    """Set the name of a column; without output_key, input_key names whole conversations."""

    def rule(value: Any, given: Given) -> Outcome:
        is_whole = is_sft(given) and not given.get("output_key")
        name = "messages" if is_whole else own
        return gives({f"data.columns.{name}": value}) if value and value != name else NOT_NEEDED

    return rule


def blended(value: Any, given: Given) -> Outcome:
    """Set the data. Before 0.7 the same data set is evaluated on another split."""
    if not given.get("train_split"):
        return dataset(value, given, split="dataset_split")
    trained_on = dataset(value, given, split="train_split")
    held_out = dataset(value, given, HELD_OUT, split="eval_split")
    if trained_on.status == RENAMED and str(trained_on.values[SAMPLES]).startswith("hf://"):
        return gives({**trained_on.values, **held_out.values})
    return trained_on


def most_rows(value: Any, given: Given) -> Outcome:
    """Limit the rows; OpenRLHF limits those of all data sets together."""
    if value is None or value in UNLIMITED:
        return NOT_NEEDED
    if len(names_of(given.get("dataset"))) > 1:
        raise Unsupported("the first rows of several data sets together; save them to one file")
    held_out = {"held_out.max_samples": None} if given.get("eval_dataset") else {}
    return gives({"data.max_samples": value, **held_out})


# The groups of 0.11, and the names of 0.8.
ALIASES = pairs("""
    ckpt.output_dir=save_path ckpt.save_steps=save_steps ckpt.save_hf=save_hf_ckpt
    ckpt.disable_ds=disable_ds_ckpt ckpt.path=ckpt_path ckpt.max_num=max_ckpt_num
    ckpt.max_mem=max_ckpt_mem ckpt.load_enable=load_checkpoint logger.logging_steps=logging_steps
    logger.wandb.key=use_wandb logger.wandb.org=wandb_org logger.wandb.group=wandb_group
    logger.wandb.project=wandb_project logger.wandb.run_name=wandb_run_name
    logger.tensorboard_dir=use_tensorboard eval.steps=eval_steps eval.dataset=eval_dataset
    eval.split=eval_split train.micro_batch_size=micro_train_batch_size
    train.batch_size=train_batch_size train.seed=seed train.max_epochs=max_epochs
    train.full_determinism_enable=full_determinism model.model_name_or_path=pretrain
    model.gradient_checkpointing_enable=gradient_checkpointing
    model.gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant model.beta=beta
    model.ipo_enable=ipo model.label_smoothing=label_smoothing model.aux_loss_coef=aux_loss_coef
    model.nll_loss_coef=nll_loss_coef model.pretrain_mode_enable=pretrain_mode
    model.margin_loss_enable=margin_loss model.compute_fp32_loss_enable=compute_fp32_loss
    model.loss_type=loss_type model.value_head_prefix=value_head_prefix
    ref.model_name_or_path=ref_pretrain ref.offload=ref_offload adam.lr=learning_rate
    adam.betas=adam_betas adam.eps=adam_eps adam.weight_decay=l2
    ds.use_universal_ckpt=use_ds_universal_ckpt ds.tensor_parallel_size=ds_tensor_parallel_size
    ds.ring_attn_head_stride=ring_head_stride ds.lora.rank=lora_rank ds.lora.alpha=lora_alpha
    ds.lora.target_modules=target_modules ds.lora.dropout=lora_dropout
""") | {
    f"{group}.{name}": name
    for group, names in {
        "ds": "deepcompile zero_stage param_dtype zpg adam_offload attn_implementation "
              "experts_implementation use_liger_kernel grad_accum_dtype overlap_comm "
              "ring_attn_size load_in_4bit packing_samples",
        "data": "disable_fast_tokenizer dataloader_num_workers dataset dataset_probs dataset_split "
                "max_samples prompt_key chosen_key rejected_key input_template apply_chat_template "
                "tokenizer_chat_template max_len multiturn input_key output_key",
    }.items() for name in names.split()
}  # fmt: skip


def precision(given: Given) -> Any:
    """Return bf16, the default of 0.11; without groups the version is not known."""
    return "bf16" if "bf16" not in given and given[ALIASED] else UNSET


RULES: Rules = {
    **adapter(
        "lora_rank lora_alpha lora_dropout target_modules modules_to_save", "lora_rank", 0, None
    ),
    **facts("""
        adam_eps = training.adam_epsilon
        beta = beta if (program)!=train_sft|train_rm
        loss_type @ sigmoid; the loss of pairs is -log sigmoid of the difference
        optim @ adam; the optimizer is AdamW
        ref_offload = reference.offload: true=on false=auto
        max_epochs = training.num_train_epochs
        multiturn = data.score: true=assistant false=last
        zero_stage = actor_train.strategy_args.strategy_name: 0=ddp 1=zero1 2=zero2 3=zero3
        eval_steps = eval_steps if >0
        load_checkpoint = resume_from_checkpoint: true=auto false=false
        ipo ! OpenRLHF's IPO sums log-probs, Rather's averages them: choose pref_loss, beta
        pretrain = pretrain
        ref_pretrain = reference.model_args.model_name_or_path
        chosen_key = chosen_key
        rejected_key = rejected_key
        label_smoothing = label_smoothing
        nll_loss_coef = rpo_alpha; a mean over the tokens of the step; prompt tokens are never in it
        learning_rate = training.learning_rate
        lr_warmup_ratio = training.warmup_ratio
        l2 = training.weight_decay
        max_norm = max_grad_norm
    gradient_checkpointing = model.disable_gradient_checkpointing: true=false false=true
    lora_rank = model.lora_rank: 0=none if lora_rank=0
    lora_rank = model.lora_rank
        train_batch_size = train_batch_size
        ds_tensor_parallel_size = strategy.tp_size
        ring_attn_size = strategy.cp_size
        param_dtype = model.dtype
        logging_steps = logging_steps
        max_ckpt_num = max_ckpt_to_keep
        seed = seed
        tokenizer_chat_template ! name a template or a Jinja file: global_template
        input_template ! write a Jinja file and name it: global_template
        pretrain_mode ! it trains on whole texts; write rows with prompt and completion
        aux_loss_coef = model.moe_aux_loss_coef; over all tokens of the step, not a mean of \
            micro-batches
        dataset_probs ! data_args.weights mixes files
        adam_offload ? strategy_name: zero2_cpu keeps the optimizer on the host
        use_ms ! names of ModelScope; save model and pairs to folders
        min_lr_ratio ~ lr_scheduler says it
        margin_loss ~ a column margin always counts
        value_head_prefix ~ the head is exported as transformers names it
        compute_fp32_loss ~ losses are always in float32 or better
        muon.* ~ used with --optim muon only
        micro_train_batch_size ~ micro-batches follow a token budget
        packing_samples ~ pairs are always packed
        flash_attn attn_implementation use_liger_kernel ~ Rather has its own attention and head
        ckpt_path save_hf_ckpt disable_ds_ckpt max_ckpt_mem use_ds_universal_ckpt overlap_comm zpg
        grad_accum_dtype disable_fast_tokenizer local_rank deepcompile dataset_split eval_split
        train_split wandb_org wandb_group wandb_project wandb_run_name disable_trace_cache
        full_determinism gradient_checkpointing_use_reentrant torch_compile ring_head_stride
        experts_implementation dataloader_num_workers ~
    """),
    **switches("use_wandb use_tensorboard"),
    "apply_chat_template": to("global_template", {True: "native", False: "none"}),
    "input_key": column("prompt"),
    "output_key": column("completion"),
    "dataset": blended,
    "eval_dataset": partial(dataset, path=HELD_OUT, split="eval_split"),
    "prompt_key": column("prompt"),
    "max_len": partial(
        length,
        cut="truncate_response",
        note="OpenRLHF writes EOS over the last token of a cut answer",
    ),
    "max_samples": most_rows,
    "lr_scheduler": schedule,
    "adam_betas": betas,
    "bf16": bf16,
    "save_path": run_folder,
    "save_steps": lambda value, given: gives(
        {"save_steps": value if value and value > 0 else None}
    ),
}

PEER = Peer(
    "openrlhf",
    RULES,
    version="0.11",
    programs={"train_dpo": "sigmoid", "train_sft": SFT, "train_rm": REWARD},
    aliases=ALIASES,
    defaults={
        **defaults("""
            max_len=2048 learning_rate=5e-6 max_epochs=2 multiturn=false input_key=input \
                if (program)=train_sft
            learning_rate=9e-6 if (program)=train_rm
            eval_split=test if (program)=train_dpo
            aux_loss_coef=0.0 if mixture pretrain
            max_len=512 learning_rate=1e-5 max_epochs=1 eval_split=train
            lr_scheduler=cosine_with_min_lr lr_warmup_ratio=0.03 min_lr_ratio=0.1
            adam_betas=[0.9,0.95] train_batch_size=128 beta=0.1 save_steps=-1 zero_stage=2
            lora_rank=0 lora_alpha=16 seed=42 apply_chat_template=false
        """),
        "param_dtype": precision,
        "input_template": lambda given: (
            "User: {}\nAssistant: "
            if is_sft(given) and not given.get("apply_chat_template")
            else UNSET
        ),
    },
    marks="micro_train_batch_size max_len zero_stage nll_loss_coef lr_warmup_ratio ref_pretrain "
    "packing_samples max_ckpt_num adam_offload",
    words=("openrlhf.",),
    secrets="use_wandb",
    always=(
        "OpenRLHF writes a space and EOS after each answer; here the chat template, or EOS alone, "
        "ends it.",
        "A step holds train_batch_size pairs on any number of devices.",
    ),
)
