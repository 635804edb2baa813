"""What is taken for the answer in a completion."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from verifiers.base import extract_answer

PIECES = st.lists(st.sampled_from(["<answer>", "</answer>", "<", "answer>", "/", " 7 ", "\n"]), max_size=12).map(
    "".join
)


@given(PIECES)
@example("<answer>a<answer>b</answer></answer>")
@example("<answer>a</answer>b<answer>c")
def test_the_last_pair_of_tags_counts(completion: str) -> None:
    """The specification, which as code would take quadratic time on many open tags."""
    pairs = re.findall("<answer>(.*?)</answer>", completion, re.DOTALL)
    assert extract_answer(completion) == (pairs[-1] if pairs else completion).strip()
