"""SFT on a packed row equals one sample at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface

from forge_algos import (
    SFT,
    AdapterSettings,
    PackedBatchError,
    Pretrain,
    PretrainSettings,
    SupervisedSettings,
    adapt,
    evaluate,
    shares_prompts,
)

from ..oracle import ARCHITECTURES, CPU, VOCAB, distance, gradients, make, naive, pack, samples, worst
from ..preferences import shareable
from ..threads import on_threads

LENGTHS = (5, 1, 9, 2, 7, 13)


def both(model, examples):
    """Return ((loss, gradients) packed, (loss, gradients) one by one)."""
    model.zero_grad()
    terms = SFT().bind(model, device=CPU)(pack(examples), [])
    terms.sum.backward()
    ours = terms.sum.item(), gradients(model)
    model.zero_grad()
    total, count = naive(model, examples)
    total.backward()
    assert terms.count == count == SFT().count(pack(examples))
    return ours, (total.item(), gradients(model))


@pytest.mark.parametrize(
    ("architecture", "attention"), [(a, w) for a in ARCHITECTURES for w in ("sdpa", "eager") if (a, w) != ("gemma2", "sdpa")]
)
def test_equals_one_sample_at_a_time(architecture, attention):
    """Loss is within 1e-6 and gradients within 1e-5 of one sample at a time.
    With masks that do not start with -100, and a sample of one token.
    """
    model = make(architecture, attention=attention)
    (loss, mine), (expected, theirs) = both(model, samples(LENGTHS))
    assert abs(loss / expected - 1) < 1e-6
    assert distance(mine, theirs) < 1e-5
    assert worst(mine, theirs) < 1e-4


def test_turns_that_share_their_history():
    """Turns that leave one history at different tokens, one of them learned within it, count as each alone does."""
    random = np.random.default_rng(3)
    history, first, last = (random.integers(3, VOCAB, length) for length in (4, 3, 5))
    none = np.full(4, -100)
    # The last turn's example; an earlier turn that stands in its history but for the end; one that leaves it earlier.
    examples = [
        (np.concatenate([history, first, last]), np.concatenate([none, [-100] * 3, last])),
        (np.concatenate([history, first, [9]]), np.concatenate([none, first, [9]])),
        (np.concatenate([history[:2], [5, 8]]), np.array([-100, -100, 5, 8])),
    ]
    row = SimpleNamespace(
        input_ids=np.concatenate([examples[0][0], [9], [5, 8]]),
        position_ids=np.array([*range(12), 7, 2, 3]),
        rows=np.array([6, 7, 8, 9, 10, 3, 4, 5, 6, 1, 13]),
        targets=np.concatenate([last, first, [9, 5, 8]]),
        lengths=np.array([5, 4, 2]),
        ends=np.array([11, 12, 14]),
        group_sizes=np.array([3]),
        cu_seqlens=np.array([0, 12, 13, 15], np.int32),
        max_seqlen=12,
        kv_rows=np.array([*range(12), *range(7), 12, 0, 1, 13, 14]),
        cu_seqlens_k=np.array([0, 12, 20, 24], np.int32),
        max_seqlen_k=12,
    )
    model = shareable(make())
    objective = SFT()
    with pytest.raises(PackedBatchError, match="not shown to share"):  # in a loop of one's own, without a guard
        objective.bind(model, device=CPU)(row, [])
    assert shares_prompts(model, device=CPU)[0]
    terms = objective.bind(model, device=CPU)(row, [])
    terms.sum.backward()
    mine = gradients(model)
    model.zero_grad()
    total, count = naive(model, examples)
    total.backward()
    assert (terms.count, objective.count(row), objective.samples(row), objective.tokens(row)) == (count, 11, 1, 15)
    assert terms.sum.item() == pytest.approx(total.item(), rel=1e-6)
    assert distance(mine, gradients(model)) < 1e-5


class Sums(TorchDispatchMode):
    """Records the dtypes in which gradients of selected rows are summed."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "index_add" in str(func):
            self.found.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_a_position_that_samples_share_sums_its_gradients_in_float32():
    """In bfloat16 each sum on the way would be rounded: of many equal gradients the later ones are lost."""
    shared = np.array([5, 6, 7])
    row = SimpleNamespace(
        input_ids=np.array([*shared, 8, 9]),
        position_ids=np.array([0, 1, 2, 3, 3]),
        rows=np.array([0, 1, 2, 0, 1, 2]),
        targets=np.array([6, 7, 8, 6, 7, 9]),
        lengths=np.array([3, 3]),
        ends=np.array([3, 4]),
        group_sizes=np.array([1, 1]),
        cu_seqlens=np.array([0, 4, 5], np.int32),
        max_seqlen=4,
        kv_rows=np.array([0, 1, 2, 3, 0, 1, 2, 4]),
        cu_seqlens_k=np.array([0, 4, 8], np.int32),
        max_seqlen_k=4,
    )
    model = shareable(make()).bfloat16()
    assert shares_prompts(model, device=CPU)[0]
    terms = SFT().bind(model, device=CPU)(row, [])
    with Sums() as sums:
        terms.sum.backward()
    assert sums.found == {torch.float32}


