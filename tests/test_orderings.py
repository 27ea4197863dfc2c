"""Orders of methods that the papers agree on hold on the embedded models, by paired intervals over held-out books.

Only what REFERENCE 6.4 calls safe is asserted, on each model by itself, in nats per token and at a fraction of the cost
of `recipes/evaluate_long_context.py`, whose result set has all arms, lengths and books.
"""

import pytest

import hf_posext
from hf_posext import ComparisonReport
from hf_posext.demo import load_demo
from hf_posext.evaluation.perplexity_report import Measurement
from recipes.long_context_pairs import CLAIMS, CONTRADICTED, DESCRIPTIVE, HOLDS, UNCLEAR, exact, judge, kendall

TRAINED = 256
METHODS = ["pi", "ntk", "ntk_by_parts", "yarn", {"method": "yarn", "dynamic": True}, "self_extend", "rerope", "alibi"]
SCOPE = {"llama": ((1, 4, 8), 5), "gpt_neox": ((1, 4), 6)}  # multiples of N, and books: what half a minute can pay
TARGETS = 224  # tokens, more than the 128 of the result set: as dear, and a narrower interval
UNCLEAR_HERE = {  # model, order, better, worse -> what the result set has, in nats per token
    ("llama", "O8", "yarn", "ntk_by_parts"): "4N +0.010 [-0.006, +0.024], 8N -0.029, 16N -0.080: small for five books",
    ("gpt_neox", "O8", "yarn", "ntk_by_parts"): "4N +0.012 [-0.009, +0.029]; a quarter of each head rotates",
    ("gpt_neox", "O7", "none", "ntk"): "patched for 16N -0.097; here for 4N -0.017 [-0.036, +0.007]",
}
SAFE = [
    (name, claim.key, claim.better, claim.worse, times)
    for name, (lengths, _) in SCOPE.items()
    for claim in CLAIMS
    for times in claim.times
    if claim.role != DESCRIPTIVE and times in lengths
    if (name, claim.key, claim.better, claim.worse) not in UNCLEAR_HERE
]
WIDE = {"self_extend": TRAINED // 2, "rerope": 3 * TRAINED // 4}  # windows in tokens


@pytest.fixture(scope="module")
def demos():
    return {name: load_demo(name) for name in SCOPE}


def measured(model, tokenizer, documents, times, books):
    return hf_posext.compare(
        model,
        tokenizer,
        documents[:books],
        methods=METHODS,
        context_lengths=[multiple * TRAINED for multiple in times],
        targets=TARGETS,
        endpoints_per_document=1,
        bars=["none", "truncate"],
        progress=False,
    )


@pytest.fixture(scope="module")
def reports(demos):
    return {name: measured(*demos[name], *scope) for name, scope in SCOPE.items()}


@pytest.mark.parametrize(("name", "key", "better", "worse", "times"), SAFE)
def test_a_safe_order_holds(reports, name, key, better, worse, times):
    report = reports[name] if times > 1 else reports[name].price
    found = report.difference(better, worse, times * TRAINED)
    assert found["low"] <= 0 if key == "O5" else found["high"] < 0


@pytest.mark.parametrize("name", SCOPE)
def test_a_factor_that_follows_the_length_costs_short_text_not_one_bit(reports, name):
    """O2."""
    short = {one.arm: one.nll for one in reports[name].short}
    assert short["yarn (dynamic)"] == short["none"]


def asked(demo, method, context_length, trials, bars):
    """Copies of a string at the start of the context, patched for it or, within N, for 4 times N."""
    model, tokenizer, _ = demo
    options = {"window": WIDE[method]} if method in WIDE else {}
    with hf_posext.patched(model, method, target_length=max(context_length, 4 * TRAINED), **options):
        return hf_posext.passkey(
            model, tokenizer, context_lengths=[context_length], probe="copy", depths=[0], trials=trials,
            answer_length=1, bars=bars, progress=False,
        )  # fmt: skip


@pytest.mark.parametrize("times", [4, 8])
@pytest.mark.parametrize("method", ["yarn", *WIDE])
def test_an_extension_copies_from_where_truncation_sees_nothing(demos, method, times):
    """That grouping copies far better than YaRN, as published, does not hold here, and so is not asserted.

    With default windows, 48 trials at 4 and 8 times N: YaRN 0.98 and 0.90, `self_extend` 0.77 and 0.69, `rerope` 0.58
    and 0.52; on gpt_neox 0.90 and 0.85, 0.83 and 0.60, 0.62 and 0.35. With wider windows they are as good.
    """
    report = asked(demos["llama"], method, times * TRAINED, 8, ["truncate"])
    far, cut = (report.over_depths(arm, times * TRAINED) for arm in (method, "truncate"))
    assert report.gates["none"]["accuracy"] >= 0.8
    assert far["low"] > cut["high"]


@pytest.mark.parametrize("method", WIDE)
def test_grouping_keeps_copies_within_the_window_that_yarn_loses(demos, method):
    near, of_yarn = (
        asked(demos["llama"], name, TRAINED, 32, []).over_depths(name, TRAINED) for name in (method, "yarn")
    )
    assert near["low"] > of_yarn["high"]


def report_of(sums, times=4):
    """A comparison of arms at one length, from NLL per document of 100 tokens; the price is left equal."""
    documents = tuple(range(len(next(iter(sums.values())))))

    def one(arm, nll, length):
        return Measurement(arm, length, documents, tuple(nll), (100,) * len(documents))

    protocol = {
        "protocol": "tail", "context_lengths": [TRAINED, times * TRAINED], "targets": 100, "resamples": 2000, "seed": 0,
        "bars": ["none"], "bos": "none",
    }  # fmt: skip
    measurements = [one(arm, nll, times * TRAINED) for arm, nll in sums.items()]
    records = {arm: None if arm == "none" else {"dynamic": arm == "pi"} for arm in sums}
    short = [one(arm, [100.0] * len(documents), TRAINED) for arm in sums]
    return ComparisonReport(protocol, measurements, records, TRAINED, short=short)


LEVELS = {"self_extend": 1.0, "rerope": 1.0, "yarn": 2.0, "ntk_by_parts": 3.0, "pi": 4.0, "ntk": 4.0, "none": 4.0}


def spread(levels):
    return {arm: [100 * level + 50 * book for book in range(12)] for arm, level in levels.items()}


@pytest.mark.parametrize(
    ("levels", "tau"),
    [
        (LEVELS, 1.0),
        ({arm: -level for arm, level in LEVELS.items()}, -1.0),
        (LEVELS | {"yarn": 3.0, "ntk_by_parts": 2.0}, 15 / 17),
    ],
    ids=["as in the papers", "the reverse", "one pair changed"],
)
def test_tau_is_that_of_kendall(levels, tau):
    assert kendall(report_of(spread(levels)), 4)["tau"] == pytest.approx(tau)


@pytest.mark.parametrize(("shift", "outcome"), [(-0.1, HOLDS), (0.1, CONTRADICTED), (0.0, UNCLEAR)])
def test_a_pair_is_judged_by_its_paired_interval(shift, outcome):
    """Books differ by far more than arms."""
    noise = [1 if book % 2 else -1 for book in range(12)]
    sums = spread({"none": 4.0, "pi": 3.0})
    sums["yarn"] = [nll + 100 * shift + wobble for nll, wobble in zip(sums["pi"], noise, strict=True)]
    row = next(row for row in judge(report_of(sums)) if (row["claim"], row["worse"], row["times"]) == ("O3", "pi", 4))
    assert row["outcome"] == outcome
    assert row["share"] == pytest.approx({-0.1: 1.0, 0.1: 0.0, 0.0: 0.5}[shift], abs=0.15)


def test_the_claims_that_papers_disagree_on_are_never_asserted():
    assert not {"O6", "O12", "O13"} & {key for _, key, *_ in SAFE}


def test_only_arms_that_follow_the_length_are_held_to_every_bit():
    assert exact(report_of(spread({"none": 4.0, "pi": 3.0, "yarn": 2.0}))) == {"pi": True}
