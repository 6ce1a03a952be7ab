"""Torch's half of the parity check: random tiny checkpoints, and what Hugging Face computes on them.

    python tools/parity/reference.py --out=DIR --seed=1          # every variant, for `make parity`
    python tools/parity/reference.py --golden                    # rewrites tests/golden/families

It shares no code with axion_jax and runs where torch and transformers are (tools/parity/
constraints.txt). Each variant becomes a folder that compare.py reads:

    config.json, model.safetensors   as save_pretrained writes them
    grads.safetensors                gradient of the loss, under the checkpoint's names
    expected.npz                     T predictions made from T + 1 tokens, float32 or int32:
      tokens [B, T+1]  lengths       documents of each row, in order (JSON)
      loss_mask [B, T]               predictions that count; none crosses a document's end
      logits [B, T, V]  logprobs [B, T]  loss: mean of -logprobs where loss_mask
      router:<layer>:input, ids, gates   of each mixture-of-experts layer, rows flattened
    or, of a sequence classifier:
      tokens [B, T]  num_tokens [B]  real tokens of a right-padded row
      scores, scores_left [B]        rows padded on the right, on the left
      loss                           mean of -log sigmoid(score of an even row - of the next)

A variant named *_bf16 is stored in bfloat16 (router bias in float32) and has no gradients; besides
the float32 answers on those weights it holds `bf16_logprobs` and `bf16:router:<layer>:ids`, from
Hugging Face in bfloat16.

Weights are chosen so that every tensor matters (norms far from 1, biases far from 0), and drawn
again until no router decides by less than SMALLEST_MARGIN: rounding must not choose an expert.
Packed rows are never shown to Hugging Face; it gets one document at a time.
"""

import argparse
import copy
import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

COMMON = {
    "num_key_value_heads": 2,
    "num_attention_heads": 6,
    "tie_word_embeddings": False,
    "pad_token_id": None,  # else the embedding drops the gradient of that row
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}
GLM = COMMON | {
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1_000_000,
    "attention_bias": True,
    "use_qk_norm": False,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
}
QWEN3 = COMMON | {"rope_theta": 1_000_000, "attention_bias": False, "rms_norm_eps": 1e-6}
LLAMA = COMMON | {
    "num_attention_heads": 4,
    "rope_theta": 10_000,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
}

VARIANTS = {  # family, changes to the config, mean of the router's correction bias
    "glm_air": ("Glm4MoeForCausalLM", {}, 0.0),
    "glm_packed": ("Glm4MoeForCausalLM", {}, 0.0),
    "glm_full": (
        "Glm4MoeForCausalLM",
        {
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 3,
        },
        0.0,
    ),
    "glm_bias_offset": ("Glm4MoeForCausalLM", {"routed_scaling_factor": 2.5}, 7.0),
    "glm_groups": (
        "Glm4MoeForCausalLM",
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": False},
        0.0,
    ),
    "glm_one_group": (
        "Glm4MoeForCausalLM",
        {"n_group": 2, "topk_group": 1, "use_qk_norm": True, "routed_scaling_factor": 2.5},
        -3.0,
    ),
    "glm_all_moe": (
        "Glm4MoeForCausalLM",
        {
            "first_k_dense_replace": 0,
            "attention_bias": False,
            "n_shared_experts": 3,
            "tie_word_embeddings": True,
        },
        0.0,
    ),
    "glm_rope_quarter": ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.25}, 0.0),
    "glm_rope_full": (
        "Glm4MoeForCausalLM",
        {"partial_rotary_factor": 1.0, "num_key_value_heads": 3, "rope_theta": 10_000},
        0.0,
    ),
    "glm_one_expert": (
        "Glm4MoeForCausalLM",
        {"num_experts_per_tok": 1, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
        0.0,
    ),
    "qwen3": ("Qwen3ForCausalLM", {}, 0.0),
    "qwen3_tied": (
        "Qwen3ForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        0.0,
    ),
    "qwen3_classifier": (
        "Qwen3ForSequenceClassification",
        {"num_labels": 1, "pad_token_id": 0},
        0.0,
    ),
    "llama": ("LlamaForCausalLM", {}, 0.0),
    "llama_tied": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        0.0,
    ),
    "glm_air_bf16": ("Glm4MoeForCausalLM", {}, 0.0),
    "glm_full_bf16": (
        "Glm4MoeForCausalLM",
        {"use_qk_norm": True, "routed_scaling_factor": 2.5, "num_experts_per_tok": 3},
        7.0,
    ),
    "qwen3_bf16": ("Qwen3ForCausalLM", {}, 0.0),
    "llama_bf16": ("LlamaForCausalLM", {}, 0.0),
}
GOLDEN = (
    "qwen3",
    "qwen3_tied",
    "qwen3_classifier",
    "llama",
    "glm_all_moe",
    "glm_one_group",
    "glm_one_expert",
    "glm_rope_quarter",
)
"""Kept in tests/golden/families; the other shapes of GLM have goldens in tests/golden/hf."""

