"""Which compiled program may run in place of which: pure rules over shapes."""

from dataclasses import fields, replace

import pytest

from jspark.shapes import VerifyShape, cheapest, serves
from jspark.step import Sampling

PLAIN = VerifyShape(2, 4, Sampling(), 8, True, None)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 4},
        {"pages": 8},
        {"verify_tokens": 16},
        {"sampling": Sampling(sampled=True, coupled=True)},
        {"sampling": Sampling(penalties=True, steering=True)},
        {"logprobs": 0},
        {"masked": 2},
        {"prefill": (32, 2, 32)},
    ],
)
def test_what_is_larger_serves_and_what_is_smaller_does_not(change):
    larger = replace(PLAIN, **change)
    assert serves(larger, PLAIN)
    if larger.prefill is None:
        assert not serves(PLAIN, larger)
    else:
        assert not serves(PLAIN, larger, [20])


def test_every_part_counts(rng):
    """Of random pairs exactly those serve whose numbers are all as large; and serving is transitive."""

    def some() -> VerifyShape:
        flags = {f.name: bool(rng.integers(2)) for f in fields(Sampling)}
        rows, pages, tokens = rng.integers(1, 4, 3).tolist()
        logprobs = [None, 0, 5][rng.integers(3)]
        return VerifyShape(
            rows, pages, Sampling(**flags), tokens, True, None, logprobs, None, int(rng.integers(3))
        )

    def numbers(s: VerifyShape) -> list[int]:
        asked = -1 if s.logprobs is None else s.logprobs
        return [s.rows, s.pages, s.verify_tokens, asked, s.masked, *map(int, vars(s.sampling).values())]

    shapes = [some() for _ in range(60)]
    pairs = {(a, b) for a in shapes for b in shapes if serves(a, b)}
    assert pairs == {
        (a, b) for a in shapes for b in shapes if all(x >= y for x, y in zip(numbers(a), numbers(b), strict=True))
    }
    assert len(pairs) > len(set(shapes))
    assert all((a, d) in pairs for a, b in pairs for c, d in pairs if b == c)


def test_a_program_that_drafts_runs_a_step_that_does_not_unless_rows_are_rejection_sampled():
    undrafted = replace(PLAIN, drafts=False)
    assert serves(PLAIN, undrafted)
    assert not serves(undrafted, PLAIN)
    hot = Sampling(sampled=True, rejection=True)
    assert not serves(replace(PLAIN, sampling=hot), replace(undrafted, sampling=hot))
    coupled = Sampling(sampled=True, coupled=True)
    assert serves(
        replace(PLAIN, sampling=Sampling(sampled=True, coupled=True, rejection=True)),
        replace(undrafted, sampling=coupled),
    )


def test_prompt_chunks_need_rows_and_tiles():
    several, alone = replace(PLAIN, prefill=(64, 4, 32)), replace(PLAIN, prefill=(64, 1, 64))
    small = replace(PLAIN, prefill=(32, 2, 32))
    assert serves(several, small, [20, 12])
    assert serves(several, small, [1, 1, 1, 1])
    assert not serves(several, small, [1, 1, 1, 1, 1]), "a tile holds rows of one prompt"
    assert not serves(small, several, [40])
    assert serves(several, alone, [60])
    assert serves(alone, several, [60])
    assert not serves(alone, small, [10, 10])


def test_kernels_have_no_tiles_and_are_never_given_prefill_rows_of_nobody():
    chunk = replace(PLAIN, prefill=(64, 0, 0))
    assert serves(chunk, replace(PLAIN, prefill=(32, 0, 0)), [9, 9, 9])
    assert not serves(chunk, replace(PLAIN, prefill=(32, 0, 0)), [65])
    assert not serves(chunk, PLAIN)


def test_prompt_logprobs_come_from_programs_that_return_as_many():
    asked = replace(PLAIN, prefill=(32, 2, 32), prompt_logprobs=5)
    assert serves(replace(asked, prompt_logprobs=20), asked, [8])
    assert not serves(replace(asked, prompt_logprobs=0), asked, [8])
    assert not serves(replace(asked, prompt_logprobs=None), asked, [8])


def test_the_cheapest_has_the_fewest_packed_rows_then_the_fewest_request_rows():
    wanted = VerifyShape(1, 1, Sampling(), 1, False, None)
    tall = VerifyShape(8, 1, Sampling(), 8, False, None)
    wide = VerifyShape(1, 64, Sampling(), 8, False, None)
    drafting = VerifyShape(1, 1, Sampling(), 8, True, None)
    chunky = VerifyShape(1, 1, Sampling(), 4, False, (32, 2, 32))
    sampling = VerifyShape(1, 64, Sampling(sampled=True, coupled=True), 8, False, None)
    assert cheapest([tall, chunky, drafting, sampling, wide], wanted) == wide
    assert cheapest([chunky, drafting], wanted) == drafting
    assert cheapest([chunky], wanted) == chunky
    assert cheapest([tall, wide], replace(wanted, verify_tokens=9)) is None
    assert cheapest([], wanted) is None