def test_lora_equals_one_sample_at_a_time():
    """The same with trained adapters; the frozen base gets no gradient."""
    torch.manual_seed(2)
    model = adapt(make(), AdapterSettings(adapter="lora", lora_r=3)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    (loss, mine), (expected, theirs) = both(model, samples(LENGTHS))
    assert abs(loss / expected - 1) < 1e-6
    assert distance(mine, theirs) < 1e-5
    assert all("lora" in name for name in mine)


def test_no_target_crosses_a_border():
    """A document's last token predicts nothing, even where the next one's first label is set."""
    examples = [(np.array([5, 6]), np.array([5, -100])), (np.array([7, 8]), np.array([7, 8]))]
    assert SFT().count(pack(examples)) == 1


def test_rows_without_terms():
    """An empty row and a fully masked one have no terms."""
    assert SFT().count(pack([])) == 0
    assert SFT().count(pack(samples([4, 3], learned=0.0))) == 0


def test_attention_gets_the_documents_boundaries():
    """Variable-length attention gets int32 boundaries and plain ints, and no mask."""
    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append((attention_mask, kwargs))
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", lambda *_args, **_kwargs: None)
    model = make(attention="spy")
    terms_of = SFT().bind(model, device=CPU)
    seen.clear()
    terms_of(pack(samples(LENGTHS)), [])
    mask, kwargs = seen[0]
    assert mask is None
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert kwargs[name].dtype == torch.int32
        assert kwargs[name].tolist() == [0, *np.cumsum(LENGTHS)]
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 13
    assert type(kwargs["max_length_q"]) is int


def test_read_only_arrays_are_copied():
    """Read-only views of a file are copied, without a warning."""
    batch = pack(samples([4, 3]))
    for array in vars(batch).values():
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    narrow = SimpleNamespace(**{**vars(batch), "input_ids": batch.input_ids.astype(np.int32)})
    assert SFT().bind(make(), device=CPU)(narrow, []).sum.isfinite()


def test_ids_outside_of_the_vocabulary_are_named():
    """An id outside of the vocabulary is an error with that id, not one inside a kernel."""
    batch = pack(samples([4, 3]))
    batch.input_ids[2] = 61
    with pytest.raises(PackedBatchError, match="input_ids holds the token id 61.*ends at 60"):
        SFT().bind(make(), device=CPU)(batch, [])


def by_hand(model, examples, s):
    """Return (summed loss, plain nll, right tokens, count), one sample at a time.
    Each variant is written out; gradients flow.
    """
    loss, plain, right, count = torch.zeros(()), 0.0, 0, 0
    for ids, labels in examples:
        logits = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0, :-1].float()
        targets = torch.tensor(labels)[1:]
        logits, targets = logits[targets != -100], targets[targets != -100]
        cost = torch.nn.functional.cross_entropy(
            logits, targets, reduction="none", label_smoothing=getattr(s, "label_smoothing", 0.0)
        )
        logps = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        if getattr(s, "loss", "nll") == "dft":
            cost = cost * logps.detach().exp()
        loss = loss + (cost + s.z_loss * logits.logsumexp(-1).square()).sum()
        plain -= float(logps.detach().sum())
        right += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    return loss, plain, right, count