LIVE_SIZE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
}
GOLDEN_SIZE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
}
LIVE_ROWS, GOLDEN_ROWS = [[40]] * 3, [[16]] * 2
PACKED_ROWS = [[5, 35], [3, 1, 36], [20, 20]]
BF16_ROWS = [[64]] * 6
SMALLEST_MARGIN = 5e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--golden", action="store_true")
    parser.add_argument("variants", nargs="*", help=f"default: all of {', '.join(VARIANTS)}")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if args.golden:
        out = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "families"
    elif args.out is None:
        parser.error("--out=DIR says where the variants go.")
    else:
        out = args.out
    for variant in args.variants or (GOLDEN if args.golden else VARIANTS):
        number = list(VARIANTS).index(variant)
        make(variant, out / variant, seed=1000 * args.seed + number, golden=args.golden)
        print(f"  {variant}", flush=True)


def make(variant: str, folder: pathlib.Path, *, seed: int, golden: bool) -> None:
    family, changes, bias_mean = VARIANTS[variant]
    base = {"G": GLM, "Q": QWEN3, "L": LLAMA}[family[0]]
    fields = base | (GOLDEN_SIZE if golden else LIVE_SIZE) | changes
    if not family.startswith("Glm"):
        del fields["moe_intermediate_size"]
    rows = GOLDEN_ROWS if golden else LIVE_ROWS
    if variant == "glm_packed":
        rows = PACKED_ROWS
    if variant.endswith("_bf16"):
        rows = BF16_ROWS
    rng = torch.Generator().manual_seed(seed)
    model_class = getattr(transformers, family)
    config = model_class.config_class(**fields)
    model = model_class(config).float().eval()
    model.set_attn_implementation("eager")
    if family.startswith("Glm"):
        model.set_experts_implementation("eager")
    folder.mkdir(parents=True, exist_ok=True)
    if family.endswith("SequenceClassification"):
        fill(model, rng, bias_mean)
        expected = classify(model, rng, rows)
    else:
        tokens = torch.randint(config.vocab_size, (len(rows), sum(rows[0]) + 1), generator=rng)
        for _ in range(500):
            fill(model, rng, bias_mean)
            if variant.endswith("_bf16"):
                round_to_bfloat16(model)
            logits, routers = run(model, tokens[:, :-1], rows)
            gates = {i: model.model.layers[i].mlp.gate for i in routers}
            if all(margin(gates[i], x[0]) > SMALLEST_MARGIN for i, x in routers.items()):
                break
        else:
            raise SystemExit(f"{variant}: no draw of 500 without near-ties in its routing.")
        expected = predict(model, tokens, logits, routers, rows, rng)
    if variant.endswith("_bf16"):
        save_as_released(model, folder)
        expected |= in_bfloat16(model_class, folder, expected["tokens"], rows)
    else:
        model.save_pretrained(folder)
        save_gradients(model, folder / "grads.safetensors")
    arrays = {k: v.detach().numpy() if torch.is_tensor(v) else v for k, v in expected.items()}
    arrays = {k: v.astype(np.int32) if v.dtype == np.int64 else v for k, v in arrays.items()}
    np.savez_compressed(folder / "expected.npz", **arrays)


