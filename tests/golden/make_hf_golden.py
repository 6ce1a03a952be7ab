"""Writes hf/<variant>.npz: what Hugging Face's Glm4MoeForCausalLM computes on tiny random models.

An oracle that shares no code with ours. It runs wherever torch and transformers are installed
(which the project itself does without):

    pip install torch==2.13.0 transformers==5.24.0 numpy safetensors
    python tests/golden/make_hf_golden.py

Each file holds, all float32 or int32, T predictions made from T + 1 tokens:

    config                      JSON, the fields of Hugging Face's config.json
    tokens [B, T+1]
    lengths                     of the documents of each row, in order (JSON)
    loss_mask [B, T]            predictions that count; none crosses a document's end
    weight:<tensor>             as a checkpoint names them
    logits [B, T, V]  logprobs [B, T]
    router:<layer>:input [B*T, D], ids [B*T, K] and gates [B*T, K] of each mixture-of-experts layer
    loss                        mean of -logprobs where loss_mask;  grad:<tensor>  its gradient

What surprises: packed rows are never shown to Hugging Face. It gets one document at a time, so its
idea of packing cannot enter, and the pieces are put together here.
"""

import argparse
import copy
import json
import pathlib
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1_000_000,
    "attention_bias": True,
    "use_qk_norm": False,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "pad_token_id": None,  # else the embedding drops the gradient of that row
    "max_position_embeddings": 128,
}
WHOLE_ROWS = [[16], [16]]
VARIANTS = {  # changes to the config, offset of the router's correction bias, documents of each row
    "air": ({}, 0.0, WHOLE_ROWS),
    "air_packed": ({}, 0.0, [[5, 11], [3, 1, 12]]),
    "qknorm": (
        {
            "use_qk_norm": True,
            "attention_bias": False,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
        },
        0.0,
        WHOLE_ROWS,
    ),
    "groups": (
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": False},
        0.0,
        WHOLE_ROWS,
    ),
    "bias_offset": ({}, 7.0, WHOLE_ROWS),
}
SMALLEST_MARGIN = 1e-3
"""Between the last expert chosen and the first left out: rounding must not decide a choice."""


def build(config, seed, bias_offset):
    """A model in which every tensor matters: biases and norm weights are far from 0 and 1."""
    model = Glm4MoeForCausalLM(config).float().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=rng)
            if name.endswith("inv_freq"):
                continue
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * noise + bias_offset)
            elif "norm" in name:
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith(".bias"):
                tensor.copy_(0.3 * noise)
            elif "embed" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(1.2 * noise / tensor.shape[-1] ** 0.5)
    return model


def checkpoint_tensors(model):
    """The tensors as `save_pretrained` names and shapes them: one for each expert."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (file,) = pathlib.Path(folder).glob("*.safetensors")
        return {name: tensor.numpy() for name, tensor in load_file(file).items()}


def run(model, inputs, lengths):
    """Logits [B, T, V], and input, ids, gates of every router, document by document."""
    calls = {}

    def record(index):
        def hook(_, args, output):
            _, gates, ids = output
            calls.setdefault(index, []).append((args[0].reshape(len(ids), -1), ids, gates))

        return hook

    hooks = [
        layer.mlp.gate.register_forward_hook(record(i))
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    rows = []
    for row, documents in zip(inputs, lengths, strict=True):
        pieces = [model(input_ids=d[None], use_cache=False) for d in row.split(documents)]
        rows.append(torch.cat([piece.logits[0] for piece in pieces]))
    for hook in hooks:
        hook.remove()
    routers = {i: [torch.cat(x) for x in zip(*found, strict=True)] for i, found in calls.items()}
    return torch.stack(rows), routers


def margin(gate, hidden):
    """Smallest distance by which an expert, or a group, was chosen over the next."""
    scores = torch.sigmoid(hidden @ gate.weight.T) + gate.e_score_correction_bias
    grouped = scores.view(len(scores), gate.num_group, -1)
    quality = grouped.topk(2, -1).values.sum(-1).sort(-1, descending=True)
    smallest = np.inf
    if gate.topk_group < gate.num_group:
        gap = quality.values[:, gate.topk_group - 1] - quality.values[:, gate.topk_group]
        smallest = float(gap.min())
    best = quality.indices[:, : gate.topk_group]
    kept = grouped.gather(1, best[..., None].expand(-1, -1, grouped.shape[-1])).flatten(1)
    ranked = kept.sort(-1, descending=True).values
    return min(smallest, float((ranked[:, gate.top_k - 1] - ranked[:, gate.top_k]).min()))


def make(variant):
    changes, bias_offset, lengths = VARIANTS[variant]
    fields = BASE | changes
    config = Glm4MoeConfig(**fields)
    batch, predictions = len(lengths), sum(lengths[0])
    rng = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocab_size, (batch, predictions + 1), generator=rng)
    loss_mask = torch.rand((batch, predictions), generator=rng) < 0.7
    for row, documents in enumerate(lengths):
        loss_mask[row, torch.tensor(documents).cumsum(0) - 1] = False
    for seed in range(100):
        model = build(config, seed, bias_offset)
        logits, routers = run(model, tokens[:, :-1], lengths)
        gates = {i: model.model.layers[i].mlp.gate for i in routers}
        if min(margin(gates[i], found[0]) for i, found in routers.items()) > SMALLEST_MARGIN:
            break
    else:
        raise SystemExit(f"{variant}: no seed without near-ties in its routing.")

    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    loss = -logprobs[loss_mask].mean()
    loss.backward()
    gradient = copy.deepcopy(model)
    with torch.no_grad():
        for at, source in zip(gradient.parameters(), model.parameters(), strict=True):
            at.copy_(source.grad)

    arrays = {
        "config": np.array(json.dumps(fields)),
        "lengths": np.array(json.dumps(lengths)),
        "tokens": tokens.int(),
        "loss_mask": loss_mask,
        "logits": logits,
        "logprobs": logprobs,
        "loss": loss,
    }
    for i, found in routers.items():
        arrays |= {
            f"router:{i}:{name}": x
            for name, x in zip(("input", "ids", "gates"), found, strict=True)
        }
    arrays |= {f"weight:{name}": x for name, x in checkpoint_tensors(model).items()}
    arrays |= {
        f"grad:{name}": x
        for name, x in checkpoint_tensors(gradient).items()
        if not name.endswith("e_score_correction_bias")  # a buffer: it has no gradient
    }
    return {
        name: x.detach().numpy() if isinstance(x, torch.Tensor) else x for name, x in arrays.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variants", nargs="*", help=f"of {', '.join(VARIANTS)}; default: all")
    folder = pathlib.Path(__file__).parent / "hf"
    for variant in parser.parse_args().variants or VARIANTS:
        arrays = make(variant)
        arrays = {k: v.astype(np.int32) if v.dtype == np.int64 else v for k, v in arrays.items()}
        np.savez_compressed(folder / f"{variant}.npz", **arrays)
        print(f"{variant}: {len(arrays)} arrays, loss {float(arrays['loss']):.5f}")
