"""Models that mix packed documents are refused before training."""

import pytest
import torch
import transformers

from forge_algos import SFT, AdapterSettings, PackedBatchError, adapt, evaluate
from forge_algos.isolation._isolation import require_isolation

from ..oracle import ARCHITECTURES, CPU, SIZES, make, naive, pack, samples


class Crosstalk(transformers.LlamaForCausalLM):
    """A Llama whose decoder passes on what came before in the row.
    By less than a hundredth of a hidden state.
    """

    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_hook(self.leak)

    def leak(self, _module, _args, output):
        states = output.last_hidden_state
        output.last_hidden_state = states + 5e-3 * states.cumsum(1)
        return output


def mixing_model(name):
    """Return a model that does not keep documents apart, by the reason's name."""
    if name == "crosstalk":
        return Crosstalk(transformers.LlamaConfig(**SIZES))
    old = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "bloom": lambda: transformers.BloomConfig(vocab_size=61, hidden_size=16, n_layer=2, n_head=4, initializer_range=0.1),
        "opt": lambda: transformers.OPTConfig(**old, ffn_dim=24, word_embed_proj_dim=16, init_std=0.1),
    }[name]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", ["crosstalk", "bloom", "opt"])
def test_what_mixes_documents_is_refused(name):
    """Leaks and continued positions are found by running the model.
    The message has what was seen and what to do.
    """
    torch.manual_seed(0)
    model = mixing_model(name)
    with pytest.raises(
        PackedBatchError, match=r"does not keep packed documents apart.*second of two.*another attention"
    ) as caught:
        SFT().bind(model, device=CPU)
    assert caught.value.exit_status == 2
    # Why: packed, the loss is another one.
    examples = samples((5, 7, 9))
    with torch.no_grad():
        batch = pack(examples)
        row = {"input_ids": torch.tensor(batch.input_ids)[None], "position_ids": torch.tensor(batch.position_ids)[None]}
        row = row if name in {"crosstalk", "opt"} else {"input_ids": row["input_ids"]}
        packed = model(**row, use_cache=False).logits[0].split([5, 7, 9])
        alone = [model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0] for ids, _ in examples]
    assert max(float((p - a).abs().max()) for p, a in zip(packed, alone, strict=True)) > 1e-3
    assert naive(model, examples)[1] > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_isolating_models_pass(architecture):
    """Every architecture of these tests passes and is unchanged afterwards.
    In bfloat16 and with adapters too.
    """
    model = make(architecture)
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    require_isolation(model, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    require_isolation(make(architecture).bfloat16(), device=CPU)
    require_isolation(adapt(model, AdapterSettings(adapter="lora")).model, device=CPU)


def test_an_error_inside_the_model():
    """An error inside the model becomes one of forge_algos, with the cause."""

    class Broken(transformers.LlamaForCausalLM):
        def get_decoder(self):
            return self

        def forward(self, **_kwargs):
            raise TypeError("unexpected keyword argument 'cu_seq_lens_q'")

    with pytest.raises(PackedBatchError, match=r"Broken with attention .* cannot run a packed row: unexpected keyword"):
        SFT().bind(Broken(transformers.LlamaConfig(**SIZES)), device=CPU)


def test_nan_outputs_do_not_pass():
    """A model whose outputs are NaN is not taken to isolate documents."""
    model = make()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(PackedBatchError, match="apart"):
        require_isolation(model, device=CPU)


def test_isolation_is_checked_once():
    """A second evaluation of the same model runs no check; another attention is checked again."""
    model, calls = make(), []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for attention in ("sdpa", "sdpa", "eager"):
        model.set_attn_implementation(attention)
        calls.clear()
        evaluate(model, [pack(samples((5, 7)))], objective=SFT())
        counts.append(len(calls))
    assert counts[1] < counts[0] == counts[2]


class Bare(torch.nn.Module):
    """A module of a user's own, whose forward returns what `answer` makes of its logits."""

    def __init__(self, answer):
        super().__init__()
        self.words, self.answer = torch.nn.Embedding(50, 50), answer

    def forward(self, input_ids, **_):
        """Return no object with logits."""
        return self.answer(self.words(input_ids))


@pytest.mark.parametrize(
    ("answer", "name"), [(lambda logits: logits, "Tensor"), (lambda _: (), "tuple"), (lambda _: None, "NoneType")]
)
def test_a_model_that_returns_no_logits_is_told_what_is_wanted(answer, name):
    """One that is not transformers' has to return an object with `logits`; it was told that a Tensor has no such attribute."""
    with pytest.raises(PackedBatchError, match=f"its forward returns {name}; an object with `logits`"):
        SFT().bind(Bare(answer), device=CPU)
