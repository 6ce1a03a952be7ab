"""GLM-4.5's format against 22 conversations of the vendor's template; its mask and its inverse."""

import json
import pathlib

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from axion_jax.data import chat
from axion_jax.data.chat import Response, Span, ToolCall, encode_example, parse_response, render
from axion_jax.data.tokenizer import CHAT_TEMPLATE, build_tokenizer, encode

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "chat_golden.json").read_text(encoding="utf-8")
)
PRINTABLE = [case for case in GOLDEN if case["name"] != "assistant_none_content"]

ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL_CHAT = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "reasoning_content": "T1", "tool_calls": [ADD, ADD]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3.", "reasoning_content": "T2"},
]
CALL = (
    "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["You are helpful.", "one or more functions"], ["Weather", "tool"])


def text_of(spans):
    return "".join(span.text for span in spans)


def render_case(case):
    return render(
        case["messages"],
        tools=case["tools"],
        add_generation_prompt=case["add_generation_prompt"],
        **case["kwargs"],
    )


def trained_text(tokenizer, trajectory):
    return tokenizer.decode(trajectory.token_ids[1:][trajectory.loss_mask])


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_our_jinja_template_prints_what_the_vendors_does(case):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    inputs = {name: case[name] for name in ("messages", "tools", "add_generation_prompt")}
    template = environment.from_string(CHAT_TEMPLATE)
    assert template.render(**inputs, **case["kwargs"]) == case["text"]


# All but the golden with content None: transformers drops such keys before the template sees them.
@pytest.mark.parametrize("case", PRINTABLE, ids=lambda case: case["name"])
def test_a_tokenizer_that_carries_our_template_prints_what_the_vendors_does(tokenizer, case):
    text = tokenizer.apply_chat_template(
        case["messages"],
        tools=case["tools"],
        add_generation_prompt=case["add_generation_prompt"],
        tokenize=False,
        **case["kwargs"],
    )
    assert text == case["text"]


@pytest.mark.parametrize("case", PRINTABLE, ids=lambda case: case["name"])
def test_render_prints_what_the_vendors_template_does(case):
    assert text_of(render_case(case)) == case["text"]


def test_render_and_our_jinja_template_agree_where_no_golden_looks(tokenizer):
    conversations = [
        [{"role": "assistant", "content": "x", "reasoning_content": "r"}],
        [{"role": "tool", "content": "t"}, {"role": "tool", "content": "u"}],
        [{"role": "tool", "content": "t"}, {"role": "critic", "content": "?"}, *TOOL_CHAT[4:]],
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "t"}]}],
        [{"role": "user", "content": "q"}, {"role": "tool", "content": ["a", {"output": 1}]}],
        [{"role": "assistant", "content": "a</think>\n\nb\n</think>\n c"}],
        [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}],
        [{"role": "user", "content": " two \n lines \n"}, {"role": "assistant", "content": "\n"}],
        TOOL_CHAT,
    ]
    for messages in conversations:
        for options in ({}, {"enable_thinking": False}, {"add_generation_prompt": True}):
            expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            assert text_of(render(messages, **options)) == expected


@pytest.mark.parametrize("case", PRINTABLE, ids=lambda case: case["name"])
def test_ids_of_the_spans_are_the_ids_of_the_whole_text(tokenizer, case):
    spans = render_case(case)
    pieces = [encode(tokenizer, span.text) for span in spans]
    assert sum(pieces, []) == encode(tokenizer, case["text"])
    assert all(span.text for span in spans)
    assert all(a.trained != b.trained for a, b in zip(spans, spans[1:], strict=False))


def test_prompt_ids_equal_those_of_apply_chat_template(tokenizer):
    for case in PRINTABLE:
        ids = chat.encode_prompt(tokenizer, case["messages"], tools=case["tools"], **case["kwargs"])
        expected = tokenizer.apply_chat_template(
            case["messages"],
            tools=case["tools"],
            add_generation_prompt=True,
            return_dict=False,
            **case["kwargs"],
        )
        assert ids.dtype == np.int32 and ids.tolist() == expected
        assert tokenizer.decode(ids).count("[gMASK]<sop>") == 1


