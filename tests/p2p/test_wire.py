"""What a batch looks like on the wire, and that it comes back as it went."""

import itertools
import math
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p.ids import peer_id_of, public_key_of, short
from p2p.reasons import Reason
from p2p.schema import MAX_CONFIG, MAX_GROUPS, MAX_USES
from p2p.wire import MAX_ENVELOPE, Batch, Use, WireError, WireGroup, open_envelope, seal, seal_round
from rl.rollouts import MAX_GROUP, Completion, RolloutGroup
from tests.p2p.forging import NOW, batch, forge, group, key, peer, tree
from verifiers.base import MAX_SEED, Task, TaskRef

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NUMBERS = st.integers(0, MAX_SEED)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
COMPLETIONS = st.builds(
    Completion, TEXTS, st.booleans(), st.none(), st.none() | st.lists(FLOATS, max_size=5).map(tuple)
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
GROUPS = st.builds(
    WireGroup,
    st.builds(TaskRef, NAMES, NAMES, TEXTS, NUMBERS, NUMBERS),
    TEXTS,
    st.lists(COMPLETIONS, min_size=2, max_size=4).map(tuple),
    NUMBERS,
)
USES = st.builds(Use, st.integers(1, 99).map(peer), NUMBERS, NUMBERS)


def in_order(uses: list[Use]) -> tuple[Use, ...]:
    return tuple(sorted(uses, key=lambda use: public_key_of(use.peer)))


BATCHES = st.builds(
    Batch,
    st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True),
    NUMBERS,
    st.integers(0, 2**40).map(lambda milliseconds: milliseconds / 1000),
    NUMBERS,
    NAMES,
    st.lists(GROUPS, min_size=1, max_size=3).map(tuple),
    st.lists(USES, max_size=3, unique_by=lambda use: use.peer).map(in_order),
)
BRIEFLY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rollouts(count: int, text: str, samples: int = 2) -> list[RolloutGroup]:
    return [
        RolloutGroup(
            Task(TaskRef("fake", "1", "{}", 1, index), "fake", f"question {index}", "the answer"),
            tuple(Completion(f"{text}{number}", True, (1, 2), (-0.5, -1.0)) for number in range(samples)),
            4,
        )
        for index in range(count)
    ]


@BRIEFLY
@given(BATCHES)
def test_a_batch_comes_back_as_it_went_under_one_id(sent: Batch) -> None:
    sealed = seal(key(1), sent)
    opened = open_envelope(sealed.data)
    assert opened == sealed
    assert opened.batch == sent
    assert opened.origin == peer(1)
    assert seal(key(2), sent).id != sealed.id


@BRIEFLY
@given(st.data())
def test_any_change_of_a_byte_is_refused(data: st.DataObject) -> None:
    whole = seal(key(1), batch(1, [group(n, ["some text " * 5] * 3) for n in range(3)])).data
    place = data.draw(st.integers(0, len(whole) - 1))
    spoiled = bytearray(whole)
    spoiled[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError):
        open_envelope(bytes(spoiled))
    with pytest.raises(WireError):
        open_envelope(whole[:place])
    with pytest.raises(WireError):
        open_envelope(whole + whole[:1])


@BRIEFLY
@given(st.binary(max_size=400))
def test_random_bytes_are_refused_wherever_they_stand(data: bytes) -> None:
    for hostile in (data, forge(data)):
        with pytest.raises(WireError):
            open_envelope(hostile)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), inner),
    max_leaves=10,
)


@BRIEFLY
@given(TREES, st.sampled_from(["swarm", "seq", "time", "round", "model", "groups", "more"]), st.booleans())
def test_a_signed_batch_with_anything_in_it_is_refused(value: object, name: str, inside: bool) -> None:
    content = tree()
    target = content["groups"][0]["task"] if inside else content
    before = dict(target)
    target[name] = value
    if target != before or type(value) is not type(before.get(name)):
        try:
            accepted = open_envelope(forge(content)).batch
        except WireError:
            return
        # A value of the right type and in bounds makes another batch, which is as good as any.
        assert tree(accepted) == content


def test_an_id_does_not_depend_on_the_compression() -> None:
    sealed = seal(key(1), batch())
    again = open_envelope(forge(tree()))
    assert again.data != sealed.data or again == sealed
    assert again.id == sealed.id


def test_lone_surrogates_in_completions_become_question_marks() -> None:
    sealed = seal(key(1), batch(groups=[group(answers=["\ud800 right", "wrong"])]))
    assert [c.text for c in sealed.batch.groups[0].completions] == ["? right", "wrong"]