def fill(model, rng, bias_mean: float) -> None:
    """Random weights in which every tensor matters."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            noise = torch.randn(tensor.shape, generator=rng)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * noise + bias_mean)
            elif "norm" in name:
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith(".bias"):
                tensor.copy_(0.3 * noise)
            elif "embed" in name:
                tied = getattr(model.config, "tie_word_embeddings", False)
                tensor.copy_(noise * (1.2 * tensor.shape[-1] ** -0.5 if tied else 1.0))
            else:
                tensor.copy_(1.2 * noise / tensor.shape[-1] ** 0.5)


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


@torch.no_grad()
def margin(gate, hidden) -> float:
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


def predict(model, tokens, logits, routers, lengths, rng):
    """Everything there is to compare of a causal model; leaves the loss's gradient on `model`."""
    loss_mask = torch.rand((len(tokens), tokens.shape[1] - 1), generator=rng) < 0.7
    for row, documents in enumerate(lengths):
        loss_mask[row, torch.tensor(documents).cumsum(0) - 1] = False
    logprobs = chosen(logits, tokens)
    loss = -logprobs[loss_mask].mean()
    model.zero_grad()
    loss.backward()
    return {
        "tokens": tokens,
        "lengths": np.array(json.dumps(lengths)),
        "loss_mask": loss_mask,
        "logits": logits,
        "logprobs": logprobs,
        "loss": loss,
    } | {
        f"router:{i}:{name}": x
        for i, found in routers.items()
        for name, x in zip(("input", "ids", "gates"), found, strict=True)
    }


def chosen(logits, tokens):
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]


def classify(model, rng, lengths):
    """Scores of ragged rows, padded on the right and on the left, and a preference loss."""
    rows, width = 2 * len(lengths), sum(lengths[0])
    num_tokens = torch.randint(2, width + 1, (rows,), generator=rng)
    tokens = torch.randint(1, model.config.vocab_size, (rows, width), generator=rng)
    real = torch.arange(width)[None] < num_tokens[:, None]
    tokens = torch.where(real, tokens, 0)
    scores = model(input_ids=tokens, attention_mask=real.long()).logits[:, 0]
    loss = -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()
    model.zero_grad()
    loss.backward()
    left = torch.stack(
        [row.roll(width - int(n)) for row, n in zip(tokens, num_tokens, strict=True)]
    )
    with torch.no_grad():
        scores_left = model(input_ids=left, attention_mask=real.flip(1).long()).logits[:, 0]
    return {
        "tokens": tokens,
        "num_tokens": num_tokens,
        "scores": scores,
        "scores_left": scores_left,
        "loss": loss,
    }


def round_to_bfloat16(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def save_as_released(model, folder) -> None:
    """bfloat16, but for the router's correction bias: the types of GLM-4.5's own files."""
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = {
        name: x if name.endswith("e_score_correction_bias") else x.bfloat16()
        for name, x in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def in_bfloat16(model_class, folder, tokens, lengths):
    model = model_class.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits, routers = run(model, tokens[:, :-1], lengths)
    return {"bf16_logprobs": chosen(logits, tokens)} | {
        f"bf16:router:{i}:ids": ids for i, (_, ids, _) in routers.items()
    }


def save_gradients(model, file: pathlib.Path) -> None:
    """Under the names and in the shapes that the checkpoint gives the parameters."""
    gradient = copy.deepcopy(model)
    with torch.no_grad():
        for at, source in zip(gradient.parameters(), model.parameters(), strict=True):
            at.copy_(source.grad)
        for name, buffer in gradient.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()  # it is no parameter: nothing trains it
    with tempfile.TemporaryDirectory() as temporary:
        gradient.save_pretrained(temporary)
        (saved,) = pathlib.Path(temporary).glob("*.safetensors")
        save_file(load_file(saved), file, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
