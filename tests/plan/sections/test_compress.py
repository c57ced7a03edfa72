"""[compress]: what it refuses, with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.sections.refusals import expect_refusal
from torsh_distributed.plan.sections.compress import METHODS, CompressConfig


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"method": "powersdg:4"},
            "compress.method 'powersdg' is unknown",
            "did you mean powersgd?",
            id="unknown-method",
        ),
        pytest.param(
            {"method": "topk:7"},
            (
                "compress.method 'topk:7': the colon is followed by a number from 1e-06 to 1 (share of the "
                "elements that is sent)"
            ),
            'the default is "topk:0.1"',
            id="share-above-one",
        ),
        pytest.param(
            {"method": "powersgd:1.5"},
            (
                "compress.method 'powersgd:1.5': the colon is followed by an integer from 1 to 1024 (rank of the "
                "factors)"
            ),
            'the default is "powersgd:4"',
            id="rank-not-an-integer",
        ),
        pytest.param(
            {"method": "nbit:1"},
            (
                "compress.method nbit:1 with compress.error_feedback 'ef14' diverges: a message drawn between two"
                " levels is further from the gradient than zero is, so the error grows from step to step"
            ),
            'use "sign" for one bit with error feedback, "nbit:2", or compress.error_feedback = "none"',
            id="one-bit-with-feedback",
        ),
        pytest.param(
            {"method": "fp16:2"},
            "compress.method fp16 takes no number; got 'fp16:2'",
            'write "fp16"',
            id="number-not-taken",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"compress": keys}, message, hint)


def test_a_method_carries_its_number_or_the_default() -> None:
    assert CompressConfig(method="powersgd:2").name == "powersgd"
    assert CompressConfig(method="powersgd:2").parameter == 2
    assert CompressConfig(method="topk").parameter == 0.1
    assert CompressConfig(method="fp16").parameter is None


@pytest.mark.parametrize("method", METHODS)
def test_the_default_number_of_a_method_is_allowed(method: str) -> None:
    number = METHODS[method].number
    spelled = method if number is None else f"{method}:{number.default:g}"
    assert CompressConfig(method=spelled).parameter == CompressConfig(method=method).parameter
