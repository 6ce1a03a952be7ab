"""SFT: a stream of demonstrations that is a function of the index, and the balancing of routers."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from axion_jax.data.preference import PreferencePrompts
from axion_jax.data.prompts import is_held_out
from axion_jax.data.reasoning import ReasoningPrompts
from axion_jax.data.tokenizer import stop_ids
from axion_jax.data.writing import WritingPrompts
from axion_jax.recipe.sft import Demonstrations, balance

SETS = {
    "reasoning": ReasoningPrompts,
    "instruction_following": WritingPrompts,
    "preference": PreferencePrompts,
}
MIXTURE = {"reasoning": 0.45, "instruction_following": 0.35, "preference": 0.2}


@pytest.fixture
def demonstrations(tiny_tokenizer):
    def make(seed=0, mixture=MIXTURE):
        sets = {name: prompts(seed=seed) for name, prompts in SETS.items()}
        return Demonstrations(sets, mixture, tiny_tokenizer, seed=seed)

    return make


def test_an_example_depends_on_seed_and_index_alone(demonstrations):
    first, again, other = demonstrations(), demonstrations(), demonstrations(seed=1)
    indices = range(30)
    ids = [first.example(i).token_ids.tolist() for i in indices]
    assert ids == [again.example(i).token_ids.tolist() for i in reversed(indices)][::-1]
    assert sum(ids[i] == other.example(i).token_ids.tolist() for i in indices) < 5


def test_tasks_and_families_come_in_the_shares_asked_for(demonstrations):
    examples = demonstrations()
    families = collections.Counter(
        examples.example(i).task_id.rpartition("-")[0] for i in range(3000)
    )
    shares = {name: n / 3000 for name, n in families.items()}
    # 4 standard deviations of a share of 3000 are 0.036 at most.
    assert shares == pytest.approx(
        {
            "word_list": 0.35,
            "chat": 0.2,
            "chain_sum": 0.15,
            "decimal_chain_sum": 0.15,
            "letter_counting": 0.15,
        },
        abs=0.036,
    )


def test_a_task_that_is_not_in_the_mixture_does_not_come(demonstrations):
    examples = demonstrations(mixture={"preference": 1.0})
    assert {examples.example(i).task_id.split("-")[0] for i in range(50)} == {"chat"}


def test_no_example_shows_a_held_out_prompt(demonstrations, tiny_tokenizer):
    examples = demonstrations()
    for i in range(1000):
        text = tiny_tokenizer.decode(examples.example(i).token_ids, skip_special_tokens=False)
        question = text.partition("<|user|>\n")[2].partition("<|assistant|>")[0]
        assert not is_held_out(question.removesuffix("/nothink"))


def test_an_example_trains_the_answer_and_the_marker_that_ends_it(demonstrations, tiny_tokenizer):
    examples = demonstrations()
    for i in range(100):
        example = examples.example(i)
        trained = example.token_ids[1:][example.loss_mask]
        prompt = example.token_ids[: len(example.token_ids) - len(trained)]
        text = tiny_tokenizer.decode(prompt, skip_special_tokens=False)
        assert text.endswith(("<|assistant|>", "<|assistant|>\n<think></think>"))
        assert trained[-1] in stop_ids(tiny_tokenizer)
        assert example.loss_mask[-len(trained) :].all()


def test_balancing_lowers_the_bias_of_busy_experts_and_touches_nothing_else():
    params = {
        "embed": jnp.ones(3),
        "moe": {
            "attention": jnp.ones(2),
            "mlp": {"router": jnp.ones(4), "router_bias": jnp.zeros((2, 4))},
        },
    }
    load = jnp.array([[10.0, 0, 5, 5], [1, 1, 1, 1]])
    after = balance(0.01)(params, load)
    np.testing.assert_allclose(
        after["moe"]["mlp"]["router_bias"], [[-0.01, 0.01, 0, 0], [0, 0, 0, 0]]
    )
    assert after["embed"] is params["embed"]
    assert after["moe"]["attention"] is params["moe"]["attention"]
    assert after["moe"]["mlp"]["router"] is params["moe"]["mlp"]["router"]
    assert not params["moe"]["mlp"]["router_bias"].any()
