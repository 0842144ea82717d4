"""Losses over all texts of a step equal a naive computation, one unpadded text at a time, however the step is cut."""

import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st

from forge_algos import (
    ALONE,
    AdapterSettings,
    BatchAllTriplet,
    Contrastive,
    ContrastiveBatch,
    LabelledTexts,
    LossError,
    OptimizerSettings,
    PackedBatchError,
    adapt,
    evaluate,
    keep_documents_apart,
    make_optimizer,
    schedule,
    train,
)

from ...lanes import ci_keeps
from ...ranks import run_on_ranks
from ..oracle import CPU, SIZES, distance, gradients, pack, samples

LENGTHS = (5, 3, 9, 1, 7, 4, 6, 2, 8, 3, 5, 2, 6)
"""Of the texts of five rows: query, positive, and 0 to 2 hard negatives."""
ROWS = (3, 2, 4, 2, 2)
LABELS = np.array([3, 0, 3, 1, 0, 1, 3, 0, 2, 1, 3, 0, 1])


def encoder(kind="Llama", **more):
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, f"{kind}Model")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def texts_of(same=False):
    documents = samples(LENGTHS)
    if same:
        # The positive of the fourth row is that of the first.
        documents[10] = documents[1]
    return documents


def pairs(cuts, *, same=False):
    """Return micro-batches of the rows, cut at these places."""
    documents, starts = texts_of(same), [0, *itertools.accumulate(ROWS)]
    found = []
    for begin, end in itertools.pairwise(cuts):
        first = np.array(starts[begin:end], np.int64) - starts[begin]
        found.append(ContrastiveBatch(row=pack(documents[starts[begin] : starts[end]]), queries=first, positives=first + 1))
    return found


def labelled(cuts):
    documents = texts_of()
    return [LabelledTexts(row=pack(documents[begin:end]), labels=LABELS[begin:end]) for begin, end in itertools.pairwise(cuts)]


def naive_embeddings(model, pooling, *, same=False):
    """Embed one text at a time by plain transformers, without padding, and normalise."""
    found = []
    for ids, _ in texts_of(same):
        hidden = model(input_ids=torch.tensor(np.asarray(ids, np.int64))[None], use_cache=False).last_hidden_state[0]
        one = {"last": lambda h: h[-1], "cls": lambda h: h[0], "mean": lambda h: h.mean(0)}[pooling](hidden)
        found.append(one / one.norm())
    return torch.stack(found)


def naive_infonce(model, pooling, temperature=0.05, *, same=False, exclude=False):
    """Compute MultipleNegativesRankingLoss over all rows by its formula, and accuracy and reciprocal rank."""
    embeddings, starts = naive_embeddings(model, pooling, same=same), [0, *itertools.accumulate(ROWS)]
    queries = starts[:-1]
    candidates = [place for place in range(len(LENGTHS)) if place not in queries]
    documents = [np.asarray(ids).tolist() for ids, _ in texts_of(same)]
    losses, right, reciprocal = [], 0, 0.0
    for query in queries:
        kept = [c for c in candidates if c == query + 1 or not exclude or documents[c] != documents[query + 1]]
        scores = torch.stack([embeddings[query] @ embeddings[c] for c in kept]) / temperature
        own = kept.index(query + 1)
        losses.append(-scores.log_softmax(0)[own])
        place = int((scores >= scores[own]).sum())
        right, reciprocal = right + (place == 1), reciprocal + 1 / place
    return torch.stack(losses).mean(), right / len(queries), reciprocal / len(queries)


def naive_triplets(model, pooling, margin):
    """Compute BatchAllTripletLoss by its formula, one triplet at a time."""
    embeddings = naive_embeddings(model, pooling)
    found = []
    for a, p, n in itertools.permutations(range(len(LABELS)), 3):
        if LABELS[a] == LABELS[p] != LABELS[n]:
            loss = (embeddings[a] - embeddings[p]).norm() - (embeddings[a] - embeddings[n]).norm() + margin
            if loss > 1e-16:
                found.append(loss)
    return torch.stack(found).mean()


