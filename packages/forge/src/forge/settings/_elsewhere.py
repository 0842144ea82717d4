"""Names of other libraries → what each is here.

The libraries are TRL, Axolotl, LLaMA-Factory, training_hub, mini-trainer, instructlab-training, Unsloth, torchtune, ms-swift,
verl and OpenRLHF. One table for three readers: the refusal of an unknown setting (`hint`), `forge config convert`, and the test
that holds the pages of docs/migrating to it. A name that means the same here and there is in none of its parts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from forge.settings._origin import origin_note
from forge.settings._own import OWN

NEAR = 0.75
"""Least similarity (difflib's ratio) of a name that is offered for another."""

RENAMED = {
    theirs: here
    for here, names in {
        "model_path": """model model_id model_name model_name_or_path base_model pretrained_model_name_or_path
            partial_pretrain pretrain""",
        "data_path": "dataset datasets dataset_name train_dataset train_file train_files prompt_data",
        "eval_data_path": "eval_dataset dataset_val test_datasets validation_data_path val_dataset val_files",
        "data_format": "format",
        "add_tokens": "tokens",
        "ckpt_output_dir": "output_dir default_local_dir save_path",
        "validation_split": "val_set_size val_size split_dataset_ratio",
        "num_proc": "dataset_num_proc dataset_processes preprocessing_num_workers data_process_num_cpu_procs",
        "max_seq_len": "max_length max_seq_length sequence_len cutoff_len max_len",
        "chat_template": "chat_template_path chat_template_jinja chat_tmpl_path",
        "train_on_turn_end": "train_on_eos train_on_eot",
        "system_prompt": "default_system default_system_message new_system_prompt system",
        "num_epochs": "num_train_epochs max_epochs epochs total_epochs num_episodes",
        "effective_batch_size": "batch_size train_batch_size prompt_batch_size rollout_batch_size",
        "max_tokens_per_gpu": "max_batch_len ppo_max_token_len_per_gpu",
        "learning_rate": "lr actor_learning_rate",
        "lr_scheduler": "lr_scheduler_type",
        "min_lr_ratio": "cosine_min_lr_ratio",
        "warmup_steps": "num_warmup_steps lr_warmup_steps",
        "optimizer": "optim",
        "weight_decay": "adamw_weight_decay l2",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "eps": "adam_epsilon adamw_eps",
        "seed": "random_seed random_state",
        "shuffle": "shuffle_dataset dataset_shuffle train_dataloader_shuffle",
        "label_smoothing": "label_smoothing_factor dpo_label_smoothing",
        "neftune_alpha": "neftune_noise_alpha noisy_embedding_alpha",
        "lora_r": "r lora_rank",
        "init_lora_weights": "peft_init_lora_weights init_weights",
        "adapter_path": "adapter_name_or_path lora_model_dir adapters lora_adapter_path",
        "loraplus_lr_ratio": "lora_plus_lr_ratio lorap_lr_ratio",
        "target_modules": """lora_target lora_target_modules lora_target_parameters oft_target lora_attn_modules
            target_patterns osft_target_patterns""",
        "modules_to_save": "lora_modules_to_save additional_target",
        "quant_type": "bnb_4bit_quant_type quantization_type",
        "double_quant": "bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant",
        "unfreeze_rank_ratio": "osft_unfreeze_rank_ratio",
        "attention": "attn_implementation flash_attn attn_impl",
        "activation_checkpointing": """gradient_checkpointing use_gradient_checkpointing enable_activation_checkpointing
            enable_gradient_checkpointing""",
        "activation_offloading": "enable_activation_offloading",
        "cpu_offload": "fsdp_cpu_offload param_offload optimizer_offload adam_offload",
        "max_grad_norm": "clip_grad_norm grad_clip max_norm",
        "logging_steps": "log_every_n_steps",
        "shard_size": "dp_shard_size data_parallel_shard_dim",
        "tp_size": """tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_degree tensor_parallel_dim""",
        "ep_size": "expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_degree",
        "cp_size": """context_parallel_size context_parallel_degree cp_degree sequence_parallel_degree context_parallel_dim
            sequence_parallel_size ulysses_sequence_parallel_size""",
        "eval_every_steps": "eval_steps validation_frequency run_val_every_n_steps test_freq",
        "eval_at_epoch": "validate_at_epoch",
        "metric_for_best": "metric_for_best_model",
        "keep_best": "load_best_model_at_end save_best_val_loss",
        "early_stopping_patience": "early_stopping_steps early_stop_interval",
        "save_samples": "min_samples_per_checkpoint",
        "keep_last_n": "save_total_limit",
        "trackers": "report_to",
        "wandb_run_name": "wandb_name experiment_name",
        "resume": "resume_from_checkpoint auto_resume_from_checkpoints",
        "beta": "rl_beta pref_beta orpo_alpha",
        "gamma": "simpo_gamma",
        "loss_type": "pref_loss dpo_loss_type loss_mode policy_loss_type",
        "loss_weights": "dpo_loss_weights",
        "f_divergence": "f_divergence_type",
        "f_divergence_alpha": "f_alpha_divergence_coef",
        "wpo": "use_weighting dpo_use_weighting",
        "reference_sync_steps": "ref_model_sync_steps",
        "reference_mixup": "ref_model_mixup_alpha",
        "desirable_weight": "kto_desirable_weight kto_chosen_weight desirable_loss_weight",
        "undesirable_weight": "kto_undesirable_weight kto_rejected_weight undesirable_loss_weight",
        "reference_path": "ref_model ref_model_name_or_path ref_pretrain",
        "centering": "center_rewards_coefficient",
        "reward": "reward_funcs reward_fn remote_rm_url",
        "reward_model_path": "reward_model reward_pretrain",
        "num_generations": "group_size n_samples_per_prompt",
        "env": "environment_factory",
        "sampler_url": "vllm_server_base_url",
        "tis_cap": "vllm_importance_sampling_cap rollout_importance_sampling_threshold",
        "off_policy_mask_threshold": "off_policy_sequence_mask_delta",
        "sapo_temperature_pos": "tau_pos",
        "sapo_temperature_neg": "tau_neg",
        "teacher_path": "teacher_model teacher_model_name_or_path",
        "on_policy": "lmbda",
        "value_weight": "vf_coef",
        "value_clip": "cliprange_value",
        "add_special_tokens": "new_special_tokens",
        "rename_columns": "columns",
        "max_new_tokens": """max_completion_length max_tokens_per_completion response_length max_response_length
            generate_max_len""",
        "kl_weight": "kl_coef kl_loss_coef init_kl_coef",
        "kl_cov_coef": "ppo_kl_coef",
        "kl_target": "target_kl",
        "kl_horizon": "horizon",
        "clip": "epsilon cliprange clip_range clip_ratio clip_ratio_low eps_clip",
        "clip_high": "epsilon_high clip_ratio_high",
        "dual_clip": "delta clip_ratio_c",
        "router_aux_loss_coef": "moe_aux_loss_coef aux_loss_coef",
        "max_samples": "max_train_samples train_max_samples",
        "freeze_vision_tower": "freeze_vit",
        "freeze_multi_modal_projector": "freeze_aligner",
        "freeze_language_model": "freeze_llm",
        "overlong_buffer": "soft_punish_cache overlong_buffer_len soft_cache_length",
        "max_resamples": "max_num_gen_batches max_resample_times",
        "mask_truncated": "mask_truncated_completions overlong_filter",
        "num_iterations": "ppo_epochs num_ppo_epochs",
        "max_prompt_len": "max_prompt_length prompt_max_len",
        "warmup_ratio": "lr_warmup_steps_ratio lr_warmup_ratio",
        "max_steps": "total_training_steps",
        "kl_in_reward": "use_kl_in_reward",
        "entropy_coef": "entropy_coeff entropy_loss_coef",
        "lam": "lambd",
        "scale_rewards": "norm_adv_by_std_in_grpo",
        "wandb_project": "project_name",
        "chat_template_kwargs": "apply_chat_template_kwargs",
    }.items()
    for theirs in names.split()
}
"""Name elsewhere → setting of the same meaning."""

SECOND = {"freeze_vit": "freeze_audio_tower"}
"""Name elsewhere that is two settings here → the second of them."""
ALSO = {"beta": "kl_weight", "loss_type": "loss"}
"""Setting here, which elsewhere is the name of another too → that other, of verbs that have not the first."""

_WRITES = {
    **dict.fromkeys(("output_dir", "ckpt_output_dir", "export_dir", "outfile"), "output"),
    **dict.fromkeys(("quantization", "quantize", "quantization_method", "outtype"), "dtype"),
}
"""Names elsewhere → what each is of a command that writes its `output`; a type where it also has a `format`."""

SWITCHES = {
    "load_in_4bit": "adapter=qlora",
    "use_dora": "adapter=dora",
    "peft_use_dora": "adapter=dora",
    "use_rslora": "adapter=rslora",
    "peft_use_rslora": "adapter=rslora",
    "use_peft": "adapter=lora",
    "use_lora": "adapter=lora",
    "lora": "adapter=lora",
    "qlora": "adapter=qlora",
    "pissa_init": "init_lora_weights=pissa",
    "use_muon": "optimizer=muon",
    "use_apollo": "optimizer=apollo",
    "use_dft_loss": "loss=dft",
    "enable_dft_loss": "loss=dft",
    "train_on_inputs": "train_on=all",
    "train_on_input": "train_on=all",
    "train_on_prompt": "train_on=all",
    "unmask_messages": "train_on=all",
    "mask_history": "train_on=last",
    "disable_shuffling": "shuffle=false",
    "curriculum_sampling": "shuffle=false",
    "precompute_ref_log_probs": "reference=stored",
    "sync_ref_model": "reference=moving",
    "use_bias_correction_kl": "kl_estimator=unbiased",
    "dynamic_sample": "on_equal_rewards=resample",
    "dynamic_sampling": "on_equal_rewards=resample",
    "filter_groups": "on_equal_rewards=resample",
    "dynamic_filtering": "on_equal_rewards=resample",
    "torch_compile": "compile=blocks",
    **dict.fromkeys(
        ("use_liger", "use_liger_kernel", "use_liger_kernels", "enable_liger_kernel"),
        "kernels=liger",
    ),
}
"""Switch elsewhere → setting that is as if it were on."""

_STEP = "effective_batch_size is the samples of a whole step over all GPUs; micro-batches follow from max_tokens_per_gpu"
_SAVING = "save_samples exports a model, full_state_every_steps saves what resuming needs"
_SHARDING = (
    "choose strategy (ddp, fsdp2, hsdp, zero1, zero2, zero3); cpu_offload, shard_size, tp_size, cp_size, ep_size belong to it"
)
_SCHEDULE = "min_lr_ratio, decay_steps, power and num_cycles are settings of their own"
_ALWAYS_ON = "nothing to set; it is done, or not needed"
_KERNELS = "logits are never held whole, so there is no such kernel to switch on"
_NO_CODE = "refused on purpose: no code of a model is run"
_OFF = "not available"
NOT_NEEDED = """remove_unused_columns dataloader_num_workers dataloader_pin_memory save_final_checkpoint save_safetensors
    do_train do_eval overwrite_cache plot_loss include_num_input_tokens_seen ddp_timeout no_remove_unused_columns
    gradient_checkpointing_kwargs lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_unsloth_gc model_type tokenizer_type
    lora_task_type average_tokens_across_devices eval_on_start dataloader_persistent_workers dataloader_prefetch_factor
    optimizer_in_bwd custom_sharded_layers label_names disable_tqdm log_level
    torch_empty_cache_steps apollo_layerwise apollo_scale_front""".split()
"""Names for which there is nothing to set here, and without which nothing is lost."""
SO_ANYWAY: dict[str, object] = {
    "processor_type": "AutoProcessor",
    "quantization_method": "bnb",
    "pipeline_model_parallel_size": 1,
}
"""Name elsewhere → the value that forge has of it, whatever is set."""
TOLD = {
    theirs: text
    for text, names in {
        _STEP: """gradient_accumulation_steps per_device_train_batch_size micro_batch_size per_gpu_train_batch_size
            generation_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz use_dynamic_batch""",
        "evaluation does not depend on a batch size; micro-batches follow from max_tokens_per_gpu": """eval_batch_size
            per_device_eval_batch_size""",
        "set dtype: float32 or bfloat16, chosen by the device when left out": """bf16 fp16 tf32 fp8 pure_bf16 torch_dtype
            train_dtype osft_upcast_dtype""",
        "a base in 8 bits is adapter=qlora with quant_type=int8, in 4 bits adapter=qlora": """load_in_8bit quantization_bit
            quant_bits quant_method""",
        "qat rounds to a type of GGUF files, of 4, 5 or 8 bits; with adapter=none, lora, rslora or dora": """qat_scheme
            quantizer""",
        "give beta1 and beta2": "adamw_betas betas adam_betas",
        "give clip and clip_high": "eps_clip_low_high",
        "give min_group_reward and max_group_reward": "dynamic_filtering_reward_range",
        "effective_batch_size, the prompts of a rollout, divided by it is updates_per_pass": "ppo_mini_batch_size",
        "choose forge ppo, or forge grpo with baseline, whiten and scale_rewards": "adv_estimator advantage_estimator",
        "choose loss_type: dapo is a mean over tokens, grpo over completions; or loss_reduction beside one": "loss_agg_mode",
        "kl_weight is its weight, in the loss or with kl_in_reward=true in the reward": "use_kl_loss",
        "max_prompt_len with on_overflow: drop (the default) or error": "filter_overlong_prompts",
        "env=package.module:Class answers the model's turns": "agent_func_path multi_turn",
        "tis_above and tis_cap, where a server samples": "rollout_correction",
        "a function that changes rows: preprocess": "custom_cls",
        "rows are learned in their chat_template; other texts with preprocess": "input_template apply_chat_template",
        "choose loss_type=ipo": "ipo",
        _SCHEDULE: "lr_scheduler_kwargs lr_scheduler_args",
        "choose adapter: none (every weight), lora, qlora, dora, rslora, oft, osft and more": """finetuning_type
            peft_config full_finetuning quantize_base tuner_type train_type sft_type""",
        "a command of its own, forge osft; or adapter=osft": "osft",
        "oft_block_size says how many inputs a rotation has, whatever a layer's width": "oft_rank",
        "lora_dropout drops inputs of some adapters, and nothing drops whole rotations": "module_dropout",
        "no setting of a recipe: give it beside, --accelerate-config FILE": "accelerate_config",
        "a command of its own, forge pretrain": "is_pretraining pretraining_config pretraining_dataset",
        "a command of its own: forge dpo, orpo, simpo, kto, grpo, reward": "rl stage rlhf_type",
        "commands of their own: forge classify and forge embed": "task_type",
        "rename the column: rename_columns={'NAME': 'text'}": "dataset_text_field document_column_name text_column",
        "write it into the config.json of a copy of the model, as which it is read": """rope_scaling rope_theta
            overrides_of_model_config overrides_of_model_kwargs model_config""",
        "the newest revision is read; for another give a directory with its files": """revision_of_model model_revision""",
        "the model's own tokenizer is taken: for another, put its files into a copy of the model": """tokenizer_config
            tokenizer_name_or_path""",
        "rename the columns with rename_columns": """field_messages message_property_mappings message_field_role
            message_field_content column_mapping prompt_key messages_key response_key input_key output_key label_key chosen_key
            rejected_key""",
        "tokens are kept in the run's data/ directory": """data_output_dir dataset_prepared_path tokenized_path cache_dir
            cached_dataset lazy_tokenize load_from_cache_file""",
        "freeze_vision_tower, freeze_audio_tower and their kin say which parts train": """
            finetune_vision_layers finetune_language_layers freeze_mm_modules""",
        "target_modules takes the kinds attention and mlp": "finetune_attention_modules finetune_mlp_modules",
        "the model's own processor is taken, whose files say how large images are": """processor_type video_max_pixels
            video_min_pixels video_fps video_maxlen image_size image_resize_algorithm image_max_pixels image_min_pixels
            max_pixels min_pixels""",
        "tokenised rows are recognised": "use_processed_dataset process_data",
        "rows are tokenised with their images; tokenised ones are recognised": "skip_prepare_dataset dataset_kwargs",
        "choose train_on: assistant (the default), last, completion, all": """assistant_only_loss completion_only_loss
            train_on_responses_only loss_scale""",
        "name the roles in train_on, such as assistant,user": "roles_to_train",
        "a message's 'train' says if it is learned, or which stretches are; of another name, with preprocess": """
            message_field_training message_field_training_detail""",
        "max_seq_len with on_overflow: drop (the default), truncate, split, error": """truncation_mode excess_length_strategy
            truncation truncation_strategy""",
        "choose packing: auto (the default), on, off": """sample_packing eval_sample_packing batch_flattening
            pad_to_sequence_len packed padding_free neat_packing packing_strategy pad_to_multiple_of packing_samples
            packing_length use_remove_padding""",
        "the tokenizer's own template, a name (chatml) or file: chat_template": "template use_legacy_tmpl",
        "an argument of the template: chat_template_kwargs={'enable_thinking': false}": "enable_thinking",
        "choose attention: auto (the default), documents, flash3, flash4, sdpa, eager": """flash_attention sdp_attention
            xformers_attention
            disable_flash_attn use_flash_attention_2""",
        "adapter=lora trains every linear layer but the head, unless target_modules names some": "lora_target_linear",
        "kernels=liger takes each of Liger's layers that gives the same numbers": """liger_rope liger_rms_norm
            liger_glu_activation liger_layer_norm liger_rms_norm_gated""",
        _KERNELS: "liger_fused_linear_cross_entropy cut_cross_entropy",
        _SHARDING: """fsdp fsdp_config fsdp_version fsdp_options deepspeed deepspeed_options distributed_backend
            accelerator_config zero_stage""",
        "target_modules names layers of the model, its head among them, and the kinds attention and mlp": """
            apply_lora_to_mlp apply_lora_to_output""",
        "times the number of epochs it is max_steps": "max_steps_per_epoch",
        "choose activation_checkpointing=false": "disable_gradient_checkpointing",
        "eval_every_steps or eval_at_epoch; the beginning and the end are always measured": """eval_strategy evaluation_strategy
            min_samples_per_validation""",
        "eval_every_steps below 1 is a share of the run: of 3 epochs 1/12 measures four times in each": "evals_per_epoch",
        _SAVING: "save_strategy save_steps save_only_model save_freq",
        f"{_SAVING}; below 1 each is a share of the run: of 3 epochs 1/12 saves four times in each": "saves_per_epoch",
        "num_epochs (or inf), max_steps and max_tokens say how long": "training_mode",
        "a resumed run is continued, nothing is overwritten": "overwrite_output_dir",
        "choose on_nan: stop (the default) or skip": "loss_watchdog_threshold loss_watchdog_patience",
        "logging_steps counts lines of the log; metrics.jsonl has every step": "logging_strategy logging_first_step",
        "name it in trackers": "use_wandb use_tensorboard use_swanlab",
        "wandb_run_name or mlflow_run_name; by default it is the name of ckpt_output_dir": "run_name",
        "the same command resumes, and SIGTERM saves": """enable_jit_checkpoint on_demand_checkpointing
            resume_from_full_state_checkpoint""",
        "a loss beside others: loss_type=['sigmoid', 'sft'] with loss_weights, or cpo_alpha of simpo": """
            pref_ftx rpo_alpha nll_loss_coef""",
        "name the weights that train in unfrozen_parameters": """freeze_trainable_layers freeze_trainable_modules
            freeze_extra_modules freeze_parameters freeze_parameters_ratio freeze_parameters_regex trainable_parameters
            trainable_parameters_regex""",
        "names, patterns with * and ?, and kinds (attention, mlp) of target_modules": "target_regex target_parameters",
        "a module of yours is named where it is used, module:name: in preprocess, reward and env": """external_plugins
            custom_register_path custom_dataset_info reward_model_plugin multi_turn_scheduler gym_env use_gym_env""",
        "what fills {{NAME}} and {{AUTHOR}} in the rows is a preprocess": "model_author",
        "forge distill learns the rows' own answers from the teacher": "seq_kd sft_alpha gkd_logits_topk",
        "one learning rate is that of all weights: learning_rate": "vit_lr aligner_lr",
        "the token that ends a turn is the template's own, or turn_end": "eos_token pad_token special_tokens eot_tokens",
        "give paths in data_path": "dataset_dir",
        "a server samples with sampler=vllm and sampler_url; it is started by itself": """use_vllm vllm_mode
            vllm vllm_num_engines vllm_server_host vllm_server_port vllm_server_timeout async_generate""",
        "completions come from the model that trains": """vllm_gpu_memory_utilization gpu_memory_utilization n_gpus
            sleep_level offload_optimizer offload_model move_model_batches offload_teacher_model""",
        "rollouts/step_N.jsonl has every completion": "log_completions",
        "forge export RUN --merge, or with --format gguf": "save_pretrained_merged save_pretrained_gguf merge_lora",
        "name the columns in rename_columns, each with ours": "column_map",
        "weights are given beside the paths: data_path={'a.jsonl': 0.7, 'b.jsonl': 0.3}": """mix_strategy
            interleave_probs dataset_probs prompt_data_probs""",
        "an argument of the verbs in Python: a list of objects that watch the run": "callbacks",
        "files are read in constant memory": "streaming buffer_size shuffle_buffer_size",
        "rows are packed without padding, in random order, so that sorting by length would save nothing": "group_by_length",
        "shuffle=false takes rows as they stand in the files, one file after the other": """train_sampling_strategy
            shuffle_merged_datasets""",
        "effective_batch_size counts prompts of a rollout, updates_per_pass the steps made of one": "steps_per_generation",
        "one seed is that of all: seed": "data_seed",
        _ALWAYS_ON: " ".join(NOT_NEEDED),
        _NO_CODE: "trust_remote_code",
        "not available; optimizer=apollo keeps a state of low rank too, and needs no decomposition": "use_galore",
        "optimizer=apollo is the scale type channel, optimizer=apollo_mini is tensor": "apollo_scale_type",
        "optimizer=apollo has random projections of a matrix's smaller side": "apollo_proj apollo_proj_type",
        "optimizer=apollo and muon move the matrices of the numbered layers": "apollo_target optim_target_modules",
        "apollo_rank, apollo_update_interval, apollo_scale, momentum and eps are settings of their own": "optim_args",
        _OFF: """normalize_reward use_unsloth use_kt plugins
            parallelism_config relora loftq_config gptq
            use_badam use_adam_mini embedding_lr lr_groups loraplus_lr_embedding
            disable_dropout dataset_exact_deduplication min_sample_len tool_format val_loss_improvement_threshold lora_bias
            agent_template lisa_activated_layers llamapro_num_new_blocks enable_channel_loss""",
        "forge push RUN org/name uploads an export": "push_to_hub hub_model_id hub_strategy",
    }.items()
    for theirs in names.split()
}
"""Name elsewhere → what there is instead, in a sentence that follows "here: "."""

COMMANDS = {
    theirs: here
    for here, names in {
        "sft": "train finetune fine-tune lora_sft lora-sft",
        "osft": "lora_osft",
        "reward": "rm reward_model",
        "classify": "cls classification text-classification sequence-classification text_classification",
        "embed": "embedding embeddings embedding_sft embedding-sft sentence_transformers sentence-transformers contrastive",
        "grpo": "lora_grpo",
        "generate": "inference infer predict",
        "export": "merge merge-lora merge_lora quantize",
        "data prepare": "preprocess tokenize",
        "serve": "vllm-serve api",
        "eval": "lm-eval",
        "chat": "webchat",
    }.items()
    for theirs in names.split()
}
"""Command or function elsewhere → command here."""

CHOICES = {
    "optimizer": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "paged_adamw", "paged_adamw_32bit"), "adamw"),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
        **dict.fromkeys(("schedule_free_adamw", "schedule_free"), "schedule_free"),
        "adafactor": "adafactor",
        **{name: name for name in ("muon", "apollo", "apollo_mini")},
    },
    "lr_scheduler": {
        **{name: name for name in ("cosine", "linear", "constant", "cosine_with_min_lr", "cosine_with_restarts", "polynomial")},
        "constant_with_warmup": "constant",
        "inverse_sqrt": "inverse_sqrt",
        "warmup_stable_decay": "warmup_stable_decay",
    },
    "attention": {
        **{name: name for name in ("sdpa", "eager", "flash3", "flash4")},
        **dict.fromkeys(("auto", "flash_attention_2", "flash_attn", "xformers", "flex_attention"), "auto"),
        "flash_attention_3": "flash3",
        "flash_attention_4": "flash4",
        **dict.fromkeys(("fa3", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"), "flash3"),
        **dict.fromkeys(("kernels-community/flash-attn", "kernels-community/flash-attn2"), "auto"),
        "disabled": "eager",
    },
    "scale_rewards": {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"},
    "resume": {True: "auto", "auto": "auto"},
    "metric_for_best": {
        **dict.fromkeys(("loss", "eval_loss"), "loss"),
        **dict.fromkeys(("accuracy", "rewards/accuracies", "eval_rewards/accuracies", "eval_accuracy"), "accuracy"),
        **dict.fromkeys(("margin", "rewards/margins", "eval_rewards/margins"), "margin"),
    },
}
"""Setting → their values and ours, where both have other words."""

_WORDS = {
    "adapter": {"full": "none", "peft": "lora"},
    "baseline": {"remax": "greedy", "rloo": "leave_one_out", "opo": "length", "passk": "second_best", "otb": "optimal_token"},
    "attention": {"flash": "auto", "flash_attn": "auto", "fa2": "auto"},
    "dtype": {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "bfloat16", "float16": "bfloat16"},
    "lr_scheduler": {"cosine_with_warmup": "cosine", "linear_with_warmup": "linear", "none": "constant"},
    "packing": {"true": "on", "false": "off", "bfd": "on", "wrapped": "on"},
}
"""Setting → values that people write, as the command line has them, and ours."""


def meant(name: str, value: str, known: Collection[str]) -> str | None:
    """Return the value here of one of another library, or of a misspelt one; None for none.

    >>> meant("optimizer", "adamw_torch", ("adamw", "adamw_8bit"))
    'adamw'
    """
    lower = value.strip().lower()
    found = lower if lower in known else _WORDS.get(name, {}).get(lower) or CHOICES.get(name, {}).get(lower)
    near = difflib.get_close_matches(lower, known, n=1, cutoff=0.5)
    return found if found in known else near[0] if near else None


def made_elsewhere(value: str, known: Collection[str]) -> str | None:
    """Say what makes a type of GGUF files that is not made here; None of other values.

    >>> made_elsewhere("q4_k_m", ("q4_0", "q8_0"))
    "llama.cpp's llama-quantize makes q4_k_m, of what `forge export RUN --format gguf --dtype bfloat16` writes."
    """
    if "q4_0" not in known or not re.fullmatch(r"q[2-6]_k(_[a-z]+)?|i?q[1-4]_[a-z]+", value.strip().lower()):
        return None
    return f"llama.cpp's llama-quantize makes {value}, of what `forge export RUN --format gguf --dtype bfloat16` writes."


def hint(name: str, known: Collection[str]) -> str | None:
    """Return what another library's or another verb's name is here; None where it is neither.

    Args:
        name: with underscores.
        known: settings of the verb that refuses it.

    """
    name = name.lower()
    here = RENAMED.get(name)
    if {_WRITES.get(name), "output"} <= {*known} and (_WRITES[name] == "output" or "format" in known):
        return f"here it is `{_WRITES[name]}`"
    if ALSO.get(name) in known:
        return f"here it is `{ALSO[name]}`"
    if here is not None:
        second = f", and `{SECOND[name]}`" if SECOND.get(name) in known else ""
        return f"here it is `{here}`{second}" + (
            "" if here in known else f", a setting of forge {OWN.get(here, 'sft and all others that train')}"
        )
    if name in SWITCHES:
        setting = SWITCHES[name].partition("=")[0]
        whose = f", a setting of forge {OWN[setting]}" if setting in OWN and setting not in known else ""
        return f"here it is {SWITCHES[name]}{whose}"
    if name in TOLD:
        return f"here: {TOLD[name]}"
    return f"a setting of forge {OWN[name]}" if name in OWN else None


def unknown(
    names: Mapping[str, str], known: Collection[str], *, what: str = "unknown setting", nested: Collection[str] = ()
) -> str:
    """Write one message about all unknown names: what each is here, or the nearest known one.

    Args:
        names: unknown name → where it was given, such as `recipe r.yaml`; empty for nowhere in particular.
        known: names that would be right.
        what: begins the message.
        nested: those of `names` that hold names and values of their own.

    """
    lines = []
    # Where many have one origin, it is said once.
    shared = len(names) > 1 and len(set(names.values())) == 1
    for name, origin in names.items():
        plain = name.removeprefix("--").replace("-", "_")
        near = difflib.get_close_matches(plain, known, n=1, cutoff=NEAR)
        told = hint(plain, known)
        if told is None and name in nested:
            told = "a recipe has no sections: write what stands in it as lines `name: value` of their own, without indentation"
        told = told or (f"did you mean `{near[0]}`?" if near else "there is none of such a name")
        where = "" if shared else origin_note(origin)
        lines.append(f"{name if name.startswith('--') else repr(name)}{where}: {told}")
    if len(lines) == 1:
        return f"{what} {lines[0]}{'' if lines[0].endswith('?') else '.'}"
    where = origin_note(next(iter(names.values()))) if shared else ""
    return "\n  ".join([f"{len(lines)} {what}s{where}:", *lines])
