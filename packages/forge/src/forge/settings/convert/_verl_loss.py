"""verl's policy losses, KL and critic → settings of forge grpo and ppo."""

from __future__ import annotations

from forge.settings.convert._draft import Keys

_A = "actor_rollout_ref.actor"
_AGGREGATIONS: dict[str, dict[str, object]] = {
    "token-mean": {"loss_type": "dapo"},
    "seq-mean-token-mean": {"loss_type": "grpo"},
    "seq-mean-token-sum": {"loss_type": "luspo", "importance_sampling_level": "token"},
    "seq-mean-token-sum-norm": {"loss_type": "dr_grpo"},
}
LOSSES = {
    **{name: name for name in ("gspo", "sapo", "cispo", "dppo_tv", "dppo_kl", "gpg", "dro", "clip_cov", "kl_cov")},
    "geo_mean": "gmpo",
}
_REDUCTIONS = {"token-mean": "tokens", "seq-mean-token-mean": "mean", "seq-mean-token-sum": "sum"}
_REDUCTIONS |= {"seq-mean-token-sum-norm": "max_length"}
_TOKEN_MEANS = ("cispo", "dppo_tv", "dppo_kl", "gpg", "dro", "clip_cov", "kl_cov")
"""`loss_mode` beside vanilla that `loss_agg_mode` averages as it says; others are means over completions there too."""
_CHOOSING = {
    "clip_cov": {name: name for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
    "kl_cov": {"kl_cov_ratio": "kl_cov_ratio", "kl_cov_coef": "ppo_kl_coef"},
}
"""`loss_mode` that chooses tokens → setting here → key there."""
_PENALTIES = {**dict.fromkeys(("kl", "k1"), "k1"), **dict.fromkeys(("low_var_kl", "k3"), "k3")}


def read_kl(keys: Keys, verb: str) -> None:
    """Read the KL to the reference, in the reward or in the loss."""
    in_loss, in_reward = keys.get(f"{_A}.use_kl_loss", default=False), keys.get("algorithm.use_kl_in_reward", default=False)
    weight, kind = keys.get(f"{_A}.kl_loss_coef", default=0.001), str(keys.get(f"{_A}.kl_loss_type", default="low_var_kl"))
    penalty = str(keys.get("algorithm.kl_penalty", default="kl"))
    of_reward = keys.get("algorithm.kl_ctrl.kl_coef", default=0.001)
    keys.found["kl_weight"] = 0.0 if verb == "ppo" else None
    if in_reward:
        keys.found["kl_weight"] = of_reward if of_reward or verb == "ppo" else None
        keys.found["kl_in_reward"] = (True if of_reward else None) if verb == "grpo" else None
        if _PENALTIES.get(penalty) != "k1":
            keys.lost.append(f"algorithm.kl_penalty: {penalty!r}: the KL in the reward is k1 here")
        if of_reward and keys.get("algorithm.kl_ctrl.type", default="fixed") == "adaptive":
            keys.take("kl_target", "algorithm.kl_ctrl.target_kl", default=0.1)
            keys.take("kl_horizon", "algorithm.kl_ctrl.horizon", default=10_000)
    if in_loss and (in_reward or verb == "ppo"):
        keys.lost.append(f"{_A}.use_kl_loss: True: the KL is in the reward here, and in it alone")
    elif in_loss:
        keys.found["kl_weight"] = weight or None
        if weight and _PENALTIES.get(kind) != "k3":
            keys.lost.append(
                f"{_A}.kl_loss_type: {kind!r}: k3 was taken; kl_estimator=unbiased has the true KL's gradient, as k2 has there"
            )
    for each in ("type", "horizon", "target_kl"):
        keys.seen.add(f"algorithm.kl_ctrl.{each}")


def read_loss(keys: Keys, mode: str, aggregation: str, estimator: str) -> None:
    """Read the policy loss of forge grpo, and what advantages are divided by."""
    if mode == "vanilla" and aggregation not in _AGGREGATIONS:
        keys.lose(f"{_A}.loss_agg_mode", f"means are those of {', '.join(_AGGREGATIONS)}")
    keys.found |= _AGGREGATIONS.get(aggregation, {}) if mode == "vanilla" else {"loss_type": LOSSES[mode]}
    if mode in _TOKEN_MEANS and aggregation != "token-mean":
        keys.found["loss_reduction"] = _REDUCTIONS.get(aggregation)
        if aggregation not in _REDUCTIONS:
            keys.lose(f"{_A}.loss_agg_mode", f"means are those of {', '.join(_REDUCTIONS)}")
    if mode == "dro":
        keys.take("dro_beta", f"{_A}.policy_loss.dro_beta")
    for ours, theirs in _CHOOSING.get(mode, {}).items():
        keys.take(ours, f"{_A}.policy_loss.{theirs}")
        keys.comments["loss_type"] = "chooses among the tokens of a step; of a micro-batch there"
    deviation = keys.get("algorithm.norm_adv_by_std_in_grpo", default=True)
    if estimator == "grpo_passk":
        keys.found["scale_rewards"] = "group" if deviation else None
    elif estimator.startswith("grpo") and (not deviation or keys.found.get("loss_type") == "dr_grpo"):
        keys.found["scale_rewards"] = "group" if deviation else "none"
    factor = keys.get(f"{_A}.loss_scale_factor")
    if factor is not None and factor != keys.found["max_new_tokens"]:
        keys.lose(f"{_A}.loss_scale_factor", "sums of dr_grpo are divided by max_new_tokens here")
    entropy = keys.get(f"{_A}.entropy_coeff", default=0)
    keys.found["entropy_coef"] = entropy or None
    if entropy and aggregation != "token-mean":
        keys.lost.append(f"{_A}.entropy_coeff: {entropy}: is a mean over all tokens here, whatever the loss is")
    if mode == "sapo":
        for sign in ("pos", "neg"):
            keys.take(f"sapo_temperature_{sign}", f"{_A}.tau_{sign}", f"{_A}.policy_loss.tau_{sign}")


def read_clip(keys: Keys, mode: str) -> None:
    """Read the bounds of the ratio; a dual clip of 3 is verl's default."""
    both = keys.get(f"{_A}.clip_ratio", default=0.2)
    low, high = (keys.get(f"{_A}.clip_ratio_{side}", default=both) for side in ("low", "high"))
    most = keys.get(f"{_A}.clip_ratio_c", default=3.0)
    if mode in ("sapo", "gpg", "dro", "kl_cov"):
        return
    if low >= 1:
        if mode != "cispo":
            keys.lost.append(f"{_A}.clip_ratio_low: {low}: no bound below there; clip is below 1 here")
        low = None
    given = keys.has(f"{_A}.clip_ratio", f"{_A}.clip_ratio_low", f"{_A}.clip_ratio_high")
    if given or mode != "vanilla" or keys.found.get("loss_type") == "luspo":
        keys.found |= {"clip": low, "clip_high": high}
        keys.comments |= {} if given else {"clip": "that of verl by default", "clip_high": "that of verl by default"}
    if mode in ("vanilla", "dppo_tv", "dppo_kl"):
        keys.found["dual_clip"] = most
        keys.comments |= {} if keys.has(f"{_A}.clip_ratio_c") else {"dual_clip": "verl's default"}
    if keys.has(f"{_A}.clip_ratio") and not keys.has(f"{_A}.clip_ratio_low", f"{_A}.clip_ratio_high") and both != 0.2:
        keys.lost.append(
            f"{_A}.clip_ratio: {both}: carried over; since verl 0.5 it has no effect there beside clip_ratio_low and "
            "clip_ratio_high, which are 0.2 by default"
        )


def read_critic(keys: Keys, mode: str, aggregation: str) -> None:
    """Read GAE and the value head."""
    keys.take("gamma", "algorithm.gamma", default=1.0)
    keys.take("lam", "algorithm.lam", default=1.0)
    keys.take("value_clip", "critic.cliprange_value", default=0.5)
    rate = keys.get("critic.optim.lr", default=1e-5)
    keys.lost.append(
        f"critic.optim.lr: {rate}: the value head is on the policy's own model here, and learns with it: value_weight and "
        "learning_rate; there the critic is a model of its own"
    )
    keys.seen |= {key for key in keys.values if key.startswith("critic.optim")}
    if mode != "vanilla" or aggregation != "token-mean":
        keys.lost.append(f"{_A}.loss_agg_mode: {aggregation!r} of {mode}: a step of ppo is a mean over all tokens, clipped")
    if keys.get(f"{_A}.entropy_coeff", default=0):
        keys.lose(f"{_A}.entropy_coeff", "forge ppo has no entropy in its loss; forge grpo has")