def step(model, micro_batches, objective, *, rate=1e-9, steps=1, seed=None):
    settings = OptimizerSettings(learning_rate=rate)
    optimizer = make_optimizer(model, settings)
    scheduler = schedule(optimizer, settings, num_steps=steps)
    if seed is not None:
        torch.manual_seed(seed)
    return list(
        train(model, [micro_batches] * steps, objective=objective, optimizer=optimizer, scheduler=scheduler, max_grad_norm=0.0)
    )


cuts_of_rows = st.lists(st.integers(0, len(ROWS)), max_size=5).map(lambda inner: (0, *sorted(inner), len(ROWS)))
cuts_of_texts = st.lists(st.integers(0, len(LABELS)), max_size=4).map(lambda inner: (0, *sorted(inner), len(LABELS)))


@settings(max_examples=40)
@given(cuts=cuts_of_rows, pooling=st.sampled_from(["last", "mean", "cls"]))
def test_any_cut_has_the_loss_and_gradients_of_one_text_at_a_time(cuts, pooling):
    """Loss to 1e-6 and gradients to 1e-5 of autograd through all texts at once; micro-batches may be empty."""
    plain, model = encoder(), encoder()
    loss, accuracy, mrr = naive_infonce(plain, pooling)
    loss.backward()
    (output,) = step(model, pairs(cuts), Contrastive(pooling=pooling))
    assert output.loss == pytest.approx(loss.item(), rel=1e-6)
    assert output.loss_count == output.samples == len(ROWS)
    assert output.figures == pytest.approx({"accuracy": accuracy, "mrr": mrr})
    assert distance(gradients(model), gradients(plain)) < 1e-5


@pytest.mark.slow
@settings(max_examples=24)
@given(cuts=cuts_of_texts, margin=st.sampled_from([0.05, 5.0]))
def test_any_cut_has_all_triplets(cuts, margin):
    """Batch-all triplets: the mean of those above 0, of all texts of the step."""
    plain, model = encoder(), encoder()
    loss = naive_triplets(plain, "mean", margin)
    loss.backward()
    (output,) = step(model, labelled(cuts), BatchAllTriplet(pooling="mean", margin=margin))
    assert output.loss == pytest.approx(loss.item(), rel=1e-5)
    assert output.loss_count == len(LABELS)
    assert distance(gradients(model), gradients(plain)) < 1e-4


@pytest.mark.parametrize("cuts", [(0, 5), (0, 2, 3, 5)])
def test_an_equal_text_may_be_no_negative(cuts):
    """With exclude_same_text a candidate with the positive's tokens leaves the sum; without it is one."""
    for exclude in (False, True):
        plain, model = encoder(), encoder()
        loss, accuracy, _ = naive_infonce(plain, "last", same=True, exclude=exclude)
        loss.backward()
        (output,) = step(model, pairs(cuts, same=True), Contrastive(exclude_same_text=exclude))
        assert output.loss == pytest.approx(loss.item(), rel=1e-6)
        assert output.figures["accuracy"] == pytest.approx(accuracy)
        assert distance(gradients(model), gradients(plain)) < 1e-5
    assert naive_infonce(encoder(), "last", same=True)[0] > naive_infonce(encoder(), "last", same=True, exclude=True)[0]


def test_an_evaluation_does_not_depend_on_its_batches():
    """Loss, accuracy and MRR over all held-out candidates, without dropout, whatever the batches."""
    model = encoder(attention_dropout=0.3)
    wanted, accuracy, mrr = naive_infonce(encoder(), "mean")
    for cuts in ((0, 5), (0, 1, 2, 4, 5)):
        found = evaluate(model, pairs(cuts), objective=Contrastive(pooling="mean"))
        assert found.loss == pytest.approx(wanted.item(), rel=1e-6)
        assert found.figures == pytest.approx({"accuracy": accuracy, "mrr": mrr})


