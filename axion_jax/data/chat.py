"""GLM-4.5's chat format: messages to text with a training mask, and a sampled turn read back.

A conversation is `[gMASK]<sop>` followed by turns, each opened by its role's marker; glm45.jinja
holds the same format for other programs. Three things surprise newcomers:

* No token ends a turn. The marker of whoever speaks next does, so it is what the assistant samples
  to stop: `<|observation|>` after tool calls, `<|user|>` otherwise. It is trained, although it
  opens the next message, and for the last turn `encode_example` appends it. `<|assistant|>` is
  always given, never trained.
* Reasoning older than the last user message is erased. Earlier assistant turns therefore read as no
  model ever wrote them; they are context, and only the turns after the last user message are
  trained. A conversation is cut into one example for each user message whose answer is to be
  learned. For the same reason rendering a longer conversation does not extend the tokens of a
  shorter one: in RL, keep the sampled ids and never render them again.
* With thinking switched off the prompt itself carries `\\n<think></think>`; it is not trained then.

Messages are OpenAI-style dictionaries: `role`, `content` (text, or a list of text parts), for the
assistant also `reasoning_content` and `tool_calls`, whose arguments are dictionaries. Roles other
than system, user, assistant and tool are left out, as the vendor's template does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from axion_jax.data.tokenizer import encode
from axion_jax.types import Trajectory

Message = Mapping[str, Any]

EMPTY_THINK = "\n<think></think>"


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of a conversation; trained: the assistant generates it and learns from it."""

    text: str
    trained: bool


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    enable_thinking: bool | None = None,
) -> list[Span]:
    """The conversation in GLM-4.5's format, byte for byte as the vendor's template prints it.

    Spans alternate between given and trained, and meet at special tokens only, so their ids joined
    are the ids of the joined text. Trained is what the assistant generates after the last user
    message: thinking, answer, tool calls and, where tool results follow, their marker.

    Args:
      tools: function schemas, printed as JSON into a system block of their own.
      add_generation_prompt: end with `<|assistant|>`, for sampling the next turn.
      enable_thinking: False appends `/nothink` to every user message and gives the empty thought in
        the generation prompt. None and True are the same: the assistant thinks as it likes.

    Raises:
      ValueError: a content or an argument that the vendor's template would print as Python, such as
        "None".
    """
    last_user = max((i for i, m in enumerate(messages) if _role(i, m) == "user"), default=-1)
    nothink = enable_thinking is False
    spans = [Span("[gMASK]<sop>" + (_tools_block(tools) if tools else ""), False)]
    stop = None  # The marker that would end the turn before, if that turn is trained.
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            trained = i > last_user
            reasoning, content = _reasoning_and_content(i, message)
            think = f"\n<think>{reasoning}</think>" if trained else EMPTY_THINK
            calls = "".join(_tool_call(i, call) for call in message.get("tool_calls") or ())
            spans += [
                Span("<|assistant|>", False),
                Span(think, trained and not (nothink and think == EMPTY_THINK)),
                Span((f"\n{content}" if content else "") + calls, trained),
            ]
            stop = _stop_marker(message) if trained else None
            continue
        if role == "system":
            marker, text = "<|system|>", "\n" + _plain(i, message)
        elif role == "user":
            marker, text = "<|user|>", "\n" + _plain(i, message)
            if nothink and not text.endswith("/nothink"):
                text += "/nothink"
        elif role == "tool":
            follows_tool = i > 0 and messages[i - 1]["role"] == "tool"
            marker, text = "" if follows_tool else "<|observation|>", _tool_responses(i, message)
        else:
            continue
        spans += [Span(marker, marker == stop), Span(text, False)]
        stop = None
    if add_generation_prompt:
        spans.append(Span("<|assistant|>" + (EMPTY_THINK if nothink else ""), False))
    return _joined(spans)


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
) -> np.ndarray:
    """[N] int32. The ids to sample the next assistant turn from; arguments as for `render`."""
    spans = render(
        messages, tools=tools, add_generation_prompt=True, enable_thinking=enable_thinking
    )
    return np.array(encode(tokenizer, "".join(span.text for span in spans)), np.int32)


