r"""The main job: a tiny GLM-4.5-type MoE through SFT, Reasoning RL, IF RL and RLHF on one CPU.

    python launch/recipe.py --config=configs/tiny/recipe.py --workdir=runs/demo
    python launch/recipe.py --config=configs/tiny/recipe.py:smoke --workdir=runs/smoke

Two idle cores: 4 minutes and a half, 1.5 GB. Held-out reasoning pass@1 rises from about 0.55 to 0.9
in Reasoning RL, instruction following from about 0.4 to 0.7 in IF RL, the reward-model score from
below 0 to above 1 in RLHF; README.md has three seeds. Stages and algorithms are Rufus-Air's, scaled
down; where a value departs from the paper's, the comment beside it says why. `smoke` takes every
stage through two steps.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "full") -> ConfigDict:
    """The recipe; `smoke` takes every stage through two steps."""
    if variant not in ("full", "smoke"):
        raise ValueError(
            f"configs/tiny/recipe.py has the variants full and smoke, not {variant!r}."
        )
    config = ConfigDict()
    config.seed = 0
    config.engine_batch = 256

    config.model = ConfigDict(
        dict(
            vocab_size=640,
            hidden_size=96,
            num_layers=3,
            num_heads=2,
            num_kv_heads=1,
            head_dim=48,
            intermediate_size=192,
            moe_intermediate_size=48,
            num_experts=8,
            num_experts_per_token=2,
            num_shared_experts=1,
            num_dense_layers=1,
            rope_theta=10_000.0,
        )
    )
    config.mesh = ConfigDict(dict(data=1, fsdp=-1))
    config.evaluation = ConfigDict(
        dict(num_prompts=256, samples_per_prompt=4, max_response_length=48)
    )

    config.sft = ConfigDict(
        dict(
            num_steps=700,
            examples_per_step=128,
            num_examples=100_000,
            mixture=dict(reasoning=0.45, instruction_following=0.35, preference=0.2),
            rows=16,
            row_length=128,
            schedule=dict(
                name="cosine",
                learning_rate=3e-3,
                final_learning_rate=2e-4,
                warmup_steps=20,
                num_steps=700,
            ),
            optimizer=dict(
                name="muon",
                muon_scale=4.0,
                beta=0.95,
                b1=0.9,
                b2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
            ),
            # From random weights the routers must be balanced; a released checkpoint's stay put.
            router_bias_update_rate=0.004,
            checkpoint_every=100,
            guards=dict(max_skipped_in_a_row=5, max_loss_spike=3.0),
        )
    )
    config.reward_model = ConfigDict(
        dict(
            num_steps=60,
            pairs_per_step=64,
            num_held_out_pairs=256,
            rows=16,
            row_length=128,
            schedule=dict(name="constant", learning_rate=3e-4, warmup_steps=10),
            optimizer=dict(name="adamw", b1=0.9, b2=0.95, weight_decay=0.0, max_grad_norm=1.0),
            checkpoint_every=30,
            guards=dict(max_skipped_in_a_row=5),
        )
    )
    adamw = dict(name="adamw", b1=0.9, b2=0.98, weight_decay=0.0, max_grad_norm=1.0)
    config.reasoning_rl = ConfigDict(
        dict(
            task="reasoning",
            num_steps=30,
            prompts_per_step=32,
            samples_per_prompt=8,
            updates_per_step=2,
            max_response_length=48,
            temperature=1.0,
            replay_routing=True,
            high_precision_layers=1,  # of 3; the paper keeps 3 of 46
            mask_truncated=True,
            advantage=dict(name="group_std"),
            filter=dict(low=0.0, high=0.8, max_oversampling=4),
            # The paper gives no coefficient: small against the gap of 1 between right and wrong.
            shaping=dict(name="length_penalty", coefficient=0.1),
            # Ten times the paper's clips: FP8 and two steps at 2e-4 move a tiny model's ratios more.
            algorithm=dict(name="gspo", clip_low=0.01, clip_high=0.02),
            correction=dict(name="tis", cap=2.0),  # cap unpublished; 2 is customary
            schedule=dict(name="constant", learning_rate=2e-4, warmup_steps=4),
            optimizer=adamw,
            rows=16,
            row_length=128,
            evaluate_every=5,
            checkpoint_every=5,
            guards=dict(max_skipped_in_a_row=5, min_entropy=0.005),
        )
    )
    config.instruction_following_rl = ConfigDict(
        dict(
            task="instruction_following",
            num_steps=70,
            prompts_per_step=32,
            samples_per_prompt=8,
            updates_per_step=1,
            max_response_length=32,
            temperature=1.0,
            replay_routing=True,
            high_precision_layers=1,
            mask_truncated=False,
            advantage=dict(name="group_std"),
            algorithm=dict(name="grpo", clip_low=0.2, clip_high=0.28),
            schedule=dict(name="constant", learning_rate=4e-4, warmup_steps=4),
            optimizer=adamw,
            rows=16,
            row_length=128,
            evaluate_every=10,
            checkpoint_every=5,
            guards=dict(max_skipped_in_a_row=5, min_entropy=0.005),
        )
    )
    config.rlhf = ConfigDict(
        dict(
            task="preference",
            num_steps=20,
            prompts_per_step=32,
            samples_per_prompt=8,
            updates_per_step=2,
            max_response_length=48,
            temperature=1.0,
            replay_routing=True,
            high_precision_layers=1,
            mask_truncated=False,
            advantage=dict(name="group_std"),
            # Slope and free length are ours: a full answer about three words takes 15 tokens.
            shaping=dict(name="linear_length_penalty", free_length=16, coefficient=1.0),
            algorithm=dict(name="grpo", clip_low=0.2, clip_high=0.28),
            schedule=dict(name="constant", learning_rate=1e-4, warmup_steps=4),
            optimizer=adamw,
            rows=16,
            row_length=128,
            evaluate_every=5,
            checkpoint_every=5,
            guards=dict(max_skipped_in_a_row=5, min_entropy=0.005),
        )
    )
    if variant == "smoke":
        config.update_from_flattened_dict(_SMOKE)
    return config.lock()


_SMOKE = {
    "engine_batch": 64,
    "evaluation.num_prompts": 16,
    "evaluation.samples_per_prompt": 2,
    "sft.num_steps": 2,
    "sft.examples_per_step": 16,
    "sft.num_examples": 64,
    "sft.rows": 8,
    "sft.checkpoint_every": 1,
    "sft.schedule.num_steps": 2,
    "sft.schedule.warmup_steps": 1,
    "reward_model.num_steps": 2,
    "reward_model.pairs_per_step": 8,
    "reward_model.num_held_out_pairs": 16,
    "reward_model.rows": 8,
    "reward_model.checkpoint_every": 1,
    **{
        f"{stage}.{key}": value
        for stage in ("reasoning_rl", "instruction_following_rl", "rlhf")
        for key, value in {
            "num_steps": 2,
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "rows": 8,
            "evaluate_every": 1,
            "checkpoint_every": 1,
            "guards.min_entropy": 0.0,
        }.items()
    },
    # An untrained model is never right: keep every group, so that the updates run.
    "reasoning_rl.filter.low": -1.0,
    "reasoning_rl.filter.max_oversampling": 1,
}
"""Two steps of every stage, small enough for a test; the shapes of the model stay."""
