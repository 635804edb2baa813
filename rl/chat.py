"""One turn of a chat, with what a program that asked for it wants to know beside the text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rl.prompts import Message, render_messages
from rl.rollouts import ChatAnswer, Sampling

if TYPE_CHECKING:
    from rl.learner import Learner


def chat(
    learner: "Learner", messages: Sequence[Message], sampling: Sampling, seed: int, say: Callable[[str], None] | None
) -> ChatAnswer:
    """The policy's next turn, of `sampling.max_new_tokens` or as many as fit. `say` gets its text as it comes.

    Raises PromptError if the model's chat template refuses the messages, and whatever `Learner.chat` raises.
    """
    prompt = len(render_messages(learner.tokenizer, messages))
    context, step = learner.context, learner.policy.step
    room = min(sampling.max_new_tokens, context - prompt)
    if room < 1:
        return ChatAnswer("", False, 0, prompt, context, step)
    said = learner.chat(messages, replace(sampling, max_new_tokens=room), seed, say=say)
    return ChatAnswer(said.text, said.finished, len(said.tokens or ()), prompt, context, step)