def test_dropout_is_the_same_in_both_forwards():
    """The gradient is that of the loss which was reported: moved along it, the loss falls by its square, at the same seed."""
    cuts = (0, 2, 5)
    model = encoder(attention_dropout=0.4).double()
    (first,) = step(model, pairs(cuts), Contrastive(temperature=0.5), seed=3)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    size = sum(float((g * g).sum()) for g in grads.values())
    h = 2e-4 / size**0.5  # norms are computed in float32
    found = []
    for sign in (1, -1):
        moved = encoder(attention_dropout=0.4).double()
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p.add_(grads[name], alpha=sign * h)
        (output,) = step(moved, pairs(cuts), Contrastive(temperature=0.5), seed=3)
        found.append(output.loss)
    assert (found[0] - found[1]) / (2 * h) == pytest.approx(size, rel=1e-3)
    (again,) = step(encoder(attention_dropout=0.4).double(), pairs(cuts), Contrastive(temperature=0.5), seed=4)
    assert again.loss != pytest.approx(first.loss, rel=1e-6)


def test_one_micro_batch_is_run_once():
    """A second forward is made only where a step has several micro-batches."""
    for cuts, forwards in (((0, 5), 1), ((0, 3, 5), 4)):
        model, calls = encoder(), []
        objective = Contrastive()
        objective.bind(model, device=CPU)  # which tries two texts
        handle = model.embed_tokens.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        step(model, pairs(cuts), objective)
        handle.remove()
        assert len(calls) == forwards


