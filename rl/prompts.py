"""From a task to token ids, and from text to token ids.

Text of tasks and completions is data: whatever it spells, it becomes ordinary tokens. Special tokens come from the chat
template's own parts only.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from rl.errors import PromptError
from rl.settings import PromptSettings
from verifiers.base import Task

Message = Mapping[str, str]
"""One turn of a chat: `role` (system, user or assistant) and `content`."""


def render(tokenizer: Any, settings: PromptSettings, task: Task, room: int | None = None) -> list[int]:
    """Token ids of the prompt that shows `task`: system message, a solved example as chat turns, the question.

    `room` is the most tokens the prompt may have. Raises PromptError if it has more.
    """
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    if settings.shots and task.example is not None:
        messages.append({"role": "user", "content": task.example.prompt})
        messages.append({"role": "assistant", "content": task.example.answer})
    messages.append({"role": "user", "content": task.prompt})
    tokens = render_messages(tokenizer, messages)
    if room is not None and len(tokens) > room:
        raise PromptError(
            f"the prompt of a {task.kind} task takes {len(tokens)} tokens and the model has room for {room}: "
            "make its tasks easier, set prompt.shots to 0, or lower sampling.max_new_tokens"
        )
    return tokens


def render_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat, up to where the assistant's next turn begins.

    Raises PromptError if the model's chat template refuses these messages.
    """
    # The template sees a stand-in for each text, so nothing in a text can act on the template or pass for one of its
    # special tokens. What lies between two special tokens is tokenised as one piece, as it would be without stand-ins.
    stand_ins = {f"\ue000{number}\ue001": message["content"] for number, message in enumerate(messages)}
    shown = [{"role": m["role"], "content": s} for m, s in zip(messages, stand_ins, strict=True)]
    if tokenizer.chat_template is None:
        return _bos(tokenizer) + encode_text(tokenizer, _fill(_plain(shown), stand_ins))
    try:
        frame = str(tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise PromptError(
            f"the model's chat template refuses this prompt ({error}): set prompt.system to an empty string"
        ) from error
    if list(stand_ins)[-1] not in frame:
        raise PromptError("the model's chat template leaves the question out: it cannot be used for chat")
    tokens: list[int] = []
    position = 0
    for special in _special(tokenizer).finditer(frame):
        tokens += encode_text(tokenizer, _fill(frame[position : special.start()], stand_ins))
        tokens.append(int(tokenizer.convert_tokens_to_ids(special[0].strip())))
        position = special.end()
    return tokens + encode_text(tokenizer, _fill(frame[position:], stand_ins))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` as data: no special token among them, none added.

    A lone surrogate, which is what Python reads bytes as that are not UTF-8, becomes a question mark.

    Raises PromptError if this tokenizer makes one all the same.
    """
    if not text:
        return []
    text = text.encode("utf-8", "replace").decode("utf-8")
    tokens = [int(t) for t in tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]]
    # An unknown character is no control token, though tokenizers list its id among the special ones.
    if set(tokens) & (set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}):
        raise PromptError("this model's tokenizer turns plain text into special tokens: it cannot be used safely")
    return tokens


def encode_completion(tokenizer: Any, text: str, finished: bool) -> list[int]:
    """Token ids of a completion known only as text. A finished one ends with EOS, a truncated one does not."""
    tokens = encode_text(tokenizer, text)
    return [*tokens, int(tokenizer.eos_token_id)] if finished else tokens


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of sampled tokens, special tokens left out."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _fill(piece: str, stand_ins: Mapping[str, str]) -> str:
    return re.sub("\ue000\\d+\ue001", lambda match: stand_ins.get(match[0], match[0]), piece)


def _special(tokenizer: Any) -> re.Pattern[str]:
    """Matches the special tokens of a rendered template, with the white space that a token swallows."""
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
    tokens.sort(key=lambda token: len(token.content), reverse=True)
    parts = [
        ("\\s*" if token.lstrip else "") + re.escape(token.content) + ("\\s*" if token.rstrip else "")
        for token in tokens
    ]
    return re.compile("|".join(parts) or r"(?!)")


def _plain(messages: Sequence[Message]) -> str:
    """The frame for a model without a chat template: lines of questions and answers."""
    names = {"system": "", "user": "Question: ", "assistant": "Answer: "}
    lines = [names[message["role"]] + message["content"] for message in messages]
    return "\n".join([*lines, "Answer:"])


def _bos(tokenizer: Any) -> list[int]:
    """The token that this tokenizer puts before every text, if it does."""
    empty = list(tokenizer("")["input_ids"])
    return [int(empty[0])] if empty and empty[0] == tokenizer.bos_token_id else []