def test_trained_is_what_the_assistant_generates_after_the_last_user_message():
    assert render(TOOL_CHAT) == [
        Span(
            "[gMASK]<sop><|user|>\nQ1<|assistant|>\n<think></think>\nA1<|user|>\n1+2?<|assistant|>",
            False,
        ),
        Span(f"\n<think>T1</think>{CALL}{CALL}<|observation|>", True),
        Span(
            "\n<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n</tool_response>"
            "<|assistant|>",
            False,
        ),
        Span("\n<think>T2</think>\nIt is 3.", True),
    ]


def test_an_example_ends_with_the_trained_stop_token_and_repeats_no_marker(tokenizer):
    example = encode_example(tokenizer, TOOL_CHAT, task_id="t")
    text = tokenizer.decode(example.token_ids)
    assert text == text_of(render(TOOL_CHAT)) + "<|user|>"
    assert [text.count(m) for m in ("[gMASK]<sop>", "<|user|>", "<|observation|>")] == [1, 3, 1]
    # loss_mask[t] speaks of token t + 1.
    assert trained_text(tokenizer, example) == (
        f"\n<think>T1</think>{CALL}{CALL}<|observation|>\n<think>T2</think>\nIt is 3.<|user|>"
    )
    assert example.loss_mask[-1] and example.task_id == "t"


def test_an_example_that_ends_in_a_tool_call_stops_for_the_observation(tokenizer):
    example = encode_example(tokenizer, TOOL_CHAT[:4])
    assert trained_text(tokenizer, example) == f"\n<think>T1</think>{CALL}{CALL}<|observation|>"
    assert tokenizer.decode(example.token_ids).endswith("</tool_call><|observation|>")


def test_the_empty_thought_is_trained_only_where_it_was_generated(tokenizer):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    example = encode_example(tokenizer, messages)
    assert trained_text(tokenizer, example) == "\n<think></think>\na<|user|>"
    example = encode_example(tokenizer, messages, enable_thinking=False)
    assert trained_text(tokenizer, example) == "\na<|user|>"
    prompt = chat.encode_prompt(tokenizer, messages[:1], enable_thinking=False)
    first = int(np.argmax(example.loss_mask)) + 1
    np.testing.assert_array_equal(example.token_ids[:first], prompt)


def test_the_assistant_marker_is_never_trained(tokenizer):
    marker = tokenizer.convert_tokens_to_ids("<|assistant|>")
    twice = [*TOOL_CHAT, {"role": "assistant", "content": "And more."}]
    example = encode_example(tokenizer, twice)
    targets = example.token_ids[1:]
    assert not example.loss_mask[targets == marker].any()


def test_tool_loops_extend_a_prompt_and_a_new_user_message_rewrites_it():
    once = text_of(render(TOOL_CHAT[:4]))
    assert text_of(render(TOOL_CHAT[:6], add_generation_prompt=True)).startswith(once)
    assert not text_of(render([*TOOL_CHAT, {"role": "user", "content": "next"}])).startswith(once)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": None}, "not NoneType"),
        ({"role": "user"}, "not NoneType"),
        ({"role": "user", "content": {"text": "x"}}, "not dict"),
        ({"role": "tool", "content": None}, "not NoneType"),
        ({"role": "tool", "content": {"temp": 20}}, "json.dumps"),
        ({"content": "x"}, "has no role"),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            "json.loads",
        ),
    ],
)
def test_what_the_vendors_template_would_print_as_python_is_an_error(message, words):
    with pytest.raises(ValueError, match=words):
        render([{"role": "user", "content": "q"}, message])


def test_an_example_with_nothing_to_learn_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="nothing to train on"):
        encode_example(tokenizer, TOOL_CHAT[:3])
    with pytest.raises(ValueError, match="has reasoning"):
        encode_example(tokenizer, TOOL_CHAT, enable_thinking=False)


@pytest.mark.parametrize("stop", ["", "<|user|>", "<|endoftext|>"])
def test_an_answer_is_read_back(stop):
    assert parse_response(f"\n<think>R</think>\nA{stop}") == Response("R", "A", [], True)


