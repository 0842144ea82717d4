"""`GenerateSampler`: its distribution, its dependence on the seed alone, no side effects."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    CpmAntConfig,
    CpmAntForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from forge_algos import AdapterSettings, RolloutError, adapt, guard_packed
from forge_algos.isolation import _compare
from forge_algos.online import GenerateSampler
from forge_algos.online.sampling._draw import RepetitionPenalty

from ....lanes import ci_keeps
from ...digits import END, PAD, START, VOCAB, digit_model, prompts, sampler
from ...threads import on_threads

SETTINGS = {"num_generations": 3, "max_new_tokens": 5, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 4}


def exact(model, prompt, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """Return the probability of every completion of up to two tokens: {ids: p}."""
    model.eval()

    def following(ids):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        for token in set(ids):
            logits[token] *= repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
        logits /= temperature
        if top_k:
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        if top_p < 1:
            ordered, order = logits.softmax(0).sort(descending=True)
            logits[order[ordered.cumsum(0) - ordered >= top_p]] = -torch.inf
        probabilities = logits.softmax(0)
        logits[probabilities < min_p * probabilities.max()] = -torch.inf
        return logits.softmax(0).tolist()

    found = {}
    for first, p in enumerate(following(list(prompt))):
        if first == END or p == 0:
            found[(first,)] = p
            continue
        for second, q in enumerate(following([*prompt, first])):
            found[first, second] = p * q
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "warps",
    ci_keeps(
        [{"top_k": 3}, {"temperature": 2.0, "top_p": 0.9}, {"min_p": 0.2, "repetition_penalty": 1.7, "temperature": 0.8}],
        [
            {},
            {"temperature": 0.5},
            {"top_k": 3},
            {"top_p": 0.6},
            {"temperature": 2.0, "top_p": 0.9},
            {"min_p": 0.3},
            {"repetition_penalty": 0.6},
            {"min_p": 0.2, "repetition_penalty": 1.7, "temperature": 0.8},
        ],
    ),
)
def test_completions_come_with_their_probability(warps):
    """4,000 completions of each of two prompts have the probabilities written out.
    Prompts of different length, in one left-padded batch.
    """
    model = digit_model(size=0.3)
    asked = [np.array([START, 3, 13]), np.array([START, 1, 4, 1, 5, 9, 13])]
    each = 4000
    options = SETTINGS | {"num_generations": each, "max_new_tokens": 2} | warps
    found = sampler(model, batch_tokens=100_000).sample(asked, **options)
    for number, prompt in enumerate(asked):
        expected = exact(model, prompt, **warps)
        counts = {}
        for completion in found[number * each : (number + 1) * each]:
            counts[tuple(completion.ids.tolist())] = counts.get(tuple(completion.ids.tolist()), 0) + 1
        assert all(expected[ids] > 0 for ids in counts)
        distance = sum(abs(counts.get(ids, 0) / each - p) for ids, p in expected.items()) / 2
        # What 4,000 draws from the very distribution are away from it: about half the sum of sqrt(2p(1-p)/πn), and a little.
        noise = sum((2 * p * (1 - p) / (np.pi * each)) ** 0.5 for p in expected.values()) / 2
        assert distance < 1.5 * noise + 1e-3


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 3.0}])
def test_a_completion_does_not_depend_on_the_batch(more):
    """One row at a time, all at once, or some of the prompts: the tokens are the same.
    A penalty of what a row has already does not see the padding before it, whose id is one of the vocabulary.
    """
    model, asked = digit_model(size=0.3), [p.input_ids for p in prompts(5)]
    options, own = SETTINGS | more, {"pad_id": 4}
    whole = sampler(model, **own).sample(asked, **options)
    singly = sampler(model, batch_tokens=1, **own).sample(asked, **options)
    later = sampler(model, **own).sample(asked[3:], **options, numbers=range(3, len(asked)))
    assert [c.ids.tolist() for c in whole] == [c.ids.tolist() for c in singly]
    assert [c.ids.tolist() for c in whole[9:]] == [c.ids.tolist() for c in later]
    assert len({tuple(c.ids.tolist()) for c in whole}) > 5


@pytest.mark.parametrize("penalty", [1.4, 0.7])
def test_the_penalty_is_generates_own(penalty):
    """Scores of rows without padding are those of transformers' processor, at every step, to the bit."""
    from transformers import RepetitionPenaltyLogitsProcessor

    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (3, 9), generator=random)
    ours, theirs = RepetitionPenalty(penalty, ids[:, :5], torch.ones(3, 5)), RepetitionPenaltyLogitsProcessor(penalty)
    for width in range(5, 10):
        scores = torch.randn(3, VOCAB, generator=random) * 5
        assert torch.equal(ours(ids[:, :width], scores), theirs(ids[:, :width], scores))