VARIANTS = [
    SFT(SupervisedSettings(loss="dft")),
    SFT(SupervisedSettings(label_smoothing=0.2)),
    SFT(SupervisedSettings(z_loss=0.05)),
    SFT(SupervisedSettings(loss="dft", label_smoothing=0.1, z_loss=0.01)),
    Pretrain(PretrainSettings(label_smoothing=0.2, z_loss=0.05)),
]


@pytest.mark.parametrize("objective", VARIANTS, ids=str)
@pytest.mark.parametrize("architecture", ["llama-tied", "gemma2"])
def test_variants_equal_those_by_hand(objective, architecture):
    """Loss, gradients and figures of dft, smoothing and z-loss are those by hand.
    The plain likelihood is reported beside a loss that is something else.
    """
    model, examples = make(architecture), samples(LENGTHS)
    terms = objective.bind(model, device=CPU)(pack(examples), [])
    terms.sum.backward()
    mine = gradients(model)
    model.zero_grad()
    loss, plain, right, count = by_hand(model, examples, objective.settings)
    loss.backward()
    assert terms.sum.item() == pytest.approx(loss.item(), rel=1e-5)
    assert distance(mine, gradients(model)) < 1e-5
    found = objective.figures({name: float(terms.stats[name]) for name in objective.stats}, terms.count)
    assert found == pytest.approx({"accuracy": right / count, "nll": plain / count}, rel=1e-5)


def test_figures_of_the_plain_loss():
    """Beside the plain likelihood the figures have the accuracy alone."""
    found = evaluate(make(), [pack(samples(LENGTHS))], objective=SFT())
    *_, right, count = by_hand(make(), samples(LENGTHS), SupervisedSettings())
    assert found.figures == {"accuracy": right / count}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_mean_of_means(world_size):
    """normalize="trl" averages micro-batches' own means over all ranks that have one.
    The figure `nll` stays the global mean.
    """
    examples = samples(LENGTHS, seed=4, learned=0.7)
    parts = [examples[:1], examples[1:3], examples[3:], []]
    found = [by_hand(make(), part, SupervisedSettings()) for part in parts[:3]]
    means = [float(loss.detach()) / count for loss, _, _, count in found]

    def run(rank):
        mine = [pack(part) for part in parts[rank.rank :: world_size]]
        return evaluate(make(), mine, objective=SFT(SupervisedSettings(normalize="trl")), parallel=rank)

    for evaluation in on_threads(run, world_size):
        assert evaluation.loss == pytest.approx(sum(means) / 3, rel=1e-5)
        assert evaluation.figures["nll"] == pytest.approx(sum(f[1] for f in found) / evaluation.loss_count, rel=1e-5)
        assert abs(evaluation.loss / evaluation.figures["nll"] - 1) > 1e-3


def test_pretraining_does_not_depend_on_the_packing():
    """The same pieces of documents in other rows have the same loss and count.
    Every token but a piece's first is a term.
    """
    pieces = [(ids, ids) for ids, _ in samples((6, 11, 2, 9, 4))]
    one = evaluate(make(), [pack(pieces)], objective=Pretrain())
    other = evaluate(make(), [pack(pieces[3:]), pack([]), pack(pieces[2::-1])], objective=Pretrain())
    assert one.loss_count == other.loss_count == sum(len(ids) - 1 for ids, _ in pieces)
    assert one.loss == pytest.approx(other.loss, rel=1e-6)


def test_documents_of_a_block_that_is_one_sample_see_each_other():
    """A block packed as one sample has more terms and another loss.
    It learns its documents' first tokens too, from the document before.
    """
    first, second = (ids for ids, _ in samples((6, 5)))
    apart = evaluate(make(), [pack([(first, first), (second, second)])], objective=Pretrain())
    whole = np.concatenate([first, second])
    across = evaluate(make(), [pack([(whole, whole)])], objective=Pretrain())
    with torch.no_grad():
        total, count = naive(make(), [(whole, whole)])
    assert (apart.loss_count, across.loss_count) == (9, 10)
    assert across.loss == pytest.approx(total.item() / count, rel=1e-6)