def test_reading_back_undoes_rendering(tokenizer):
    for turn in (3, 6):
        spans = render(TOOL_CHAT[: turn + 1])
        response = parse_response(spans[-1].text)
        assert response.well_formed
        again = render([*TOOL_CHAT[:turn], response.message()])
        assert text_of(again) == text_of(spans)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n<think>still going", Response("still going", None, [], False)),
        ("\n<think>call? <tool_call>f\n</tool_call>", ("call? <tool_call>f\n</tool_call>", None)),
        ("A<|user|>", Response("", "A", [], False)),
        ("R</think>\nA<|user|>", Response("R", "A", [], False)),
        ("\n<think>R</think>\nA</think>B<|user|>", Response("R", "A</think>B", [], False)),
        ("\n<think>a<think>b</think>\nA", Response("a<think>b", "A", [], False)),
        ("\n<think>R</think>\nA<|assistant|>", Response("R", "A<|assistant|>", [], False)),
        ("\n<think>R</think>\nA<|observation|>", Response("R", "A", [], False)),
        ("\n<think>R</think>\nA<|user|>\nmore", Response("R", "A", [], False)),
        ("", Response("", "", [], False)),
        ("<think></think>", Response("", "", [], True)),
    ],
)
def test_turns_that_break_the_format_are_read_as_far_as_they_go(text, expected):
    if isinstance(expected, tuple):
        expected = Response(*expected, [], False)
    assert parse_response(text) == expected


def test_with_thinking_off_the_answer_comes_without_a_thought():
    assert parse_response("\nA<|user|>", enable_thinking=False) == Response("", "A", [], True)
    thinks = parse_response("\n<think>R</think>\nA<|user|>", enable_thinking=False)
    assert thinks == Response("R", "A", [], False)


def calls_of(body, **options):
    response = parse_response(f"\n<think></think>{body}", **options)
    return response.tool_calls, response.well_formed


def test_calls_without_arguments_or_newlines_are_calls():
    for body in (
        "\n<tool_call>now\n</tool_call><|observation|>",
        "<tool_call>now</tool_call><|observation|>",
    ):
        assert calls_of(body) == ([ToolCall("now", {})], True)
    tight = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><|observation|>"
    assert calls_of(tight) == ([ToolCall("f", {"x": "1"})], True)


def test_a_value_may_contain_the_formats_own_tags():
    value = "a</tool_call>\n<tool_call>g\n</arg_value> k</think> "
    body = (
        f"\nSee:\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{value}</arg_value>\n"
        "<arg_key>y</arg_key>\n<arg_value></arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>"
    )
    calls = [ToolCall("f", {"x": value, "y": ""}), ToolCall("g", {})]
    assert parse_response(f"\n<think>R</think>{body}") == Response("R", "See:", calls, True)
    assert parse_response(body, enable_thinking=False) == Response("", "See:", calls, True)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n", 0),
        ("\n<tool_call>f\n<arg_key>x</arg_key>\n</tool_call>", 0),
        ("\n<tool_call>two words\n</tool_call>", 0),
        ("\n<tool_call>\n</tool_call>", 0),
        ("\n<tool_call>f\n</tool_call>\nand then<|observation|>", 1),
        ("\n<tool_call>f\n</tool_call>\n<tool_call>g", 1),
        ("\n<tool_call>f\n</tool_call><|user|>", 1),
        ("\nA</tool_call>", 0),
    ],
)
def test_broken_calls_are_dropped_and_said_to_be_broken(body, kept):
    calls, well_formed = calls_of(body)
    assert len(calls) == kept and not well_formed


def test_values_are_text_unless_the_schema_rules_text_out():
    properties = {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "o": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "u": {"type": ["string", "integer"]},
        "a": {"type": "array"},
        "any": {},
    }
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    ]
    values = {
        "s": "123",
        "i": "123",
        "o": "null",
        "u": "1",
        "a": "[" * 9999,
        "any": "1",
        "new": "1",
    }
    body = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    calls, well_formed = calls_of(f"\n<tool_call>f\n{body}</tool_call>", tools=tools)
    assert well_formed
    assert calls == [ToolCall("f", values | {"i": 123, "o": None})]