def encode_example(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
    task_id: str = "",
) -> Trajectory:
    """A conversation to learn from, with a loss on the assistant turns after the last user message.

    The last assistant turn is finished with the marker that it would sample to stop.

    Raises:
      ValueError: nothing in the conversation is trained, or it thinks although thinking is switched
        off.
    """
    spans = render(messages, tools=tools, enable_thinking=enable_thinking)
    if messages and messages[-1]["role"] == "assistant":
        spans.append(Span(_stop_marker(messages[-1]), True))
    if not any(span.trained for span in spans):
        raise ValueError(
            "The conversation has no assistant turn after its last user message: "
            "there is nothing to train on."
        )
    thinks = any(span.trained and span.text.startswith("\n<think>") for span in spans)
    if thinks and enable_thinking is False:
        raise ValueError(
            "enable_thinking=False gives every assistant turn an empty thought, but one that "
            "is to be trained has reasoning."
        )
    pieces = [encode(tokenizer, span.text) for span in spans]
    trained = np.repeat([span.trained for span in spans], [len(piece) for piece in pieces])
    return Trajectory(
        token_ids=np.array(list(itertools.chain.from_iterable(pieces)), np.int32),
        loss_mask=trained[1:],
        task_id=task_id,
    )


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The same text in as few spans as possible."""
    runs = itertools.groupby((s for s in spans if s.text), key=lambda span: span.trained)
    return [Span("".join(span.text for span in run), trained) for trained, run in runs]


def _role(index: int, message: Message) -> str:
    if not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{index}] has no role.")
    return message["role"]


def _stop_marker(message: Message) -> str:
    return "<|observation|>" if message.get("tool_calls") else "<|user|>"


def _plain(index: int, message: Message) -> str:
    """Content as text; of a list the text parts, joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(
            f"messages[{index}].content must be text or a list of text parts, not "
            f'{type(content).__name__}; use "" for no text.'
        )
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    return part["text"] if part.get("type") == "text" else ""


def _reasoning_and_content(index: int, message: Message) -> tuple[str, str]:
    """Both stripped. Reasoning is its own field, else what think tags in the content enclose."""
    content = _plain(index, message)
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str):
        reasoning = ""
        if "</think>" in content:
            reasoning = content.partition("</think>")[0].rpartition("<think>")[2]
            content = content.rpartition("</think>")[2]
    return reasoning.strip(), content.strip()


