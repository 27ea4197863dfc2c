"""The numbers of a patch: exactly one of factor and target length, each in its range, and a message that helps."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from hf_posext.arguments import check_choice, check_factor, check_length, check_positive, resolve_factor

N = 2048
NO_NUMBERS = [True, False, "2", "two", None, [2], (2,), 2j, {"factor": 2}, Decimal(2), torch.tensor(2.0)]
LOWER = r" To shorten a context lower `max_position_embeddings` instead\.$"


@pytest.mark.parametrize(
    "factor", [1, 1.0, 1.5, 2, 8.0, 1e6, np.float32(2), np.float64(1.5), np.int64(4), Fraction(3, 2)], ids=repr
)
def test_finite_number_of_at_least_one_is_a_factor(factor: Any) -> None:
    checked = check_factor(factor)
    assert checked == factor
    assert type(checked) is float


@pytest.mark.parametrize("factor", NO_NUMBERS, ids=repr)
def test_factor_that_is_no_number_is_a_type_error(factor: object) -> None:
    with pytest.raises(TypeError, match=r"^`factor` must be a finite number >= 1, got ") as caught:
        check_factor(factor)
    assert str(caught.value).endswith(f"got {factor!r} of type {type(factor).__name__}.")


@pytest.mark.parametrize("factor", [math.nan, math.inf, np.float64("nan")], ids=repr)
def test_factor_that_is_not_finite_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"^`factor` must be a finite number >= 1, got ") as caught:
        check_factor(factor)
    assert repr(factor) in str(caught.value)


@pytest.mark.parametrize("factor", [0, 0.5, 0.999999, -1, -2.0, -math.inf], ids=repr)
def test_factor_below_one_is_refused_with_how_to_shorten(factor: float) -> None:
    with pytest.raises(ValueError, match=rf"^`factor` must be a finite number >= 1, got {factor!r}\.{LOWER}"):
        check_factor(factor)


@pytest.mark.parametrize("name", ["factor", "rope_theta"])
def test_number_too_large_for_a_float_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number"):
        check_factor(10**400) if name == "factor" else check_positive(name, 10**400)


@pytest.mark.parametrize("value", [1, 4096, np.int32(7)], ids=repr)
def test_whole_number_is_a_length(value: Any) -> None:
    assert check_length("target_length", value) == value
    assert type(check_length("target_length", value)) is int


@pytest.mark.parametrize("value", [True, 4096.0, "4096", None, math.nan, math.inf, [4096], Fraction(4096)], ids=repr)
def test_length_that_is_no_whole_number_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=r"^`target_length` must be a whole number of tokens, got ") as caught:
        check_length("target_length", value)
    assert str(caught.value).endswith(f"got {value!r} of type {type(value).__name__}.")


@pytest.mark.parametrize("value", [0, -1, -4096])
def test_length_below_one_token_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"^`target_length` must be at least 1 token, got {value}\.$"):
        check_length("target_length", value)


@pytest.mark.parametrize(("factor", "target"), [(1, N), (2, 2 * N), (1.5, 3072), (8.0, 8 * N), (1.0001, N)])
def test_factor_gives_the_target_in_whole_tokens(factor: float, target: int) -> None:
    assert resolve_factor(factor, None, N) == (factor, target)
    assert [type(value) for value in resolve_factor(factor, None, N)] == [float, int]


@pytest.mark.parametrize(("target", "factor"), [(N, 1.0), (2 * N, 2.0), (3072, 1.5), (N + 1, (N + 1) / N)])
def test_target_gives_the_exact_factor(target: int, factor: float) -> None:
    assert resolve_factor(None, target, N) == (factor, target)


@pytest.mark.parametrize("trained", [7, 33, 2048, 4097, 131072])
@pytest.mark.parametrize("extra", [0, 1, 5, 99, 4095])
def test_factor_of_a_target_leads_back_to_that_target(trained: int, extra: int) -> None:
    """T / N is seldom a float exactly, and no token may be lost to that."""
    factor, target = resolve_factor(None, trained + extra, trained)
    assert resolve_factor(factor, None, trained) == (factor, target)


def test_neither_factor_nor_target_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match=r"^Give exactly one of `factor` and `target_length`, got neither\.") as caught:
        resolve_factor(None, None, N)
    assert f"For twice the trained {N} tokens: factor=2 or target_length={2 * N}." in str(caught.value)


@pytest.mark.parametrize(("factor", "target"), [(2, 4096), (2.0, 8192), (0.5, 0), ("a", "b")])
def test_both_factor_and_target_are_refused_even_where_they_agree(factor: object, target: object) -> None:
    with pytest.raises(ValueError, match=r"^Give exactly one of `factor` and `target_length`, got `factor`=") as caught:
        resolve_factor(factor, target, N)
    assert f"got `factor`={factor!r} and `target_length`={target!r}." in str(caught.value)


@pytest.mark.parametrize("factor", [value for value in NO_NUMBERS if value is not None], ids=repr)
def test_resolving_refuses_what_is_no_factor(factor: object) -> None:
    with pytest.raises(TypeError, match="`factor` must be a finite number >= 1"):
        resolve_factor(factor, None, N)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 0, 0.5], ids=repr)
def test_resolving_refuses_a_factor_out_of_range(factor: float) -> None:
    with pytest.raises(ValueError, match=f"`factor` must be a finite number >= 1, got {factor!r}"):
        resolve_factor(factor, None, N)


@pytest.mark.parametrize("target", [True, math.nan, math.inf, "4096", 4096.0], ids=repr)
def test_resolving_refuses_what_is_no_target(target: object) -> None:
    with pytest.raises(TypeError, match="`target_length` must be a whole number of tokens, got "):
        resolve_factor(None, target, N)


@pytest.mark.parametrize("target", [0, -1])
def test_resolving_refuses_a_target_below_one_token(target: int) -> None:
    with pytest.raises(ValueError, match=f"`target_length` must be at least 1 token, got {target}"):
        resolve_factor(None, target, N)


@pytest.mark.parametrize("target", [1, N // 2, N - 1])
def test_target_below_the_trained_length_is_refused_with_how_to_shorten(target: int) -> None:
    message = rf"^`target_length` must be at least the trained length {N}, got {target}\.{LOWER}"
    with pytest.raises(ValueError, match=message):
        resolve_factor(None, target, N)


@pytest.mark.parametrize("word", ["full", "all"])
def test_allowed_word_is_returned(word: str) -> None:
    assert check_choice("layers", word, ("full", "all")) == word


@pytest.mark.parametrize(
    ("value", "hint"), [("ful", r" Did you mean `full`\?"), ("x", ""), (None, ""), (["full"], ".*")]
)
def test_other_word_is_refused_with_the_nearest_and_all_allowed(value: object, hint: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^Unknown value of `layers`: .*\.{hint} Allowed: `full`, `all`\.$"
    ) as caught:
        check_choice("layers", value, ("full", "all"))
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [1, 0.1, 1e-12, np.float32(0.5), Fraction(1, 2)], ids=repr)
def test_positive_number_is_returned_as_float(value: Any) -> None:
    assert check_positive("beta_fast", value) == value
    assert type(check_positive("beta_fast", value)) is float


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_positive_that_is_no_number_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=r"^`beta_fast` must be a finite number > 0, got ") as caught:
        check_positive("beta_fast", value)
    assert str(caught.value).endswith(f"got {value!r} of type {type(value).__name__}.")


@pytest.mark.parametrize("value", [0, -0.0, -1, math.nan, math.inf, -math.inf], ids=repr)
def test_number_that_is_not_positive_and_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"^`beta_fast` must be a finite number > 0, got ") as caught:
        check_positive("beta_fast", value)
    assert str(caught.value).endswith(f"got {value!r}.")


def test_no_model_reads_more_than_a_trillion_tokens():
    assert check_length("target_length", 2**40) == 2**40
    with pytest.raises(
        ValueError, match=r"`target_length` must be at most 1099511627776 tokens \(2\^40\), got 10{23}\."
    ):
        check_length("target_length", 10**23)
