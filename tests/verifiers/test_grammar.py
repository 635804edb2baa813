"""Which answers reach a scorer that evaluates."""

import ast
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers import grammar
from verifiers.grammar import EVALUATING, FUNCTIONS, Refused, check, expression

METADATA = {"variable": "x", "variables": ["x", "y"]}

PAYLOADS = [
    "__import__('os').mkdir('canary')",
    "[[__import__('os').mkdir('canary')]]",
    "1+__import__('os').mkdir('canary')",
    "().__class__.__base__.__subclasses__()",
    "[x for x in (1,)]",
    "exec('1')",
    "open('canary','w')",
    "x.func",
    "x[0]",
    "lambda: 1",
    "(y:=1)",
    "f'{1}'",
    "'a'*9",
    "exit()",
    "Integral(x,x)+C",
    "sin",
    "sin(x",
    "x)",
    "1 2",
    "",
    "9**9**9",
    "(9**99)**99**9",
    "((((9**99)**99)**99)**99)",
    "9**(x/x*999999999)",
    "9**1000000",
    "(((((((((((((((((((((((((((((((((((((1)))))))))))))))))))))))))))))))))))))",
    "1+" * 2000 + "1",
    "factorial(99999)",
    "１+1",
    "1;1",
    "1#",
    "1\\\n+1",
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_expressions_refuse_what_could_act_or_run_away(payload: str) -> None:
    with pytest.raises(Refused):
        expression(payload, {"x", "y", "C"}, FUNCTIONS)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("countdown", "49*(85 - 1)/14 - 42 - 73"),
        ("puzzle24", "8*(5*1 - 2)"),
        ("simple_integration", "-X**5/7 - X**3/2 + C".replace("X", "x")),
        ("simple_integration", "x**(-2) + 3*x**(1/2) + 7"),
        ("intermediate_integration", "x*asin(3*x) + sqrt(1 - 9*x**2)/3 + C"),
        ("intermediate_integration", "-3*(4*x + 2)**4/16 + E**(-3*x**2 + 1)*sin(x)**3 + C"),
        ("polynomial_multiplication", "568*y**3 - 152*y**2 + 10863*y*x - 2907"),
        ("binary_matrix", "0 1 1\n2 1 0\n"),
        ("binary_matrix", "[[0, 1], [1, 2]]"),
        ("spiral_matrix", "1 2 3 -4"),
        ("spiral_matrix", "[1, 2, 3]"),
        ("n_queens", "_ Q\nQ _"),
        ("n_queens", "[['_', 'Q'], [\"Q\", '_']]"),
        ("string_insertion", "ABCDE"),
        ("string_insertion", "['A', 'B']"),
    ],
)
def test_honest_answers_pass(dataset: str, answer: str) -> None:
    check(dataset, answer, METADATA)


@pytest.mark.parametrize("dataset", sorted(EVALUATING))
@pytest.mark.parametrize("payload", PAYLOADS[:13])
def test_no_evaluating_data_set_lets_code_through(dataset: str, payload: str) -> None:
    with pytest.raises(Refused):
        check(dataset, payload, METADATA)


_HARMLESS = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd),
    *(ast.Constant, ast.Name, ast.Load, ast.Call, ast.List, ast.Tuple),
)


@settings(max_examples=300, deadline=None)
@given(
    dataset=st.sampled_from(sorted(EVALUATING)),
    text=st.one_of(
        st.text(max_size=40),
        st.lists(
            st.sampled_from(
                [*"0123456789+-*/()[],'\"xyQ_ABE. \n:={}%", "**", "sin", "__", "import", "9**9", "lambda "]
            ),
            max_size=30,
        ).map("".join),
    ),
)
def test_whatever_passes_is_arithmetic_or_a_list(dataset: str, text: str) -> None:
    """Read as Python, an admitted answer holds no attribute, subscript, comprehension, or call but of a function."""
    try:
        check(dataset, text, METADATA)
        tree = ast.parse(text.strip(), mode="eval")
    except (Refused, SyntaxError):
        return
    for node in ast.walk(tree):
        assert isinstance(node, _HARMLESS)
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            assert node.func.id in FUNCTIONS
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int | float | str)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["9", "99", "x", "(", ")", "**", "*", "/", "+", "-", "sqrt"]), max_size=30).map("".join)
)
def test_admitted_numbers_stay_small(text: str) -> None:
    """The bound on digits is a bound: exact arithmetic on what passes never exceeds it."""
    try:
        expression(text.replace("x", "7"), (), ())
    except Refused:
        return
    try:
        value = eval(text.replace("x", "7"), {"__builtins__": {}})  # noqa: S307  # digits and operators made above
    except (SyntaxError, ZeroDivisionError, OverflowError, TypeError):
        return
    assert not isinstance(value, int) or abs(value) < 10**grammar.MAX_DIGITS


def test_every_scorer_that_evaluates_has_a_grammar() -> None:
    """Look for evaluation in the library's own scorers, so that an update of it cannot add one unseen."""
    found = subprocess.run([sys.executable, "-c", _SEARCH], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) == EVALUATING


_SEARCH = r"""
import inspect, re
from reasoning_gym.factory import DATASETS
doubtful = re.compile(r"(?<!_)\b(eval|exec|parse_expr|sympify|compile|literal_eval|pickle|subprocess|system|S)\((\w+)")
for name, (data_set, _) in DATASETS.items():
    for argument in doubtful.findall(inspect.getsource(data_set.score_answer)):
        if argument[1] in ("answer", "user_answer"):
            print(name)
            break
"""
