"""Loss, rewards or labels' scores of a model on samples, one unpadded sample at a time.

Without dropout and autocast.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forge_dist._errors import ExportError
from forge_dist.loading._task import is_headless, is_sequence_classifier
from forge_dist.loading._unwrap import base_of, unwrapped

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Sample = tuple[Any, Any]
"""(input_ids [S], labels [S]): whole numbers in anything that torch.tensor takes; a label of -100 is not learned."""

IGNORED = -100
"""Label of a token that is not learned."""


class Score(NamedTuple):
    """Sum of a loss, or rewards."""

    total: float  # summed negative log-likelihood in nats, or summed reward
    count: int  # learned tokens, or rewards
    in_16_bits: bool = False  # whether the logits came in 16 bits
    rewards: tuple[
        float, ...
    ] = ()  # of a reward model: a sample's; of a classifier: its labels'; without a head: its hidden state
    padded: tuple[float, ...] = ()  # the same from one batch, padded on the right, as users of the directory may call it

    hidden: bool = False  # whether the numbers are those of hidden states

    @property
    def mean(self) -> float:
        """Nats per learned token, or the mean reward."""
        return self.total / self.count

    @property
    def values(self) -> tuple[float, ...]:
        """The compared numbers: the mean loss, or each reward."""
        return self.rewards or (self.mean,)


def score(
    model: "PreTrainedModel | PeftModel | torch.nn.Module",
    samples: Sequence[Sample],
    device: torch.device,
    *,
    reloaded: bool = False,
) -> Score:
    """Sum -log p(labels[t] | input_ids[:t]) over samples and t > 0 with a label, in float32.

    Only learned positions go through the head where the architecture allows it, so [S, V] logits need not fit. A divided model
    is called through its strategy's wrapper, by all ranks together. For a reward model see `_rewards`, for one without a head
    `_hidden_states`.
    """
    if is_sequence_classifier(base_of(unwrapped(model))):
        return _rewards(model, samples, device, reloaded=reloaded)
    if is_headless(base_of(unwrapped(model))):
        return _hidden_states(model, samples, device, reloaded=reloaded)
    selects = "logits_to_keep" in inspect.signature(base_of(unwrapped(model)).forward).parameters
    nll, count, in_16_bits = 0.0, 0, False
    with torch.no_grad(), torch.autocast(device.type, enabled=False), warnings.catch_warnings():
        # PEFT 0.21 gives virtual tokens under the name that transformers used before 5.24.
        warnings.filterwarnings("ignore", message=".past_key_values. is deprecated", category=FutureWarning)
        for input_ids, labels in samples:
            input_ids_S, labels_S = _vector(input_ids, device), _vector(labels, device)
            positions = (labels_S[1:] != IGNORED).nonzero().squeeze(1)
            if not len(positions):
                continue
            keep = {"logits_to_keep": positions} if selects else {}
            logits = model(input_ids=input_ids_S[None], use_cache=False, **keep).logits[0]
            logits = logits if selects else logits[positions]
            nll += torch.nn.functional.cross_entropy(logits.float(), labels_S[1:][positions], reduction="sum").item()
            count += len(positions)
            in_16_bits = logits.element_size() == 2
    return Score(nll, count, in_16_bits)


def _rewards(model: torch.nn.Module, samples: Sequence[Sample], device: torch.device, *, reloaded: bool) -> Score:
    """Compute the reward, or the labels' scores, of each sample at its last token, as trained.

    A `reloaded` model finds that token by its padding token, and computes all samples in one batch too.
    """
    config = base_of(unwrapped(model)).config.get_text_config()
    rows = [_vector(input_ids, device) for input_ids, _ in samples]
    pad = config.pad_token_id
    if not reloaded:
        config.pad_token_id = None  # then transformers takes the last token, whatever it is
    rewards, padded, in_16_bits = [], [], False
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for row_S in rows:
                found = model(input_ids=row_S[None], use_cache=False).logits
                rewards += found.float().flatten().tolist()
                in_16_bits = found.element_size() == 2
            if reloaded and pad is not None:
                batch_BS = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
                lengths_B = torch.tensor([len(row) for row in rows], device=device)
                mask_BS = torch.arange(batch_BS.shape[1], device=device) < lengths_B[:, None]
                found = model(input_ids=batch_BS, attention_mask=mask_BS.long(), use_cache=False).logits
                padded = found.float().flatten().tolist()
    finally:
        config.pad_token_id = pad
    return Score(sum(rewards), len(rewards), in_16_bits, tuple(rewards), tuple(padded))


def _hidden_states(model: torch.nn.Module, samples: Sequence[Sample], device: torch.device, *, reloaded: bool) -> Score:
    """Compute the mean hidden state of each sample, relative to its largest number.

    A `reloaded` model computes all samples in one batch too, padded on the right under a mask, as embeddings are.
    """
    rows = [_vector(input_ids, device) for input_ids, _ in samples]
    found, padded, in_16_bits = [], [], False
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for row_S in rows:
            hidden_SD = model(input_ids=row_S[None]).last_hidden_state[0]
            in_16_bits = hidden_SD.element_size() == 2
            found += _mean_state(hidden_SD)
        if reloaded:
            batch_BS = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask_BS = (
                torch.arange(batch_BS.shape[1], device=device)
                < torch.tensor([len(row) for row in rows], device=device)[:, None]
            )
            states_BSD = model(input_ids=batch_BS, attention_mask=mask_BS.long()).last_hidden_state
            padded = [
                number for row, states in zip(rows, states_BSD, strict=True) for number in _mean_state(states[: len(row)])
            ]
    return Score(sum(found), len(found), in_16_bits, tuple(found), tuple(padded), hidden=True)


def _mean_state(hidden_SD: torch.Tensor) -> list[float]:
    mean_D = hidden_SD.float().mean(0)
    return (mean_D / mean_D.abs().max()).tolist()


def check_samples(model: torch.nn.Module, samples: Sequence[Sample]) -> None:
    """Raise ExportError for a sample that is no pair of token ids and labels of this model."""
    base = base_of(unwrapped(model))
    rows = getattr(base.get_input_embeddings(), "num_embeddings", None) or base.config.get_text_config().vocab_size
    # Labels are read of a causal language model alone.
    read = 1 if is_headless(base) or is_sequence_classifier(base) else 2
    for number, sample in enumerate(samples):
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ExportError(
                f"samples[{number}] is a {type(sample).__name__}, and a pair (input_ids, labels) is wanted: give "
                "(row['input_ids'], row['labels']) of a row"
            )
        for name, values in list(zip(("input_ids", "labels"), sample, strict=True))[:read]:
            try:
                found = _vector(values, torch.device("cpu"))
            except (TypeError, ValueError, RuntimeError) as error:
                raise ExportError(f"samples[{number}]: its {name} are no whole numbers ({error}): tokenize it first") from error
            if found.dim() != 1:
                raise ExportError(f"samples[{number}]: its {name} have the shape {list(found.shape)}: give one row, [S]")
            unknown = found[(found >= rows) | ((found < 0) & ((found != IGNORED) | (name == "input_ids")))]
            if len(unknown):
                raise ExportError(
                    f"samples[{number}]: its {name} hold {int(unknown[0])}, and the model knows tokens from 0 to {rows - 1}: "
                    "tokenize with this model's tokenizer"
                )
        if read == 2 and len(sample[0]) != len(sample[1]):
            raise ExportError(
                f"samples[{number}] has {len(sample[0])} input_ids and {len(sample[1])} labels: give a label for each, -100 "
                "where none is learned"
            )


def comparable_samples(model: torch.nn.Module, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with a learned token; for reward models those not ending in padding.

    transformers reads the reward of a row that ends with the padding token before it, whatever the weights.
    """
    base = base_of(unwrapped(model))
    if is_headless(base):
        return [sample for sample in samples if len(sample[0])]
    if not is_sequence_classifier(base):
        return [sample for sample in samples if has_learned_token(sample[1])]
    pad = base.config.get_text_config().pad_token_id
    return [(ids, labels) for ids, labels in samples if len(ids) and int(ids[-1]) != pad]


