"""TRL's GOLD beside ours: its loss across tokenizers, and its alignment of two tokenizers' bytes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_algos.batches._aligned import span_positions
from forge_algos.losses import SharedTokens, aligned_distillation
from forge_data.aligning._align import align

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

V, W = 13, 17


def uld_loss(own, theirs, **changes):
    """TRL's loss with the settings that keep the whole answer; tokens predict what comes after them ("bayesian")."""
    from trl.experimental.gold.gold_trainer import ULDLoss

    config = {
        "uld_crossentropy_weight": 0.0, "uld_distillation_weight": 1.0, "uld_student_temperature": 1.7,
        "uld_teacher_temperature": 1.7, "uld_skip_student_eos": False, "uld_skip_teacher_eos": False, "use_extended_uld": True,
        "uld_token_merge_strategy": "bayesian", "uld_use_hybrid_loss": True, "beta": 0.5,
    }  # fmt: skip
    tokenizers = [SimpleNamespace(get_vocab=lambda vocab=vocab: vocab) for vocab in (own, theirs)]
    return ULDLoss(SimpleNamespace(**config | changes), *tokenizers)


def drawn(seed):
    """Draw a prompt and an answer of 24 bytes that two tokenizers cut at places of their own."""
    g = np.random.default_rng(seed)
    cuts = [np.append(np.sort(g.choice(np.arange(1, 24), size, replace=False)), 24) for size in (9, 12)]
    ids = [g.integers(0, width, 3 + len(cut)) for width, cut in zip((V, W), cuts, strict=True)]
    logits = [
        torch.from_numpy(2 * g.standard_normal((1, len(each), width))).float() for each, width in zip(ids, (V, W), strict=True)
    ]
    return cuts, ids, logits


@pytest.mark.parametrize("seed", range(20))
def test_alignment(seed):
    """Two tokenizers' cuts of one text give TRL's groups of tokens."""
    from trl.experimental.gold.gold_trainer import ULDLoss

    cuts, _, _ = drawn(seed)
    offsets = [np.stack([np.append(0, cut[:-1]), cut], 1).tolist() for cut in cuts]
    groups = ULDLoss._align_by_byte_offsets(*offsets)
    text = bytes(range(97, 121))
    words = [[b"prompt", *(text[a:b] for a, b in each)] for each in offsets]
    spellings = [
        SimpleNamespace(of=lambda ids, words=each: [words[at] for at in ids.tolist()], special=frozenset()) for each in words
    ]
    ids = [np.arange(len(each), dtype=np.int32) for each in words]
    samples = [[(each, np.where(each > 0, each, -100))] for each in ids]
    (found,) = align(*samples, *spellings)
    pairs = [(list(range(a - 1, b - 1)), list(range(c - 1, d - 1))) for a, b, c, d in found.spans.tolist()]
    assert pairs == list(zip(*groups, strict=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.0, "uld_hybrid_matched_weight": 0.4, "uld_hybrid_unmatched_weight": 2.0},
        {"beta": 1.0},
        {"uld_use_hybrid_loss": False},
    ],
)
def test_loss(changes, seed):
    """The loss of a sample and its gradients are TRL's, for spans of one token and of several."""
    names = [f"t{at}" for at in range(30)]
    g = np.random.default_rng(seed)
    own, theirs = ({str(n): at for at, n in enumerate(g.permutation(names)[:width])} for width in (V, W))
    cuts, ids, (s, t) = drawn(seed)
    s.requires_grad_()
    labels = [torch.from_numpy(np.append([-100] * 3, each[3:]))[None] for each in ids]
    offsets = [
        torch.from_numpy(np.concatenate([np.zeros((3, 2)), np.stack([np.append(0, cut[:-1]), cut], 1)]).astype(np.int64))[None]
        for cut in cuts
    ]
    tokens = [torch.from_numpy(each)[None] for each in ids]
    expected = uld_loss(own, theirs, **changes)(s, t, *labels, *tokens, *offsets)

    ends = np.intersect1d(*cuts)
    spans = [np.stack([np.append(0, (at := np.searchsorted(cut, ends) + 1)[:-1]), at], 1) + 3 for cut in cuts]
    rows = [span_positions(each, part) for each, part in zip(ids, spans, strict=True)]
    before = []
    for logits, found in zip((s, t), rows, strict=True):
        logps = (logits[0] / 1.7).log_softmax(-1)[found.before, found.targets]
        before.append(torch.zeros(len(ends)).index_add(0, torch.from_numpy(found.of), logps))
    shared = [name for name in own if name in theirs]
    both = SharedTokens(*(torch.tensor([vocab[name] for name in shared]) for vocab in (own, theirs)))
    weights = changes.get("uld_hybrid_matched_weight"), changes.get("uld_hybrid_unmatched_weight")
    terms = aligned_distillation(
        s[0, rows[0].last],
        t[0, rows[1].last],
        shared=both if changes.get("uld_use_hybrid_loss", True) else None,
        student_before=before[0],
        teacher_before=before[1],
        beta=changes.get("beta", 0.5),
        temperature=1.7,
        weights=None if None in weights else weights,
    )
    assert terms.count == len(ends)
    assert any(len(found.of) for found in rows)
    torch.testing.assert_close(terms.sum / terms.count, expected, rtol=1e-5, atol=1e-6)
    ours, theirs_ = (torch.autograd.grad(each, s, retain_graph=True)[0] for each in (terms.sum / terms.count, expected))
    torch.testing.assert_close(ours, theirs_, rtol=1e-4, atol=1e-6)


