"""Settings that only some verbs have → those verbs, for the refusal of one by another verb."""

OWN = {
    name: verbs
    for verbs, names in {
        "pretrain": "block_size cross_documents",
        "distill": """teacher_path teacher_logprobs teacher_rest matched_weight unmatched_weight on_policy
            sample_temperature""",
        "sdft": "demonstration_template teacher teacher_rate skip_tokens",
        "dpo": "loss_weights f_divergence f_divergence_alpha discopop_tau ld_alpha wpo",
        "simpo": "cpo_alpha",
        "orpo": "learn_prompt",
        "reward": "centering",
        "classify": "labels problem_type",
        "embed": "query_prefix document_prefix pooling exclude_same_text margin",
        "ppo": "lam value_weight value_clip",
        "ppo and grpo": "dual_clip whiten",
        "grpo": """scale_rewards multi_objective_aggregation entropy_coef top_entropy_quantile
            use_adaptive_entropy entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max
            off_policy_mask_threshold loss_reduction dro_beta clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio kl_cov_coef
            kl_estimator baseline kl_in_reward importance_sampling_level
            sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg""",
        "sft and osft": "neftune_alpha",
        "sft, osft, distill and embed": "loss",
        "dpo, kto and grpo": "loss_type",
        "dpo and kto": "reference_path",
        "dpo, kto, ppo, grpo and rloo": "reference reference_sync_steps reference_mixup",
        "kto": "desirable_weight undesirable_weight",
        "simpo and ppo": "gamma",
        "grpo and rloo": "on_equal_rewards max_resamples min_group_reward max_group_reward",
        "sft, osft and pretrain": "z_loss",
        "sft, osft, pretrain, dpo and simpo": "label_smoothing",
        "distill, sdft, dpo, orpo, simpo and kto": "beta",
        "distill, sdft, embed, ppo, grpo and rloo": "temperature",
        "dpo, orpo, simpo, kto and reward": "on_bad_pair",
        "distill, sdft, ppo, grpo and rloo": "max_new_tokens top_p top_k min_p repetition_penalty",
        "sdft, ppo, grpo and rloo": "max_prompt_len num_generations",
        "rloo": "normalize_advantages",
        "ppo, grpo and rloo": """reward reward_weights reward_clip_range reward_model_path on_reward_error
            clip clip_high updates_per_pass mask_truncated missing_eos_penalty
            overlong_buffer kl_weight kl_target kl_horizon num_iterations reward_timeout env max_turns env_timeout sampler
            sampler_url sampler_timeout tis_above tis_cap max_sampler_gap""",
        "sft, osft, dpo, orpo, simpo, kto and reward": "normalize",
        "sft, dpo and all others but pretrain": "on_overflow",
        "sft, dpo and all others but pretrain and embed": "chat_template chat_template_kwargs system_prompt",
        "sft, dpo and all others but pretrain, sdft, ppo, grpo and rloo": "max_seq_len",
        "sft and all others but pretrain, sdft, classify, embed, ppo, grpo and rloo": """train_on turns turn_end data_format
            train_on_turn_end""",
        "sft, dpo and all others but sdft, classify, embed, ppo, grpo and rloo": "num_proc lint",
    }.items()
    for name in names.split()
}
"""Setting that only some verbs have → those verbs."""