def test_ids_without_a_score_are_passed_over_by_the_penalty():
    """A head may have fewer scores than there are embeddings."""
    ids = torch.tensor([[1, 7]])
    assert RepetitionPenalty(2.0, ids, torch.ones(1, 2))(ids, torch.tensor([[2.0, 2.0, -2.0]])).tolist() == [[2.0, 1.0, -2.0]]


def sliding_model():
    """Return a model of which one layer sees four tokens, fewer than a prompt has, and the other all."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    layers = ["sliding_attention", "full_attention"]
    config = Qwen3Config(
        vocab_size=16, **sizes, num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=4, layer_types=layers
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Qwen3ForCausalLM(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize(("make", "lengths"), [(partial(digit_model, size=0.3), (2, 5, 9)), (sliding_model, (3, 8, 12))])
def test_a_prompt_is_computed_once_for_its_completions(make, lengths):
    """All tokens of a prompt but the last are one row for three completions, which are those of rows apart."""
    model, random = make(), np.random.default_rng(1)
    asked = [np.array([START, *random.integers(0, 10, length - 1)]) for length in lengths]
    seen = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, options: seen.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    apart = sampler(model, batch_tokens=1).sample(asked, **SETTINGS)
    assert sorted({shape for shape in seen if shape[1] > 1}) == [(1, length) for length in lengths]
    seen.clear()
    together = sampler(model).sample(asked, **SETTINGS)
    hook.remove()
    begins = seen.index((3, max(lengths) - 1))  # behind those of made-up prompts
    assert seen[begins + 1] == (9, 1)
    assert [c.ids.tolist() for c in together] == [c.ids.tolist() for c in apart]
    assert len({tuple(c.ids.tolist()) for c in together}) > 5


def qwen_vl_model():
    """Return a model that remembers a number of each row's positions beside its cache."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 32, "embed_dim": 16, "num_heads": 2, "patch_size": 14}
    text = {"vocab_size": 16, **sizes, "num_key_value_heads": 2, "rope_parameters": rope}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))


def cpmant_model():
    """Return a model that counts a token's position otherwise when a cache comes with it."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 64, "num_hidden_layers": 2}
    return CpmAntForCausalLM(CpmAntConfig(vocab_size=16, **sizes))


def longrope_model():
    """Return a model whose rotary positions are others where a forward has more than eleven."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    factors = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "original_max_position_embeddings": 11}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes, max_position_embeddings=44, rope_parameters=rope))


def dynamic_model():
    """Return a model whose rotary frequencies grow with the longest forward of more than sixteen positions."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes, max_position_embeddings=16, rope_parameters=rope))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model


def test_completions_do_not_depend_on_longer_ones_before():
    """Dynamic NTK keeps frequencies that grew: a prompt is answered as before, and so is it beside a longer one."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = dynamic_model()
    short, long = np.random.default_rng(1).integers(0, 10, 18), np.random.default_rng(2).integers(0, 10, 60)
    first = sampler(model).sample([short], **SETTINGS)
    sampler(model).sample([long], **SETTINGS)
    again = sampler(model).sample([short], **SETTINGS)
    beside = sampler(model).sample([short, long], **SETTINGS)
    assert [c.ids.tolist() for c in again] == [c.ids.tolist() for c in first]
    assert [c.ids.tolist() for c in beside[:3]] == [c.ids.tolist() for c in first]
    rotary = model.model.rotary_emb
    assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)


