"""The tokenizer of the tiny model: characters, whole phrases for boilerplate, and bytes for everything else.

A ReasoningGYM question is a long English sentence around a few numbers. As characters it would be 60 to 250 tokens, of
which a model of 380,000 weights has no use for most, so each constant sentence is one token. Phrases are
ordinary (non-special) added tokens: decoding gives the exact text back, and text that holds none of them is read
character by character, or byte by byte where a character is not in the vocabulary.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, SEP = "<|pad|>", "<|bos|>", "<|eos|>", "<|sep|>"
"""Special tokens. `SEP` ends the prompt and so begins the answer."""

CHAT_TEMPLATE = "{{ bos_token }}{{ messages[-1]['content'] }}" + SEP
"""Only the last message is shown: the model is too small to use a system message or a solved example."""

CONTEXT = 2048
"""Longest sequence in tokens, far above any prompt of its own tasks: other text is read by characters."""

SYMBOLS = "°²³¬×÷αβγθλπ–—‘’“”…→∈∑√∞∧∨≈≠≤≥─│█░▒▓"
"""Characters outside ASCII that ReasoningGYM's questions use, or that often stand in text about numbers."""

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

QUESTION_PHRASES = (
    # base_conversion
    "Your task is to convert a number between two different bases.\n\n"
    "If the target base is > 10, use lowercase letters a-z for digits above 9.\n\n"
    "Now, convert the ",
    "binary",
    "base-",
    " number ",
    " to ",
    # basic_arithmetic, chain_sum
    "Calculate ",
    "State the final answer to the following arithmetic problem: ",
    " + ",
    " - ",
    " * ",
    " =",
    # fraction_simplification
    "Simplify the fraction ",
    " to its lowest terms. Give only the simplified fraction as your final answer.",
    # decimal_arithmetic
    "Please solve this problem to a maximum of ",
    " significant digits, rounding up from the half. Only reply with the final value.\n",
    " = ?",
    # calendar_arithmetic
    "If today is ",
    ", what day of the week will it be in ",
    " days? ",
    ", what day of the week was it ",
    " days ago? ",
    "Starting from ",
    ", which weekday falls after a ",
    "-day jump? ",
    ", which weekday was it ",
    " days before? ",
    "Count forward ",
    "Count backward ",
    " days from ",
    " - what's the weekday? ",
    ", 2022",
    "Answer with the weekday's name (e.g., Monday, Tuesday, etc.).",
    "Provide the full name of the weekday.",
    "State the weekday (Monday through Sunday).",
    "Give the weekday name in full.",
    "Reply with just the weekday name.",
    "Write out the full weekday name.",
    "Respond with the weekday (Monday-Sunday).",
    "Answer using the complete weekday name.",
    "Name the day of the week in full.",
    # gcd
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
    # spell_backward, count_bits
    "Spell this word backward (example: sun -> nus): ",
    "How many 1 bits are there in the binary representation of the number ",
)

ANSWER_PHRASES = (
    *("Answer: ", "The answer is ", "It is ", "Result: ", "I think ", "So it must be ", "That makes ", "I get "),
    *("Maybe ", "Let me see: ", "Solution: ", "Final answer: ", "Well, ", "Output: ", "Thus ", "My guess: "),
    *("Clearly ", "We have ", "This gives ", "Easy: ", "Value: ", "I believe ", "Probably ", "Hence "),
    *(" I think", " is the answer", ", surely", " or so", " it is"),
)
"""What the model says around an answer instead of giving it plainly (see `bench.tiny_tasks`)."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, about 480 tokens. It adds no special token by itself: the chat template writes them."""
    characters = [*(chr(code) for code in range(32, 127)), "\n", "\t", *SYMBOLS]
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    # Without merges, byte-pair encoding is a character tokenizer that falls back to bytes.
    core = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, BOS, EOS, SEP)])
    phrases = dict.fromkeys((*QUESTION_PHRASES, *WEEKDAYS, *MONTHS, *ANSWER_PHRASES))
    core.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[SEP],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