def test_what_cannot_be_written_is_said_when_it_is_sealed() -> None:
    good = batch()
    (one,) = good.groups
    for bad in (
        replace(good, swarm="No Such Name"),
        replace(good, sequence=-1),
        replace(good, created=math.nan),
        replace(good, created=math.inf),
        replace(good, created=-1.0),
        replace(good, round=2**63),
        replace(good, groups=()),
        replace(good, groups=(one,) * (MAX_GROUPS + 1)),
        replace(good, groups=(replace(one, prompt="\ud800"),)),
        replace(good, groups=(replace(one, completions=one.completions[:1]),)),
        replace(good, groups=(replace(one, completions=one.completions * MAX_GROUP),)),
        replace(good, groups=(replace(one, ref=replace(one.ref, config="x" * (MAX_CONFIG + 1))),)),
        replace(good, groups=(replace(one, completions=(Completion("", True, logprobs=(math.nan,)),) * 2),)),
        replace(good, groups=(replace(one, completions=(Completion("", True, logprobs=(1e300,)),) * 2),)),
    ):
        with pytest.raises(WireError) as caught:
            seal(key(1), bad)
        assert caught.value.reason == Reason.SCHEMA


def test_a_round_travels_in_one_envelope_if_it_fits() -> None:
    (envelope,) = seal_round(key(1), "main", 9, "tiny", rollouts(8, "text"), lambda: 5, NOW)
    sent = envelope.batch
    assert (sent.swarm, sent.sequence, sent.created, sent.round, sent.model) == ("main", 5, NOW, 9, "tiny")
    assert [one.ref.index for one in sent.groups] == list(range(8))
    assert all(answer.tokens is None and answer.logprobs is None for one in sent.groups for answer in one.completions)
    assert b"the answer" not in repr(sent).encode()


def test_logprobs_travel_if_asked_for() -> None:
    (envelope,) = seal_round(key(1), "main", 9, "tiny", rollouts(1, "text"), lambda: 5, NOW, logprobs=True)
    assert envelope.batch.groups[0].completions[0].logprobs == (-0.5, -1.0)


def test_a_round_that_is_too_large_is_split_and_no_group_is_lost() -> None:
    noise = "".join(chr(0x4E00 + (n * n * 2654435761 >> 7) % 20000) for n in range(12000))
    numbers = itertools.count(100)
    groups = rollouts(30, noise)
    for place, one in enumerate(groups):
        shifted = tuple(replace(answer, text=answer.text[place * 131 :]) for answer in one.completions)
        groups[place] = replace(one, completions=shifted)
    envelopes = seal_round(key(1), "main", 9, "tiny", groups, lambda: next(numbers), NOW)
    assert len(envelopes) > 1
    assert all(len(envelope.data) <= MAX_ENVELOPE for envelope in envelopes)
    assert [e.batch.sequence for e in envelopes] == list(range(100, 100 + len(envelopes)))
    assert [one.ref.index for e in envelopes for one in e.batch.groups] == list(range(30))


def test_many_small_groups_are_split_by_their_number() -> None:
    numbers = itertools.count()
    envelopes = seal_round(key(1), "main", 9, "tiny", rollouts(100, "x", 16), lambda: next(numbers), NOW)
    assert [one.ref.index for e in envelopes for one in e.batch.groups] == list(range(100))


def test_a_group_that_fits_nowhere_is_left_out_and_said() -> None:
    numbers = itertools.count()
    groups = rollouts(4, "x")
    groups[1] = replace(groups[1], completions=(Completion("y" * (2**18 + 1), False),) * 2)
    groups[2] = replace(groups[2], task=replace(groups[2].task, prompt="\ud800"))
    lost: list[int] = []
    envelopes = seal_round(
        key(1),
        "main",
        9,
        "m" * 1000,
        groups,
        lambda: next(numbers),
        NOW,
        left_out=lambda one, error: lost.append(one.task.ref.index),
    )
    assert [one.ref.index for e in envelopes for one in e.batch.groups] == [0, 3]
    assert lost == [1, 2]


def test_uses_travel_once_and_cost_no_group() -> None:
    uses = in_order([Use(peer(number), number, number) for number in range(1, MAX_USES + 1)])
    noise, small = os.urandom(2**18).hex(), rollouts(1, "x")[0]

    def sent(groups: list[RolloutGroup]) -> list[Batch]:
        numbers = itertools.count()
        sealed = seal_round(key(1), "main", 9, "tiny", groups, lambda: next(numbers), NOW, uses=uses)
        return [envelope.batch for envelope in sealed]

    (whole,) = sent([small])
    assert whole.uses == uses
    # Hexadecimal digits are half a byte each when compressed: this leaves about a kilobyte for all else.
    halves = tuple(Completion(noise[place : place + 228_000], True) for place in (0, 228_000))
    full = replace(small, completions=halves)
    assert [(len(one.groups), one.uses) for one in sent([full, small])] == [(1, ()), (1, uses)]


def test_a_peer_id_holds_its_key() -> None:
    public = key(1).public_key().public_bytes_raw()
    assert peer(1).startswith("12D3KooW")
    assert public_key_of(peer_id_of(public)) == public
    assert peer(1).endswith(short(peer(1)))


@pytest.mark.parametrize(
    "bad", ["", "12D3KooW", "Q" * 52, "1" * 52, "é" * 52, "0" * 52, peer(1) + "1", " " + peer(1)[1:]]
)
def test_other_text_is_no_peer_id(bad: str) -> None:
    with pytest.raises(ValueError, match="peer id"):
        public_key_of(bad)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_other_bytes_are_no_key(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        peer_id_of(bytes(length))
