"""Settings of the objectives on tokens: fine-tuning, pretraining, distillation; no torch."""

from typing import Any, Literal

import attrs

from forge_algos.settings._validators import logits_divisor, number, one_of

TokenLoss = Literal["nll", "dft"]
TokenNormalize = Literal["global", "trl"]
DistillLoss = Literal["jsd", "gold", "uld"]
TeacherRest = Literal["class", "left_out"]

_share = number(kind=float, below=1.0)
_weight = number(kind=float)


def _at_most_one(_instance: Any, field: Any, value: Any) -> None:
    _weight(_instance, field, value)
    if value > 1:
        raise ValueError(f"{field.name} must be from 0 to 1, got {value!r}")


_above_share: Any = attrs.validators.and_(number(kind=float, above=True), attrs.validators.le(1))
_SAMPLING = ("max_new_tokens", "sample_temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of `DistillSettings` that say how completions are sampled."""


def _path(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{field.name} must be a path or a model's name, got {value!r} ({type(value).__name__})")
    if not value:
        raise ValueError(f"{field.name} must not be empty")


@attrs.frozen(kw_only=True)
class SupervisedSettings:
    """Additions to, or replacements of, the plain negative log-likelihood of learned tokens.

    >>> SupervisedSettings(label_smoothing=1.5)
    Traceback (most recent call last):
        ...
    ValueError: label_smoothing must be at least 0 and below 1, got 1.5
    """

    loss: TokenLoss = attrs.field(default="nll", validator=one_of(TokenLoss))
    """Negative log-likelihood ("nll"), or dynamic fine-tuning ("dft", arXiv 2508.05629),
    which weighs each token by its probability."""
    label_smoothing: float = attrs.field(default=0.0, validator=_share)
    """Share of each target that is spread evenly over the whole vocabulary (arXiv 1512.00567),
    from 0 to below 1."""
    z_loss: float = attrs.field(default=0.0, validator=_weight)
    """Weight of the squared logarithm of the softmax's denominator (arXiv 2204.02311),
    which keeps logits from drifting; 1e-4 is usual."""
    neftune_alpha: float = attrs.field(default=0.0, validator=_weight)
    """Noise on the embeddings while training (arXiv 2310.05914):
    uniform, up to neftune_alpha / √(S·D) for a document of S tokens in a width of D. 5 is usual; 0 is none."""
    normalize: TokenNormalize = attrs.field(default="global", validator=one_of(TokenNormalize))
    """The mean over the learned tokens of a whole step ("global"),
    or the mean of each micro-batch's own mean ("trl"), as TRL takes it where a model's forward does not accept the step's
    count; that one depends on how the step is cut."""


@attrs.frozen(kw_only=True)
class PretrainSettings:
    """How documents are cut into blocks, and the loss on them.

    >>> PretrainSettings(block_size=1)
    Traceback (most recent call last):
        ...
    ValueError: block_size must be at least 2 and finite, got 1
    """

    block_size: int = attrs.field(default=2048, validator=number(kind=int, low=2))
    """Tokens of a block, into which documents are cut;
    every token but a document's first is learned once."""
    cross_documents: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether the documents of a block see each other,
    so that a document's first token is learned from the one before it."""
    label_smoothing: float = attrs.field(default=0.0, validator=_share)
    """Share of each target that is spread evenly over the whole vocabulary (arXiv 1512.00567),
    from 0 to below 1."""
    z_loss: float = attrs.field(default=0.0, validator=_weight)
    """Weight of the squared logarithm of the softmax's denominator (arXiv 2204.02311),
    which keeps logits from drifting; 1e-4 is usual."""


@attrs.frozen(kw_only=True)
class DistillSettings:
    """Teacher whose distribution is learned, and the divergence from it (GKD, arXiv 2306.13649).

    >>> DistillSettings(teacher_path="large", matched_weight=1.0)
    Traceback (most recent call last):
        ...
    ValueError: matched_weight has no effect with loss=jsd: it is read by loss=gold
    """

    teacher_path: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_path), metadata={"or": "teacher_logprobs"}
    )
    """Directory or Hub name of the teacher, wanted unless teacher_logprobs is given:
    it must have the student's vocabulary, but with loss=gold or uld."""
    teacher_logprobs: str | None = attrs.field(default=None, validator=attrs.validators.optional(_path))
    """Directory of a teacher's likeliest tokens at each learned token, which `forge teach` wrote:
    in the place of teacher_path, for as many runs as there are."""
    teacher_rest: TeacherRest = attrs.field(default="class", validator=one_of(TeacherRest))
    """What becomes of the probability beyond the tokens of teacher_logprobs:
    one more class ("class", as TRL's loss_add_tail), or the teacher's is left out and its tokens' divided by their sum
    ("left_out", as Axolotl's kd)."""
    loss: DistillLoss = attrs.field(default="jsd", validator=one_of(DistillLoss))
    """Divergence over one vocabulary ("jsd"), or a distance between two models of any two tokenizers:
    a JSD on the tokens that both have and sorted probabilities on the others ("gold", as TRL's GOLDTrainer), or sorted
    probabilities alone ("uld", arXiv 2402.12030)."""
    beta: float = attrs.field(default=0.5, validator=_at_most_one)
    """β of the generalised Jensen-Shannon divergence:
    0 is forward KL, which covers all that the teacher does; 1 is reverse KL, which seeks what it does most."""
    temperature: float = attrs.field(default=1.0, validator=logits_divisor)
    """Divisor of both models' logits before the softmax; at least 1e-6."""
    on_policy: float = attrs.field(default=0.0, validator=_at_most_one)
    """Share of the steps that are on completions which the model samples for them:
    λ of GKD (arXiv 2306.13649; lmbda of TRL), drawn by the seed. 0 learns the rows' own answers alone, 1 none of them."""
    max_new_tokens: int = attrs.field(default=256, validator=number(kind=int, low=1))
    """Most tokens that a completion may have with on_policy;
    one without an end by then is cut off, and learned from all the same."""
    sample_temperature: float | None = attrs.field(default=None, validator=attrs.validators.optional(logits_divisor))
    """Divisor of the logits where completions are sampled with on_policy, at least 1e-6;
    the same as temperature by default."""
    top_p: float = attrs.field(default=1.0, validator=_above_share)
    """Share of the probability whose likeliest tokens are sampled from with on_policy; 1 is all."""
    top_k: int = attrs.field(default=0, validator=number(kind=int))
    """Number of likeliest tokens that are sampled from with on_policy; 0 is all."""
    min_p: float = attrs.field(default=0.0, validator=_at_most_one)
    """Share of the likeliest token's probability below which no token is sampled with on_policy;
    0 is all."""
    repetition_penalty: float = attrs.field(default=1.0, validator=number(kind=float, above=True))
    """Divisor, while sampling with on_policy, of the positive logits of tokens that prompt or completion
    have already, and factor of their negative ones; above 1 they come less often (arXiv 1909.05858)."""
    matched_weight: float | None = attrs.field(default=None, validator=attrs.validators.optional(_weight))
    """Weight of the tokens that both vocabularies have, with loss=gold;
    by default the share of the teacher's vocabulary that they are."""
    unmatched_weight: float | None = attrs.field(default=None, validator=attrs.validators.optional(_weight))
    """Weight of all other tokens, with loss=gold; given together with matched_weight;
    by default 1 less the default of that."""

    def __attrs_post_init__(self) -> None:
        self._check_stored()
        self._check_sampled()
        weights = {"matched_weight": self.matched_weight, "unmatched_weight": self.unmatched_weight}
        given = [name for name, value in weights.items() if value is not None]
        if given and self.loss != "gold":
            raise ValueError(f"{given[0]} has no effect with loss={self.loss}: it is read by loss=gold")
        if len(given) == 1:
            raise ValueError(f"{given[0]} is given alone: give both of matched_weight and unmatched_weight, or neither")
        if given and not any(weights.values()):
            raise ValueError("matched_weight and unmatched_weight are both 0: nothing would be learned")
        if self.loss == "uld" and self.beta != attrs.fields(DistillSettings).beta.default:
            raise ValueError(
                f"beta={self.beta:g} has no effect with loss=uld, which has no JSD: leave it out, or take loss=gold"
            )

    def _check_sampled(self) -> None:
        """Refuse settings of sampling without samples, and samples without their teacher."""
        if not self.on_policy:
            for name in _SAMPLING:
                if getattr(self, name) != getattr(attrs.fields(DistillSettings), name).default:
                    raise ValueError(f"{name} has no effect without on_policy, by which completions are sampled")
        elif self.teacher_logprobs is not None:
            raise ValueError(
                "on_policy with teacher_logprobs: these are of the rows' own answers and say nothing of what the model "
                "samples; give teacher_path"
            )

    def _check_stored(self) -> None:
        """Refuse two teachers or none, and what stored log-probabilities do not say."""
        if (self.teacher_path is None) == (self.teacher_logprobs is None):
            raise ValueError(
                "teacher_path, the directory or Hub name of a teacher, or teacher_logprobs, what `forge teach` wrote of one: "
                f"give {'one of the two' if self.teacher_path is None else 'one, not both'}"
            )
        if str(self.teacher_path).startswith(("http://", "https://")):
            raise ValueError(
                f"teacher_path={self.teacher_path} is the address of a server, which `forge teach` asks once: give what it "
                "wrote as teacher_logprobs. A model's own completions (on_policy) need a teacher that is loaded"
            )
        if self.teacher_logprobs is None:
            if self.teacher_rest != "class":
                raise ValueError("teacher_rest has no effect without teacher_logprobs: a live teacher has all probabilities")
        elif self.loss != "jsd":
            raise ValueError(
                f"loss={self.loss} compares whole distributions, which teacher_logprobs has not: give teacher_path"
            )
        elif self.teacher_rest == "left_out" and self.beta == 1:
            raise ValueError(
                "beta=1 with teacher_rest=left_out is infinite wherever the model expects another token: take class, or a "
                "smaller beta"
            )