@pytest.mark.parametrize("make", [qwen_vl_model, cpmant_model, longrope_model])
def test_a_prompt_is_not_shared_where_that_gives_something_else(make):
    """What keeps more of a prompt than keys and values, or counts positions by what a forward has, computes each row."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = make()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    asked = list(np.random.default_rng(1).integers(0, 10, (3, 12)))
    apart = sampler(model, batch_tokens=1).sample(asked, **SETTINGS)
    together = sampler(model).sample(asked, **SETTINGS)
    assert [c.ids.tolist() for c in together] == [c.ids.tolist() for c in apart]


def test_a_prompt_is_shared_where_few_digits_differ(monkeypatch):
    """In bfloat16 another number of rows may round otherwise, though `generate` gives its logits in float32."""
    found = []
    equal = _compare.equal_within_rounding
    monkeypatch.setattr(_compare, "equal_within_rounding", lambda *both, fine: found.append(fine) or equal(*both, fine=fine))
    for model in (digit_model(size=0.3), digit_model(size=0.3).bfloat16()):
        sampler(model).sample([np.array([START, 3, 13])], **SETTINGS)
    assert found == sorted(found, reverse=True)
    assert set(found) == {True, False}


def test_a_prompt_is_not_shared_in_few_digits_either():
    """A CPM-Ant of some depth counts positions otherwise before a cache, by more than bfloat16 rounds."""
    for seed in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            sizes = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 64, "num_hidden_layers": 24}
            made = sampler(CpmAntForCausalLM(CpmAntConfig(vocab_size=16, **sizes)).bfloat16())
        made.sample([np.array([START, 3, 1, 13])], **SETTINGS)
        assert made._tried
        assert not made._shares


def bart_model():
    """Return a decoder that counts the positions of padding."""
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    return BartForCausalLM(BartConfig(vocab_size=16, **sizes, max_position_embeddings=64, init_std=0.5))


@pytest.mark.parametrize(("make", "pads"), [(partial(digit_model, size=0.3), True), (bart_model, False)])
def test_prompts_are_padded_only_where_that_gives_the_same(make, pads):
    """Prompts of two lengths are one batch, or two where padding moves positions: completions are those of rows apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    asked = [np.array([START, 3, 1, 13]), np.array([START, 4, 1, 5, 9, 2, 6, 13]), np.array([START, 2, 7, 13])]
    seen = []

    class Counted(GenerateSampler):
        def _generate(self, prompts, *batch):
            seen.append([len(prompt.ids) for prompt in prompts])
            return super()._generate(prompts, *batch)

    options = {"eos_ids": [END], "pad_id": PAD}
    together = Counted(model, **options, batch_tokens=1000).sample(asked, **SETTINGS)
    assert seen == ([[8] * 3 + [4] * 6] if pads else [[8] * 3, [4] * 6])
    apart = Counted(model, **options, batch_tokens=1).sample(asked, **SETTINGS)
    assert [c.ids.tolist() for c in together] == [c.ids.tolist() for c in apart]


def rwkv_model():
    """Return a model that adds the last token of every row of a batch to the next one of each."""
    return RwkvForCausalLM(RwkvConfig(vocab_size=16, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "largest"), [(partial(digit_model, size=0.3), 6), (rwkv_model, 1)])