def _tool_call(index: int, call: Mapping[str, Any]) -> str:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"messages[{index}].tool_calls: the arguments of {function.get('name')!r} must be a "
            f"dictionary, not {type(arguments).__name__}; json.loads a JSON string first."
        )
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_argument(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"\n<tool_call>{function['name']}\n{pairs}</tool_call>"


def _argument(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tool_responses(index: int, message: Message) -> str:
    """One block for a text, one for each item of a list: its `output`, else its Python form."""
    content = message.get("content")
    if isinstance(content, str):
        content = [content]
    elif not isinstance(content, Sequence):
        raise ValueError(
            f"messages[{index}].content of a tool must be text or a list of results, not "
            f"{type(content).__name__}; json.dumps a structured result first."
        )
    outputs = (part.get("output", part) if isinstance(part, Mapping) else part for part in content)
    return "".join(f"\n<tool_response>\n{output}\n</tool_response>" for output in outputs)


def _tools_block(tools: Sequence[Mapping[str, Any]]) -> str:
    schemas = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return (
        "<|system|>\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{schemas}</tools>\n\n"
        "For each function call, output the function name and arguments "
        "within the following XML format:\n"
        "<tool_call>{function-name}\n"
        "<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
        "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n"
        "...\n</tool_call>"
    )


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call the assistant asked for. Values are text unless the tool's schema says otherwise."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Response:
    """An assistant turn, read back from its text."""

    reasoning: str
    """Without its tags; "" for an empty thought."""
    content: str | None
    """What the user sees, stripped; None where the thought was never closed."""
    tool_calls: list[ToolCall]
    """Those that could be read whole."""
    well_formed: bool
    """The turn has exactly the format's parts in their order; white space between them is free."""

    def message(self) -> dict[str, Any]:
        """The turn as a message for `render`."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content or "",
            "reasoning_content": self.reasoning,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": dataclasses.asdict(call)}
                for call in self.tool_calls
            ]
        return message


_STOP = re.compile(r"<\|endoftext\|>|<\|user\|>|<\|observation\|>")
_STRAY = re.compile(
    r"\[gMASK\]|<sop>|<eop>|<\|system\|>|<\|assistant\|>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
)
"""Tokens of the format that have no place inside a thought or an answer."""
_CALL = re.compile(r"\s*<tool_call>\s*([^\s<]+)\s*")
_ARGUMENT = re.compile(
    # A value may hold any text: it ends at the closing tag that the format's next tag follows.
    r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>)",
    re.DOTALL,
)


def parse_response(
    text: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
) -> Response:
    """Reads one sampled assistant turn back: the inverse of `render` for its text.

    Never raises: what the policy wrote is data. A turn that ends without a stop marker may be well
    formed all the same (engines can strip it); whether it was truncated is the engine's to say.

    Args:
      text: the decoded sampled ids, from right after the prompt, special tokens included.
      tools: function schemas; an argument whose schema excludes strings is read as JSON where it
        can be.
      enable_thinking: as for the prompt. False: the prompt held the empty thought, so none is
        expected here.
    """
    text, stop, rest = _cut(text, _STOP)
    reasoning, body, well_formed = _split_thought(text, given=enable_thinking is False)
    if body is None:
        return Response(reasoning, None, [], False)
    head, tag, tail = body.partition("<tool_call>")
    content = head.strip()
    calls, calls_whole = _read_calls(tag + tail, tools or ())
    stop_fits = stop in ("", "<|endoftext|>", "<|observation|>" if calls else "<|user|>")
    well_formed = well_formed and calls_whole and stop_fits and not rest
    well_formed = well_formed and not _STRAY.search(reasoning) and not _STRAY.search(content)
    return Response(reasoning, content, calls, well_formed)


def _cut(text: str, pattern: re.Pattern[str]) -> tuple[str, str, str]:
    """str.partition with a pattern."""
    match = pattern.search(text)
    return (text[: match.start()], match[0], text[match.end() :]) if match else (text, "", "")


def _split_thought(text: str, *, given: bool) -> tuple[str, str | None, bool]:
    """Reasoning, the text after it (None: it never ends), whether the thought is as expected."""
    opened = text.lstrip().startswith("<think>")
    # Without an opening tag, a closing one counts only before tool calls: those hold any text.
    closed = "</think>" in (text if opened else text.partition("<tool_call>")[0])
    if not opened and not closed:
        return "", text, given
    thought, _, body = text.partition("</think>")
    reasoning = thought.lstrip().removeprefix("<think>").strip()
    return reasoning, body if closed else None, opened and closed and not given


def _read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], bool]:
    """The tool calls in `text` up to the first broken one, and whether all were whole."""
    functions = [tool.get("function") or tool for tool in tools]
    schemas = {f.get("name"): (f.get("parameters") or {}).get("properties") for f in functions}
    calls: list[ToolCall] = []
    text, position, whole = text.rstrip(), 0, True
    while position < len(text):
        call = _CALL.match(text, position)
        if not call:
            return calls, False
        position, properties = call.end(), schemas.get(call[1]) or {}
        arguments: dict[str, Any] = {}
        while argument := _ARGUMENT.match(text, position):
            key, value = argument[1], argument[2]
            whole = whole and key not in arguments
            arguments[key] = _typed(value, properties.get(key) or {})
            position = argument.end()
        if not text.startswith("</tool_call>", position):
            return calls, False
        calls.append(ToolCall(call[1], arguments))
        position += len("</tool_call>")
    return calls, whole


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """`value`, read as JSON where its schema rules out strings and it can be read so."""
    types: set[str] = set()
    for branch in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        named = branch.get("type", ())
        types.update([named] if isinstance(named, str) else named)
    if not types or "string" in types:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