def tokenizer_of(vocabulary, corpus):
    """A byte-level one whose template writes turns in marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    specials, alphabet = ["<pad>", "<end>", "<ask>"], pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=specials, initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    made.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<ask>{{ m['content'] }}<ask>{% else %}{{ m['content'] }}<end>"
        "{% endif %}{% endfor %}"
    )
    return made


@pytest.mark.parametrize("loss", ["gold", "uld"])
def test_the_models_own_completions(loss, tmp_path):
    """Loss and gradients of `GOLDTrainer.compute_loss` on completions without an end, with lmbda=1.

    TRL is given the teacher's own prompt: it would hand it the student's, in the marks of the student's template.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.experimental.gold.gold_trainer import GOLDTrainer, build_teacher_inputs_from_texts

    from forge.tasks.items._own_taught import OwnTaught
    from forge_algos import AlignedDistill, DistillSettings
    from forge_data import InMemoryRows, prepare_taught, shared_tokens

    answers = ["the apple is very red, she said", "because the sun shines on the naïve melon", "no 🙂 no no"]
    own, other = tokenizer_of(290, answers[:1]), tokenizer_of(310, answers[1:])
    other.save_pretrained(tmp_path / "teacher")
    rows = [{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": each}]} for each in answers]
    store = prepare_taught(InMemoryRows.of(rows), own, other, tmp_path / "store", progress=False)
    models = []
    for seed, tokenizer in ((1, own), (2, other)):
        torch.manual_seed(seed)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        models.append(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **shape)).eval())
    items = OwnTaught(store, str(tmp_path / "teacher"), 64)
    settings = DistillSettings(teacher_path="loaded", loss=loss, on_policy=1.0)
    ends = shared_tokens(own, other, store.teacher_ends) if loss == "gold" else (np.zeros(0, np.int64),) * 2
    objective = AlignedDistill(settings=settings, teacher=models[1], shared=ends).bind(models[0], device=torch.device("cpu"))
    calls = {"uld_use_hybrid_loss": loss == "gold", "uld_student_temperature": 1.0, "uld_teacher_temperature": 1.0}
    compared = uld_loss(own.get_vocab(), other.get_vocab(), **calls)
    for at, text in enumerate(("very well, he said", "the melon 🙂 is red", "naïve")):
        ids = np.array(own(text)["input_ids"], np.int32)
        prompt = items.prompt(at)
        student = torch.from_numpy(np.append(prompt, ids).astype(np.int64))[None]
        labels = torch.where(torch.arange(student.shape[1]) < len(prompt), -100, student)
        given = {"input_ids": student, "labels": labels, "attention_mask": torch.ones_like(student)}
        trainer = SimpleNamespace(
            use_uld_loss=True, teacher_tokenizer=other, uld_loss_fn=compared, _tokenizer=own, _teacher_processor=None,
            accelerator=SimpleNamespace(device="cpu"), teacher_model=models[1], _get_model_forward_kwargs=lambda _: {},
            args=SimpleNamespace(gradient_accumulation_steps=1), _matched_sum=0, _unmatched_sum=0, _matched_step_eq=0,
            _unmatched_step_eq=0,
        )  # fmt: skip
        GOLDTrainer._maybe_add_completion_byte_offsets(trainer, given)
        given |= {"original_prompt_text": ["<ask>why?<ask>"], "original_completion_text": [text]}
        theirs = build_teacher_inputs_from_texts(other, ["<ask>why?<ask>"], [text])
        read, figures = items.read([at], [ids], [False])
        assert figures["rollout_compared"] == 1
        assert [*other("<ask>why?<ask>")["input_ids"], *read[0].theirs.ids] == theirs[0][0, :-1].tolist()
        expected = GOLDTrainer.compute_loss(trainer, models[0], given)
        wanted = torch.autograd.grad(expected, list(models[0].parameters()))
        terms = objective(items.with_completions([at], read))
        found = torch.autograd.grad(terms.sum / terms.count, list(models[0].parameters()))
        assert (terms.sum / terms.count).item() == pytest.approx(expected.item(), rel=1e-5)
        for ours, each in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, each, rtol=1e-4, atol=1e-6)
