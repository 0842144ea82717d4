"""Parameters of training_hub 0.11 by function, and what each becomes.

Calls, the page and the tests follow this table.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from forge.hub import _values as v
from forge.hub._parameter import REQUIRED, Parameter, hidden, refused, required, same

NO_CODE = "no code of a model is run. Leave it out; a model whose architecture transformers has needs none"
SAVED = "a signal saves the state in any case, and the same command resumes. Leave it out"
SAMPLER = "completions come from the model that trains, on its own devices. Leave it out"

TORCHRUN = (
    *same("nproc_per_node nnodes"),
    Parameter("node_rank", "node_rank", "beside `rdzv_endpoint` node 0 listens there, as with torchrun's static rendezvous"),
    Parameter("rdzv_id", "rdzv_id", take=v.rdzv_id),
    *same("rdzv_endpoint master_addr master_port"),
)
WANDB = same("wandb_project wandb_entity wandb_run_name")
MLFLOW = same("mlflow_tracking_uri mlflow_experiment_name mlflow_run_name")
TENSORBOARD = same("tensorboard_log_dir")
ADAMW = same("beta1 beta2 eps weight_decay")
KEYWORDS = (
    Parameter(
        "callbacks",
        "callbacks",
        "`TrainingHubCallback` objects, which keep their state here, or forge's own; they cannot stop a run",
    ),
    Parameter(
        "enable_jit_checkpoint",
        "",
        "a signal saves, and ends with status 75; refused beside another backend",
        neutral=(True,),
        refused=SAVED,
    ),
    Parameter("checkpoint_storage", "checkpoint_storage", "a directory of this run's own; exports are copied too"),
)
PRETRAINING = (
    Parameter("is_pretraining", "", "with `block_size`", take=v.is_pretraining),
    Parameter("block_size", "block_size", "with `is_pretraining`", take=v.block_size),
    Parameter(
        "document_column_name",
        "rename_columns",
        "with `is_pretraining`; documents in `document` or `text` are found",
        take=v.document_column_name,
    ),
)
MAX_SEQ_LEN = Parameter(
    "max_seq_len", "max_seq_len", "a sample of exactly so many tokens is kept, and so are rows below 20", take=v.max_seq_len
)
DATA_OUTPUT_DIR = Parameter(
    "data_output_dir",
    "",
    "tokens lie in `ckpt_output_dir`/data; another folder is said to have no effect",
    take=v.data_output_dir,
)
LIGER = Parameter("use_liger", "kernels", "true is `kernels=liger`; logits are never held whole in any case", take=v.use_liger)
TRUST = Parameter("trust_remote_code", "", "no code of a model is run", neutral=(False,), refused=NO_CODE)

# Arguments of instructlab-training's TrainingArgs, which its `sft` passes on.
INSTRUCTLAB = hidden(
    (
        Parameter("max_batch_len", "max_tokens_per_gpu"),
        Parameter("adamw_betas", "beta1, beta2", take=v.adamw_betas),
        Parameter("adamw_eps", "eps"),
        Parameter("adamw_weight_decay", "weight_decay"),
        Parameter("random_seed", "seed"),
        Parameter("chat_tmpl_path", "chat_template", "a Jinja file; a Python module is refused", take=v.chat_tmpl_path),
        Parameter("data_process_num_cpu_procs", "num_proc"),
        Parameter("disable_flash_attn", "attention", "true is `attention=documents`", take=v.disable_flash_attn),
        Parameter("process_data", "data_format", "false is `data_format=tokenised`", take=v.process_data),
        Parameter("validation_frequency", "eval_every_steps"),
        Parameter("on_demand_checkpointing", "", "", neutral=(True,), refused=SAVED),
        Parameter(
            "is_padding_free",
            "",
            "always so",
            neutral=(True,),
            refused="nothing is padded, and nothing is lost by it. Leave it out",
        ),
        LIGER,
        TRUST,
        *refused(
            "use_legacy_tmpl use_dolomite mock_data mock_data_len log_level",
            "there is nothing of the kind. Leave it out",
            neutral=(False,),
        ),
        *refused("lora", "call lora_sft(lora_r=..., lora_alpha=...)"),
        *refused(
            "distributed_backend fsdp_options deepspeed_options",
            "choose strategy (ddp, fsdp2, hsdp, zero1, zero2, zero3); cpu_offload belongs to it",
        ),
        *refused("pretraining_config", "give is_pretraining=True with block_size and document_column_name"),
    )
)

SFT = (
    *required("model_path data_path ckpt_output_dir"),
    Parameter("backend", "backend", "`forge` unless `instructlab-training` is asked for", default="forge"),
    Parameter("num_epochs", "num_epochs", "1 where it is left out"),
    *same("effective_batch_size learning_rate"),
    MAX_SEQ_LEN,
    Parameter("max_tokens_per_gpu", "max_tokens_per_gpu", "chosen for the device where it is left out; the loss is the same"),
    DATA_OUTPUT_DIR,
    Parameter("save_samples", "save_samples", "counts exactly, whatever the batch size"),
    *same("warmup_steps"),
    Parameter(
        "accelerate_full_state_at_epoch",
        "accelerate_full_state_at_epoch",
        "states are saved every 30 minutes and on a signal too; refused beside another backend",
    ),
    Parameter("checkpoint_at_epoch", "checkpoint_at_epoch", "true where it is left out, as there; false in `forge.sft`"),
    *PRETRAINING,
    *ADAMW,
    *TORCHRUN,
    *WANDB,
    *TENSORBOARD,
    *MLFLOW,
    *KEYWORDS,
    *INSTRUCTLAB,
)

OSFT = (
    *required("model_path data_path unfreeze_rank_ratio effective_batch_size max_tokens_per_gpu"),
    attrs.evolve(MAX_SEQ_LEN, default=REQUIRED),
    *required("learning_rate ckpt_output_dir"),
    DATA_OUTPUT_DIR,
    Parameter("backend", "backend", "`forge` unless `mini-trainer` is asked for", default="forge"),
    Parameter("target_patterns", "target_modules"),
    *same("seed"),
    LIGER,
    Parameter(
        "use_processed_dataset",
        "data_format",
        "true is `data_format=tokenised`; such rows are recognised in any case",
        take=v.use_processed_dataset,
    ),
    Parameter(
        "unmask_messages", "train_on", "true is `train_on=all`; a row's own `unmask` is read too", take=v.unmask_messages
    ),
    *PRETRAINING,
    Parameter("lr_scheduler", "lr_scheduler", "`constant_with_warmup` is `constant`", take=v.lr_scheduler),
    *same("warmup_steps"),
    Parameter(
        "lr_scheduler_kwargs",
        "min_lr_ratio, decay_steps, power, num_cycles",
        "`min_lr` and `lr_end` become a share of `learning_rate`; other names are refused",
        take=v.lr_scheduler_kwargs,
    ),
    *ADAMW,
    *same("checkpoint_at_epoch"),
    Parameter(
        "save_final_checkpoint",
        "",
        "always so",
        neutral=(True,),
        refused="a run ends with its model, which is its result. Leave it out",
    ),
    Parameter("num_epochs", "num_epochs", "1 where it is left out"),
    # Its port comes before its address here.
    *TORCHRUN[:-2],
    *TORCHRUN[:-3:-1],
    *WANDB,
    *TENSORBOARD,
    *MLFLOW,
    TRUST,
    *KEYWORDS,
    *hidden(
        (
            Parameter("osft", "", "", neutral=(True,), refused="call sft to train every weight"),
            Parameter("on_demand_checkpointing", "", "", neutral=(True,), refused=SAVED),
            Parameter("validation_frequency", "eval_every_steps"),
            *refused("training_mode", "max_steps, max_tokens or num_epochs say how long; num_epochs=float('inf') never ends"),
        )
    ),
)

LORA = (
    *required("model_path data_path ckpt_output_dir"),
    Parameter("backend", "backend", "`unsloth`, its default there, is forge's own loop too", default="forge"),
    Parameter("lora_r", "lora_r", "16 where it is left out"),
    Parameter("lora_alpha", "lora_alpha", "32 where it is left out"),
    *same("lora_dropout target_modules"),
    Parameter("num_epochs", "num_epochs", "3 where it is left out"),
    Parameter(
        "effective_batch_size",
        "effective_batch_size",
        "else `micro_batch_size` × `gradient_accumulation_steps` × GPUs",
        take=v.elsewhere,
    ),
    Parameter(
        "micro_batch_size",
        "effective_batch_size",
        "2 where it is left out; refused beside `effective_batch_size`",
        take=v.elsewhere,
    ),
    Parameter(
        "gradient_accumulation_steps",
        "effective_batch_size",
        "1 where it is left out; refused beside `effective_batch_size`",
        take=v.elsewhere,
    ),
    Parameter("learning_rate", "learning_rate", "2e-4 where it is left out"),
    Parameter(
        "max_seq_len",
        "max_seq_len",
        "2048 where it is left out; longer rows are dropped and counted, `on_overflow=truncate` cuts them as there",
    ),
    Parameter("lr_scheduler", "lr_scheduler", "`linear` where it is left out", take=v.lr_scheduler),
    Parameter("warmup_steps", "warmup_steps", "10 where it is left out"),
    Parameter("load_in_4bit", "adapter", "true is `adapter=qlora`", take=v.elsewhere),
    Parameter("load_in_8bit", "quant_type", "true is `adapter=qlora` with `quant_type=int8`", take=v.eight_bits),
    Parameter("bnb_4bit_quant_type", "quant_type", take=v.four_bits("bnb_4bit_quant_type", "quant_type")),
    Parameter("bnb_4bit_compute_dtype", "dtype", take=v.bnb_4bit_compute_dtype),
    Parameter("bnb_4bit_use_double_quant", "double_quant", take=v.four_bits("bnb_4bit_use_double_quant", "double_quant")),
    Parameter(
        "flash_attention",
        "attention",
        "true is what `attention=auto` takes where it can; false is `attention=documents`",
        take=v.flash_attention,
    ),
    Parameter("sample_packing", "packing", "false is `packing=off`; the loss is the same", take=v.sample_packing),
    Parameter("bf16", "dtype", "chosen for the device where it is left out; false is `dtype=float32`", take=v.bf16),
    *refused("fp16", "float16 overflows without a scaled loss: bf16=True, or dtype=float32", neutral=(False,)),
    *refused("tf32", "the precision of float32 products is the device's own: bf16=True is faster", neutral=(False,)),
    Parameter("save_steps", "full_state_every_steps", "500 where it is left out; exports are made with `save_samples`"),
    Parameter("eval_steps", "eval_every_steps", "500 where it is left out, with `eval_data_path`", take=v.eval_steps),
    *same("logging_steps"),
    Parameter("save_total_limit", "keep_last_n", "3 where it is left out"),
    *WANDB,
    *TENSORBOARD,
    *MLFLOW,
    Parameter(
        "dataset_type",
        "data_format",
        "recognised from the rows where it is left out; `chat_template` is `messages`",
        take=v.dataset_type,
    ),
    Parameter("field_messages", "rename_columns", take=v.renamed("messages")),
    Parameter("field_instruction", "rename_columns", take=v.renamed("instruction")),
    Parameter("field_input", "rename_columns", take=v.renamed("input")),
    Parameter("field_output", "rename_columns", take=v.renamed("output")),
    *TORCHRUN,
    *refused(
        "enable_model_splitting",
        "strategy=fsdp2 divides a model over GPUs, and cpu_offload=True keeps its rest in memory",
        neutral=(False,),
    ),
    *refused(
        "finetune_vision_layers",
        "the language part trains, on images too; freeze_vision_tower=False of forge.sft trains the tower",
        neutral=(False,),
    ),
    Parameter(
        "finetune_language_layers", "", "", neutral=(True,), refused="forge.sft has freeze_language_model=True. Leave it out"
    ),
    TRUST,
    *KEYWORDS[:1],
    *same("eval_data_path"),
    *refused(
        "per_device_eval_batch_size",
        "an evaluation does not depend on a batch size; micro-batches follow from max_tokens_per_gpu",
    ),
    *KEYWORDS[1:],
    *hidden(
        (
            Parameter("use_rslora", "adapter", "true is `adapter=rslora`", take=v.elsewhere),
            Parameter("use_dora", "adapter", "true is `adapter=dora`", take=v.elsewhere),
            Parameter("weight_decay", "weight_decay", "0.01 where it is left out"),
            Parameter("max_grad_norm", "max_grad_norm", "0.3 where it is left out"),
            *refused("init_lora_weights", "set init_lora_weights of forge.sft", neutral=(True,)),
        )
    ),
)

_GRPO_DATA = (
    Parameter(
        "data_path", "data_path", "traces with tool calls are divided into one prompt a call; with `reward_fn` rows are prompts"
    ),
    *(
        Parameter(n, "", "every row is taken", default=d, neutral=(d,), refused="shorten the file: every row is taken")
        for n, d in (("data_config", "Qwen3"), ("n_train", 5000), ("n_val", 500))
    ),
)
_GRPO_RUN = (
    Parameter(
        "num_iterations",
        "num_epochs, max_steps",
        'epochs, as its verl has them; with `backend="art"` steps',
        default=15,
        take=v.num_iterations,
    ),
    Parameter("group_size", "num_generations", default=8),
    Parameter("prompt_batch_size", "effective_batch_size", default=100),
    Parameter("learning_rate", "learning_rate", "constant, as there", default=1e-5),
    Parameter("temperature", "temperature", default=0.7),
    Parameter("max_tokens", "max_new_tokens", default=512),
    Parameter("max_prompt_length", "max_prompt_len", default=16384),
)
_REWARD = Parameter(
    "reward_fn",
    "reward",
    "a name, `module:function`, of a function of lists; by default tool calls are compared",
    take=v.reward_fn,
)
_GRPO_DEVICES = (
    Parameter("gpu_memory_utilization", "", "no second engine samples", default=0.45, neutral=(0.45,), refused=SAMPLER),
)
_GRPO_NODES = (
    Parameter("n_gpus", "nproc_per_node", default=1),
    Parameter("nnodes", "nnodes", default=1, take=v.nnodes),
    Parameter("tensor_parallel_size", "", "no second engine samples", default=1, neutral=(1,), refused=SAMPLER),
    Parameter(
        "use_dr_grpo",
        "loss_type, scale_rewards, kl_weight",
        "false is `loss_type=grpo` with `kl_weight=0.01`",
        default=True,
        take=v.use_dr_grpo,
    ),
)
_ITERATION = refused("iteration_callback", "callbacks=[...] has objects with on_step, on_evaluation and on_end")

GRPO = (
    *required("model_path ckpt_output_dir"),
    *_GRPO_DATA,
    _REWARD,
    *_GRPO_RUN,
    *_GRPO_DEVICES,
    *_GRPO_NODES,
    *_ITERATION,
    *WANDB,
    *MLFLOW,
    *hidden((Parameter("backend", "backend", "`verl`, its own there, is forge's own loop too"), *KEYWORDS)),
)
LORA_GRPO = (
    *required("model_path ckpt_output_dir"),
    *_GRPO_DATA,
    *refused("rollout_fn tasks", "completions answer prompts; episodes of several turns are `env` of `forge.grpo`"),
    _REWARD,
    *_GRPO_RUN,
    Parameter("concurrency", "", "completions are sampled in batches that fit", default=32, neutral=(32,), refused=SAMPLER),
    Parameter("lora_r", "lora_r", default=16),
    Parameter("lora_alpha", "lora_alpha", default=8),
    *same("target_modules"),
    Parameter("max_grad_norm", "max_grad_norm", default=0.1),
    *_GRPO_DEVICES,
    Parameter("max_lora_rank", "", "no second engine samples", take=v.max_lora_rank),
    Parameter("enforce_eager", "", "no second engine samples", default=False, neutral=(False,), refused=SAMPLER),
    *_GRPO_NODES,
    Parameter(
        "backend", "backend", "`art` and `verl` are forge's own loop, and say what `num_iterations` counts", default="verl"
    ),
    *_ITERATION,
    *WANDB,
    *MLFLOW,
    *hidden(KEYWORDS),
)

EMBEDDING = (
    *required("model_path data_path ckpt_output_dir"),
    Parameter("backend", "backend", "`sentence-transformers`, its own there, is forge's own loop too", default="forge"),
    Parameter(
        "loss_type",
        "loss",
        "`batch_all_triplet`, or `mnrl` (`loss=contrastive`, rows are pairs); `batch_hard_triplet` is refused",
        default="batch_all_triplet",
        take=v.loss_type,
    ),
    *refused("loss_fn", "a loss is named: loss_type='batch_all_triplet' or 'mnrl'; forge_algos takes an objective of yours"),
    Parameter("num_epochs", "num_epochs", default=20),
    Parameter("batch_size", "effective_batch_size", "of a step over all GPUs, all of whose texts meet", default=32),
    Parameter("learning_rate", "learning_rate", "linear, as there", default=2e-5),
    Parameter("warmup_ratio", "warmup_ratio", "a tenth of the steps where it is left out, as there"),
    Parameter(
        "batch_sampler",
        "exclude_same_text",
        "with `mnrl` `no_duplicates` (its own there) is true and `default` false; `group_by_label` is refused: the texts of a "
        "step are drawn from all rows",
        take=v.batch_sampler,
    ),
    Parameter("eval_data_path", "eval_data_path", "measured before and after; `eval_every_steps` says when else"),
    Parameter("text_column", "rename_columns", default="text", take=v.labelled_column("text")),
    Parameter("label_column", "rename_columns", default="label", take=v.labelled_column("label")),
    Parameter("seed", "seed", default=42),
)

FUNCTIONS: Mapping[str, tuple[Parameter, ...]] = {
    "sft": SFT,
    "osft": OSFT,
    "lora_sft": LORA,
    "lora_grpo": LORA_GRPO,
    "grpo": GRPO,
    "embedding_sft": EMBEDDING,
}
"""Function of training_hub → its parameters, in the order of its signature."""

REFUSED: Mapping[str, str] = {
    "gepa": "gepa trains no weights: it searches for a prompt with calls of a language model. Use the package gepa itself; its "
    "best prompt is then a system message of rows for forge.sft, which needs no prompt any more once it is trained.",
}
"""Function of training_hub → why there is none here, and what to use."""

SWITCHES = frozenset(
    """is_pretraining unmask_messages use_processed_dataset process_data disable_flash_attn sample_packing bf16 load_in_4bit
    load_in_8bit flash_attention use_liger use_rslora use_dora use_dr_grpo""".split()
)
"""Parameters that are True or False."""