def has_learned_token(labels: Any) -> bool:
    """Return whether a label [S] other than the first, which nothing predicts, is learned."""
    return any(int(label) != IGNORED for label in labels[1:])


def _vector(values: Any, device: torch.device) -> torch.Tensor:
    # A copy: memory-mapped arrays cannot be written, and torch warns when it shares one.
    copied = values.clone() if isinstance(values, torch.Tensor) else torch.tensor(values)
    return copied.to(device=device, dtype=torch.long)


@contextmanager
def inference_mode(model: torch.nn.Module, base: "PreTrainedModel", attention: str) -> Iterator[None]:
    """Set every module of `model` to eval mode and `base` to `attention`; then restore each.

    Some modules may be in eval mode by intent. Parts beside the language keep the attention that they have.
    """
    training = {module: module.training for module in model.modules()}
    before = str(base.config.get_text_config()._attn_implementation)
    model.eval()
    _set_attention(base, attention)
    try:
        yield
    finally:
        _set_attention(base, before)
        for module, mode in training.items():
            module.training = mode


def _set_attention(base: "PreTrainedModel", attention: str) -> None:
    # A name alone would be every part's, and ours is causal where a tower is not.
    text = base.config.get_text_config()
    own = [name for name in base.config.sub_configs if getattr(base.config, name, None) is text]
    base.set_attn_implementation({"": attention, **dict.fromkeys(own, attention)})