def test_rows_share_a_batch_only_where_that_gives_the_same(make, largest, dtype):
    """RWKV mixes equally long rows: each is sampled by itself, and completions are those of rows apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.to(dtype)
    asked, seen = [np.array([START, 3, 1, 13]), np.array([START, 4, 1, 13])], []

    class Counted(GenerateSampler):
        def _generate(self, prompts, *batch):
            seen.append(len(prompts))
            return super()._generate(prompts, *batch)

    options = {"eos_ids": [END], "pad_id": PAD}
    together = Counted(model, **options, batch_tokens=1000).sample(asked, **SETTINGS)
    assert max(seen) == largest
    if dtype == torch.float32:
        apart = Counted(model, **options, batch_tokens=1).sample(asked, **SETTINGS)
        assert [c.ids.tolist() for c in together] == [c.ids.tolist() for c in apart]


def test_a_prompt_of_one_token_has_nothing_to_share():
    """Beside longer prompts, whose first tokens are padding where it has none: no row begins with padding alone."""
    model, asked = digit_model(size=0.3), [np.array([START]), np.array([START, 3, 1, 13])]
    together = sampler(model).sample(asked, **SETTINGS)
    apart = sampler(model, batch_tokens=1).sample(asked, **SETTINGS)
    assert [c.ids.tolist() for c in together] == [c.ids.tolist() for c in apart]


def test_the_end_is_kept_and_marked():
    """A finished completion ends in its only end token; one cut off has all its tokens."""
    found = sampler(digit_model()).sample([p.input_ids for p in prompts(8)], **SETTINGS)
    assert {c.finished for c in found} == {True, False}
    for completion in found:
        ends = np.flatnonzero(completion.ids == END).tolist()
        assert ends == ([len(completion.ids) - 1] if completion.finished else [])
        assert completion.finished or len(completion.ids) == 5
        assert completion.ids.dtype == np.int32


def test_nothing_else_changes():
    """Modes, torch's random state and the model's generation settings are as before.
    Those settings are not read.
    """
    model, asked = digit_model(size=0.3), [p.input_ids for p in prompts(2)]
    plain = sampler(model).sample(asked, **SETTINGS)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    own = model.generation_config
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    again = sampler(model).sample(asked, **SETTINGS)
    assert [c.ids.tolist() for c in again] == [c.ids.tolist() for c in plain]
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in model.modules()] == modes
    assert model.generation_config is own
    assert model.generation_config.top_k == 1


def test_an_adapter_samples_under_the_guard():
    """Inside the guard of `train`, a LoRA model samples with its adapter.
    Otherwise than without.
    """
    model = adapt(digit_model(size=0.3), AdapterSettings(adapter="lora", lora_r=4)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1.0)
    asked = [p.input_ids for p in prompts(3)]
    with guard_packed(model):
        adapted = sampler(model).sample(asked, **SETTINGS)
        alone = sampler(model).sample(asked[:1], **SETTINGS)
    with model.disable_adapter():
        base = sampler(model).sample(asked, **SETTINGS)
    assert [c.ids.tolist() for c in adapted] != [c.ids.tolist() for c in base]
    assert [c.ids.tolist() for c in alone] == [c.ids.tolist() for c in adapted[:3]]


def test_ranks_make_equally_many_forwards():
    """With divided weights a rank with fewer batches runs on until the last rank is done.
    So does one with none.
    """
    asked = [p.input_ids for p in prompts(4)]
    expected = sampler(digit_model(size=0.3)).sample(asked, **SETTINGS)
    shares = [(0, 4), (4, 4)]

    class Counted(GenerateSampler):
        """A model that counts its forwards, without transformers' all-reduce.
        That needs a process group.
        """

        calls = 0

        def _generate(self, *batch):
            self.calls += 1
            self._synced = False
            try:
                return super()._generate(*batch)
            finally:
                self._synced = True

    def on_rank(rank):
        made = Counted(digit_model(size=0.3), eos_ids=[END], pad_id=0, batch_tokens=12, synced=True, parallel=rank)
        first, last = shares[rank.rank]
        return made.sample(asked[first:last], **SETTINGS, numbers=range(first, last)), made.calls

    (whole, busy), (nothing, along) = on_threads(on_rank, 2)
    assert [c.ids.tolist() for c in whole] == [c.ids.tolist() for c in expected]
    assert nothing == []
    assert busy == along > 1


def test_impossible_values_are_refused():
    """No end token and no space for a token are refused."""
    with pytest.raises(RolloutError, match="eos_ids"):
        sampler(digit_model(), eos_ids=[])
    with pytest.raises(RolloutError, match="batch_tokens"):
        sampler(digit_model(), batch_tokens=0)


def test_several_tokens_may_end_a_completion():
    """Each of several end tokens ends a completion."""
    found = sampler(digit_model(), eos_ids=[END, 5]).sample([p.input_ids for p in prompts(8)], **SETTINGS)
    ends = [int(c.ids[-1]) for c in found if c.finished]
    assert set(ends) == {END, 5}
    assert all(5 not in c.ids[:-1] for c in found)


def test_a_model_that_draws_nothing(monkeypatch):
    """A `generate` that passes over logits processors, as Janus's, is one error; the likeliest tokens are what they are."""
    model = digit_model()
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda *args, logits_processor=None, **more: generate(*args, **more))
    given = [prompt.input_ids for prompt in prompts(2)]
    with pytest.raises(RolloutError, match="passes over logits_processor"):
        sampler(model).sample(given, **SETTINGS)
    assert len(sampler(model).sample(given, **SETTINGS | {"top_k": 1})) == 6