OTHERS = {
    "Bert": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_texts_that_a_row_would_mix_are_run_alone(kind):
    """Bidirectional encoders and models without packed rows have the same loss, each text alone."""
    vocabulary = {"vocab_size": SIZES["vocab_size"], "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**OTHERS[kind] | vocabulary)

    def make():
        torch.manual_seed(1)
        more = {"add_pooling_layer": False} if kind == "Bert" else {}
        return getattr(transformers, f"{kind}Model")(config, **more).train()

    plain, model = make(), make()
    packed, why = keep_documents_apart(model, device=CPU)
    assert packed or "alone" in why
    assert packed == (kind == "GPT2")
    loss, *_ = naive_infonce(plain, "mean")
    loss.backward()
    (output,) = step(model, pairs((0, 2, 5)), Contrastive(pooling="mean"))
    assert output.loss == pytest.approx(loss.item(), rel=1e-6)
    assert distance(gradients(model), gradients(plain)) < 1e-5


@pytest.mark.slow
def test_lora_with_dropout_trains_and_reports_what_it_learns():
    """Low-rank adapters on a model without a head: PEFT's kind is FEATURE_EXTRACTION; the loss falls."""
    torch.manual_seed(0)
    adapted = adapt(encoder(), AdapterSettings(adapter="lora", lora_r=4, lora_dropout=0.1)).model
    assert adapted.active_peft_config.task_type == "FEATURE_EXTRACTION"
    outputs = step(adapted, pairs((0, 2, 5)), Contrastive(), rate=1e-2, steps=20)
    assert outputs[-1].loss < 0.5 * outputs[0].loss


def test_what_cannot_be_embedded_is_refused():
    """A model with a head, and batches whose queries and positives do not fit, are errors that say so."""
    with_head = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(LossError, match="AutoModel"):
        Contrastive().bind(with_head, device=CPU)
    (batch,) = pairs((0, 5))
    objective = Contrastive()
    for queries, positives in (([0, 0], [1, 1]), ([0], [99]), ([0, 3], [3, 4]), ([0], [1, 2])):
        wrong = ContrastiveBatch(row=batch.row, queries=np.array(queries), positives=np.array(positives))
        with pytest.raises(PackedBatchError, match="positives"):
            objective.facts(wrong)
    with pytest.raises(PackedBatchError, match="labels"):
        BatchAllTriplet().facts(LabelledTexts(row=batch.row, labels=np.array([1, 2])))
    with pytest.raises(ValueError, match="temperature"):
        Contrastive(temperature=0.0)
    with pytest.raises(ValueError, match="margin"):
        BatchAllTriplet(margin=-1.0)


CUTS = {0: (0, 1, 3), 1: (3, 5, 5)}
"""Rows of each of two ranks, in two micro-batches; the second rank's last is empty."""
ONE_EACH = {0: (0, 0), 1: (0, 5)}
"""One micro-batch a rank, the first rank's empty."""


def on_rank(ranks, folder, strategies):
    """Return of each strategy and cut the loss, figures and gradients, and an evaluation's."""
    import forge_dist

    found = []
    for name, cuts in strategies:
        strategy = forge_dist.make_strategy(forge_dist.StrategySettings(strategy=name), ranks, device=CPU, adapter=False)
        model = strategy.load(folder, dtype=torch.float32, attention="sdpa", task="embedding").train()
        config = OptimizerSettings(learning_rate=1e-9)
        model, optimizer = strategy.wrap(model, lambda module, config=config: make_optimizer(module, config))
        given = pairs(cuts[ranks.rank])
        objective = Contrastive(pooling="mean")
        before = evaluate(model, given, objective=objective, device=CPU, parallel=strategy)
        (output,) = train(
            model, [given], objective=objective, optimizer=optimizer, scheduler=schedule(optimizer, config, 1),
            max_grad_norm=0.0, device=CPU, parallel=strategy,
        )  # fmt: skip
        found.append((output.loss, before.loss, dict(output.figures), before.figures, output.grad_norm))
    return found


@pytest.mark.slow
@pytest.mark.together
@pytest.mark.parametrize("name", ci_keeps(["ddp", "fsdp2"], ["ddp", "fsdp2", "zero2", "zero3"]))
def test_two_ranks_have_the_loss_and_gradients_of_one(name, tmp_path):
    """Candidates of all ranks count for each query, whatever a rank has: two micro-batches, one, or none."""
    pytest.importorskip("forge_dist", reason="forge_dist is not installed beside forge_algos")
    if name.startswith("zero"):
        pytest.importorskip("deepspeed", reason="ZeRO is DeepSpeed's")
    plain = encoder()
    plain.save_pretrained(tmp_path / "model")
    loss, accuracy, mrr = naive_infonce(plain, "mean")
    loss.backward()
    norm = sum(float((p.grad**2).sum()) for p in plain.parameters()) ** 0.5
    for results in run_on_ranks(on_rank, 2, str(tmp_path / "model"), [(name, CUTS), (name, ONE_EACH)]):
        for trained, evaluated, figures, before, grad_norm in results:
            assert trained == pytest.approx(loss.item(), rel=1e-6)
            assert evaluated == pytest.approx(loss.item(), rel=1e-6)
            assert figures == pytest.approx({"accuracy": accuracy, "mrr": mrr})
            assert before == pytest.approx(figures)
            assert grad_norm == pytest.approx(norm, rel=1e-5)


def test_in_a_loop_of_ones_own_a_step_is_begun():
    """Without `begin` a batch was taken for that of a rank without work, of loss 0; with it the loss is `train`'s."""
    (batch,), objective = pairs((0, 5)), Contrastive()
    bound = objective.bind(encoder(), device=CPU)
    with pytest.raises(LossError, match=r"call begin\(micro_batches, forge_algos.ALONE\)"):
        bound(batch, [])
    bound.begin([batch], ALONE)
    terms = bound(batch, [])
    assert terms.count == 5
    assert terms.sum.item() / 5 == pytest.approx(evaluate(encoder(), [batch], objective=objective).loss, rel=1e-5)
