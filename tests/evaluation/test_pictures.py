"""Pictures: what they draw is what closed forms, transformers and attention itself say, on light and on dark pages."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posext
from hf_posext.evaluation.dark import darkened, light_on_dark
from hf_posext.evaluation.perplexity_report import PerplexityReport
from hf_posext.evaluation.pictures import (
    plot_bias_profile,
    plot_position_loss,
    plot_sinusoids,
    plot_spectrum,
    save_figure,
    spectrum_of,
)
from hf_posext.evaluation.profiles import Profile, profiles_of
from hf_posext.evaluation.waves import waves_of
from tests.architectures import TRAINED_LENGTH, tiny_inputs, tiny_model
from tests.evaluation.test_reports import report
from tests.mechanisms import alibi_models, relative_models
from tests.special_models import build, gpt2, mamba
from tests.tables import BERT

N, S = TRAINED_LENGTH, 4
T = S * N
THETA = 10_000.0 ** (-np.arange(8) / 8)
"""Of a head of 16 channels."""


def bert() -> Any:
    """An encoder with a table of N positions."""
    return build("AutoModelForMaskedLM", "bert", BERT)


def t5() -> Any:
    """Buckets of distances, in both directions and in one."""
    return build("AutoModelForSeq2SeqLM", "t5", relative_models.T5)


def lines_of(axes: Any) -> dict[str, Any]:
    """The lines of a panel by their labels."""
    return {line.get_label(): line for line in axes.get_lines()}


def only(profiles: tuple[Profile, ...], kind: str, part: str = "") -> Profile:
    """The one profile of a kind."""
    (found,) = [profile for profile in profiles if (profile.kind, profile.part) == (kind, part)]
    return found


def curved(**nll: list[float]) -> PerplexityReport:
    """A report of protocol `full` with three buckets for each arm."""
    found = report(dict.fromkeys(nll, 2.0), protocol={"protocol": "full", "targets": None, "bars": ["none"]})
    edges = [(1, 1), (2, 3), (4, 9)]
    found.curve = [
        {"arm": arm, "first": first, "last": last, "nll": value, "tokens": 5}
        for arm, values in nll.items()
        for (first, last), value in zip(edges, values, strict=True)
    ]
    return found


# Loss by position


def test_loss_stands_at_the_geometric_middle_of_its_bucket() -> None:
    axes = plot_position_loss(curved(yarn=[3.0, 2.0, 1.5], none=[3.0, 2.5, 4.0])).axes[0]
    line = lines_of(axes)["yarn"]
    assert line.get_xdata() == pytest.approx([1, math.sqrt(6), 6])
    assert list(line.get_ydata()) == [3.0, 2.0, 1.5]
    assert axes.get_xscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("context before the token (tokens)", "loss (nats per token)")


def test_loss_shows_bars_broken_and_the_trained_length() -> None:
    axes = plot_position_loss(curved(yarn=[3.0, 2.0, 1.5], none=[3.0, 2.5, 4.0])).axes[0]
    assert lines_of(axes)["none"].get_linestyle() == "--"
    assert [text.get_text() for text in axes.texts] == ["trained length 64"]
    assert [64, 64] in [list(line.get_xdata()) for line in axes.get_lines()]


def test_loss_of_another_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match=r"only that of the last 10 tokens. Measure with protocol=\"full\""):
        plot_position_loss(report({"yarn": 2.0}))


# Spectra


@pytest.mark.parametrize(
    ("method", "theta"),
    [("pi", THETA / S), ("ntk", (10_000.0 * S ** (16 / 14)) ** (-np.arange(8) / 8))],
    ids=["pi", "ntk"],
)
def test_spectrum_draws_the_wavelengths_of_the_paper(method: str, theta: np.ndarray) -> None:
    lines = lines_of(plot_spectrum(tiny_model("llama"), method, S).axes[0])
    assert lines["as given"].get_ydata() == pytest.approx(2 * math.pi / THETA, rel=1e-6)
    assert lines[f"{method} x4"].get_ydata() == pytest.approx(2 * math.pi / theta, rel=1e-6)


def test_spectrum_marks_both_lengths() -> None:
    axes = plot_spectrum(tiny_model("llama"), "yarn", S).axes[0]
    assert {text.get_text() for text in axes.texts} == {f"N = {N}", f"T = {T}"}
    levels = [line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert sorted(levels) == [N, T]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("channel pair", "wavelength (tokens)")


def test_spectrum_shades_the_pairs_without_a_full_turn_in_the_trained_length() -> None:
    axes = plot_spectrum(tiny_model("llama"), "pi", S).axes[0]
    shaded = [patch.get_x() + patch.get_width() / 2 for patch in axes.patches]
    assert shaded == list(np.flatnonzero(2 * math.pi / THETA > N))


@pytest.mark.parametrize(("method", "opened"), [("pi", []), ("yarn", []), ("ntk", [2, 3, 4, 5, 6])])
def test_open_markers_are_pairs_that_meet_new_angles_at_the_target_length(method: str, opened: list[int]) -> None:
    """The slowest pair is slowed by s in all three; ntk slows the others by less, so that at T they turn further."""
    lines = lines_of(plot_spectrum(tiny_model("llama"), method, S).axes[0])
    found = lines.get(f"{method} x4, beyond its trained range")
    assert ([] if found is None else list(found.get_xdata())) == opened


def test_a_partly_rotated_head_has_fewer_pairs() -> None:
    lines = lines_of(plot_spectrum(tiny_model("gpt_neox"), "pi", S).axes[0])
    assert lines["as given"].get_ydata() == pytest.approx([2 * math.pi, 200 * math.pi], rel=1e-6)


def test_layer_types_have_a_panel_each() -> None:
    full, sliding = plot_spectrum(tiny_model("gemma3"), "pi", S).axes
    assert (full.get_xlabel(), sliding.get_xlabel()) == (
        "channel pair, full attention",
        "channel pair, sliding attention",
    )
    assert "pi x4" in lines_of(full)
    assert "pi x4" not in lines_of(sliding)


def test_several_methods_share_a_panel_and_no_two_look_alike() -> None:
    model = tiny_model("llama")
    axes = plot_spectrum([spectrum_of(model, method, S) for method in ("pi", "ntk", "ntk_by_parts")]).axes[0]
    named = [
        line for label, line in lines_of(axes).items() if label in ("as given", "pi x4", "ntk x4", "ntk_by_parts x4")
    ]
    assert len({line.get_linestyle() for line in named}) == len({line.get_marker() for line in named}) == 4


def test_a_factor_that_follows_the_length_is_drawn_as_it_is_at_the_target() -> None:
    model = tiny_model("llama")
    live, fixed = (spectrum_of(model, "yarn", S, dynamic=dynamic) for dynamic in (True, False))
    assert live.sites[0].after == pytest.approx(fixed.sites[0].after)
    assert live.name == "yarn (dynamic) x4"


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_patch_in_force_is_drawn_without_naming_it(dynamic: bool) -> None:
    model = hf_posext.patch_model(tiny_model("llama"), "pi", S, dynamic=dynamic)
    (site,) = spectrum_of(model).sites
    assert site.before == pytest.approx(2 * math.pi / THETA, rel=1e-6)
    assert site.after == pytest.approx(2 * math.pi * S / THETA, rel=1e-6)


@pytest.mark.parametrize("draw", [plot_spectrum, plot_sinusoids, plot_bias_profile])
@pytest.mark.parametrize("is_patched", [True, False])
def test_a_model_is_left_as_it_was(draw: Callable[..., Figure], is_patched: bool) -> None:
    model = tiny_model("llama")
    if is_patched:
        hf_posext.patch_model(model, "yarn", S)
    record, inputs = hf_posext.record_of(model), tiny_inputs(T)
    with torch.no_grad():
        before = model(**inputs).logits
        draw(model) if is_patched else draw(model, "yarn", 2)
        assert torch.equal(model(**inputs).logits, before)
    assert hf_posext.record_of(model) == record


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (gpt2, [], "no rotary encoding, so no spectrum; it has `learned`"),
        (lambda: tiny_model("llama"), ["rerope", 4], "rerope x4 leaves all frequencies as they are"),
        (lambda: tiny_model("llama"), ["nope", 4], "nope x4 leaves all frequencies as they are"),
        (lambda: tiny_model("llama"), [None, 4], "`factor` belongs to a method"),
        (lambda: tiny_model("llama"), ["yarm", 4], "Did you mean `yarn`"),
        (
            lambda: hf_posext.patch_model(tiny_model("llama"), "pi", 2),
            ["yarn", 4],
            "already patched: .*`unpatch_model`",
        ),
    ],
)
def test_what_has_no_spectrum_is_told_so(make: Callable[[], Any], words: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spectrum_of(make(), *words)


def test_compose_takes_no_patch_off() -> None:
    model = hf_posext.patch_model(tiny_model("llama"), "pi", 2)
    with pytest.raises(ValueError, match="already patched"):
        spectrum_of(model, "pi", 2, compose=True)
    assert hf_posext.record_of(model).factor == 2


def test_spectra_of_different_models_are_not_mixed() -> None:
    spectra = [spectrum_of(tiny_model(name), "pi", S) for name in ("llama", "gpt_neox")]
    with pytest.raises(ValueError, match="of models with other spectra"):
        plot_spectrum(spectra)
    with pytest.raises(ValueError, match="no spectrum to draw"):
        plot_spectrum([])


# Sinusoids


def test_published_sinusoids_are_drawn() -> None:
    figure = plot_sinusoids((50, 16))
    positions, channels = np.arange(50)[:, None], np.arange(16)
    angles = positions / 10_000.0 ** (2 * (channels // 2) / 16)
    expected = np.where(channels % 2, np.cos(angles), np.sin(angles))
    image, waves = figure.axes[0].images[0], lines_of(figure.axes[1])
    assert np.asarray(image.get_array()) == pytest.approx(expected.T, abs=1e-12)
    assert waves["channel 4"].get_ydata() == pytest.approx(expected[:, 4], abs=1e-12)
    assert figure.axes[1].get_xlabel() == "position (tokens)"


def test_a_learned_table_is_drawn_as_it_stands_in_the_model() -> None:
    model = gpt2()
    assert torch.equal(waves_of(model).values.float(), model.transformer.wpe.weight.detach())


def test_a_stretched_table_is_drawn_up_to_the_target_with_the_trained_length() -> None:
    model = gpt2()
    figure = plot_sinusoids(model, "pi", 2)
    values = np.asarray(figure.axes[0].images[0].get_array())
    assert values.shape == (64, 2 * N)
    rows = model.transformer.wpe.weight.detach().numpy()
    assert values.T[::2] == pytest.approx(rows, abs=1e-6)
    assert [text.get_text() for text in figure.axes[0].texts] == [f"trained length {N}"]


def test_the_cosines_of_a_rotation_are_those_that_the_module_gives() -> None:
    model = hf_posext.patch_model(tiny_model("llama"), "ntk", S)
    cosine, _ = model.model.rotary_emb(torch.zeros(1), torch.arange(T)[None])
    assert waves_of(model).values.float().numpy() == pytest.approx(cosine[0, :, :8].numpy(), abs=1e-5)


def test_positions_limit_what_is_drawn() -> None:
    assert waves_of(gpt2(), positions=10).values.shape == (10, 64)
    with pytest.raises(ValueError, match="`reach` must be at least 1"):
        waves_of(gpt2(), positions=0)


def test_a_table_that_is_switched_off_is_flat() -> None:
    assert not waves_of(gpt2(), "nope", 2).values.any()


def test_a_bias_by_distance_is_no_table() -> None:
    with pytest.raises(ValueError, match=r"it has `alibi`\. Draw its bias"):
        plot_sinusoids(alibi_models.tiny("bloom"))


# Profiles of distances


def first_weights(model: Any, tokens: int, name: str = "attentions") -> Tensor:
    """[H, L, L]: weights of the first layer for one token again and again, which are those of its bias alone."""
    ids = torch.full((1, tokens), 7)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return getattr(model(ids, output_attentions=True, **more), name)[0][0].double()


def by_distance(weights: Tensor, distances: Tensor) -> Tensor:
    """[H, D]: log weight of the key at each distance over that of the query itself."""
    query = len(weights[0]) // 2 if bool((distances < 0).any()) else len(weights[0]) - 1
    return (weights[:, query, query - distances] / weights[:, query, query, None]).log()


ASKED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "alibi": (lambda: tiny_model("llama"), {"method": "alibi", "factor": 1.5}),
    "alibi_learned": (lambda: tiny_model("llama"), {"method": "alibi", "factor": 1.5, "learned": True}),
    "alibi_encoder": (bert, {"method": "alibi", "factor": 1.5, "asymmetric": True}),
    **{family: (lambda family=family: alibi_models.tiny(family), {}) for family in ("bloom", "mpt", "falcon_eager")},
    **{
        f"{family}_pi": (lambda family=family: alibi_models.tiny(family), {"method": "pi", "factor": 3})
        for family in ("bloom", "mpt", "falcon_eager")
    },
    **{
        f"{family}_dynamic": (
            lambda family=family: alibi_models.tiny(family),
            {"method": "pi", "factor": 3, "dynamic": True},
        )
        for family in ("bloom", "mpt", "falcon_eager")
    },
    "t5": (t5, {}),
    "t5_pi": (t5, {"method": "pi", "factor": 2, "original_max_position_embeddings": 20}),
}
"""Name -> a model, and its patch if it has one."""


@pytest.mark.parametrize("name", ASKED)
def test_a_bias_is_what_attention_adds_to_tokens_that_are_all_the_same(name: str) -> None:
    make, patch = ASKED[name]
    model = make()
    if "mpt" not in name:  # which has no other implementation
        model.set_attn_implementation("eager")
    if patch:
        hf_posext.patch_model(model, **patch)
    found = profiles_of(model, reach=16 if name == "mpt" else 40)
    profiles = found.after if patch else found.before
    part, attentions = ("encoder", "encoder_attentions") if "t5" in name else ("", "attentions")
    profile = only(profiles, "bias", part)
    near = profile.distances[profile.distances.abs() < 20]
    values = profile.values[:, profile.distances.abs() < 20]
    values = values - values[:, near == 0]
    tokens = 40 if bool((near < 0).any()) else int(found.reach)
    torch.testing.assert_close(values, by_distance(first_weights(model, tokens, attentions), near), rtol=0, atol=2e-4)
    assert profile.is_measured


@pytest.mark.parametrize(("family", "times"), [("falcon", 1), ("falcon_eager", 2)])
def test_falcon_is_read_as_its_implementation_adds_the_bias(family: str, times: int) -> None:
    """transformers puts bias / sqrt(D) into the mask, and eager attention adds it to the scores besides."""
    profile = only(profiles_of(alibi_models.tiny(family), reach=20).before, "bias")
    expected = -times * alibi_models.SLOPES[:, None] * profile.distances / 4
    torch.testing.assert_close(profile.values, expected, rtol=0.01, atol=0)


def test_the_decoder_of_t5_has_a_profile_of_its_own() -> None:
    model = t5()
    model.set_attn_implementation("eager")
    profile = only(profiles_of(model, reach=40).before, "bias", "decoder")
    weights = first_weights(model, 40, "decoder_attentions")
    torch.testing.assert_close(
        profile.values - profile.values[:, :1], by_distance(weights, profile.distances), rtol=0, atol=2e-4
    )


def test_learned_buckets_are_read_from_the_parameter() -> None:
    model = hf_posext.patch_model(bert(), "relative_bias", 2)
    bias = model.bert.encoder.layer[0].attention.self.posext_bias
    torch.nn.init.normal_(bias)
    profile = only(profiles_of(model).after, "bias")
    buckets = T5Attention._relative_position_bucket(-profile.distances, True, 32, 128)
    torch.testing.assert_close(profile.values, bias[buckets].T.double())


@pytest.mark.parametrize(("method", "scale"), [("pi", S), (None, 1)])
def test_a_rotation_is_the_mean_cosine_of_its_angles(method: str | None, scale: int) -> None:
    found = profiles_of(tiny_model("llama"), method, None if method is None else S, reach=T)
    profile = only(found.after or found.before, "rotation")
    expected = np.cos(profile.distances.numpy()[:, None] * THETA / scale).mean(1)
    assert profile.values[0].numpy() == pytest.approx(expected, abs=1e-4)
    assert not profile.is_measured


def test_rerope_is_seen_at_its_window_at_most() -> None:
    found = profiles_of(tiny_model("llama"), "rerope", S, window=8).after
    seen = only(found, "seen")
    clipped = seen.distances.numpy().clip(max=8)
    assert seen.values[0].numpy() == pytest.approx(clipped)
    expected = np.cos(clipped[:, None] * THETA).mean(1)
    assert only(found, "rotation").values[0].numpy() == pytest.approx(expected, abs=1e-4)


def test_self_extend_is_seen_in_groups_by_the_last_query() -> None:
    seen = only(profiles_of(tiny_model("llama"), "self_extend", S, window=8, group_size=6).after, "seen")
    query, distances = T - 1, seen.distances.numpy()
    grouped = query // 6 + 8 - 8 // 6 - (query - distances) // 6
    assert seen.values[0].numpy() == pytest.approx(np.where(distances < 8, distances, grouped))


def test_a_map_of_an_encoder_is_seen_on_both_sides() -> None:
    found = profiles_of(tiny_model("modernbert"), "rerope", S, window=8).after
    seen = only(found, "seen", "full attention")
    assert seen.values[0].numpy() == pytest.approx(seen.distances.numpy().clip(-8, 8))
    assert int(seen.distances[0]) == 1 - T


def test_keys_beyond_a_window_are_not_drawn_and_the_axis_still_has_them() -> None:
    (axes,) = plot_bias_profile(gpt2(), "window", S, width=10).axes
    line = lines_of(axes)["window x4"]
    assert set(line.get_xdata()[np.isfinite(line.get_ydata())]) == set(range(10))
    assert axes.get_xlim()[1] >= T - 1


def test_heads_are_told_apart_by_colour_and_marker_and_patches_by_line() -> None:
    figure = plot_bias_profile(alibi_models.tiny("bloom"), "pi", 3)
    lines = lines_of(figure.axes[0])
    heads = [lines[f"pi x3, head {head}"] for head in range(6)]
    assert len({line.get_color() for line in heads}) == len({line.get_marker() for line in heads}) == 6
    assert lines["as given, head 0"].get_linestyle() != heads[0].get_linestyle()
    assert heads[4].get_ydata() == pytest.approx(-np.arange(48) / 2 / 3, abs=1e-5)


def test_a_picture_says_what_was_measured_and_in_which_unit() -> None:
    figure = plot_bias_profile(tiny_model("llama"), "alibi", S)
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "mean cosine over channel pairs\ncomputed",
        "added to the logit (nats)\nmeasured",
    ]
    assert figure.axes[-1].get_xlabel() == "distance, query - key (tokens)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bert, "depends on the distance alone; it has `learned`"),
        (mamba, "depends on the distance alone; it has none"),
        (t5, "Give `reach`, in tokens"),
    ],
)
def test_what_has_no_profile_is_told_so(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profiles_of(make())


# Light and dark


FIGURES: dict[str, Callable[[], Figure]] = {
    "perplexity": lambda: report({"pi": 2.0, "truncate": 2.5, "window": 2.25, "none": 4.0}).plot(),
    "loss": lambda: plot_position_loss(curved(yarn=[3.0, 2.0, 1.5], none=[3.0, 2.5, 4.0])),
    "spectrum": lambda: plot_spectrum(tiny_model("llama"), "ntk", S),
    "sinusoids": lambda: plot_sinusoids((50, 16)),
    "bias": lambda: plot_bias_profile(tiny_model("llama"), "alibi", S),
}


@pytest.mark.parametrize("dark", [True, False])
@pytest.mark.parametrize("name", FIGURES)
def test_a_picture_is_the_same_file_each_time(tmp_path: Path, name: str, dark: bool) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    save_figure(FIGURES[name](), one, dark=dark)
    save_figure(FIGURES[name](), other, dark=dark)
    assert one.read_bytes() == other.read_bytes()
    assert one.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("name", FIGURES)
def test_a_dark_picture_is_light_on_dark_and_the_figure_stays(tmp_path: Path, name: str) -> None:
    figure = FIGURES[name]()
    save_figure(figure, tmp_path / "dark.png", dark=True)
    save_figure(figure, tmp_path / "light.png")
    save_figure(FIGURES[name](), tmp_path / "fresh.png")
    assert (tmp_path / "light.png").read_bytes() == (tmp_path / "fresh.png").read_bytes()
    pixels = imread(tmp_path / "dark.png")[..., :3]
    assert pixels[:4].max() < 0.1
    assert pixels.max() > 0.85
    assert not (pixels.max(axis=2) < 0.05).any()  # what was black


@pytest.mark.parametrize("colour", ["#0072B2", "#D55E00", "#009E73", "#332288", "#882255", "#000000", "#666666"])
def test_every_colour_stands_out_on_dark(colour: str) -> None:
    """Contrast of WCAG 2.2, at least 4.5 as for text; for the greys of small print as well."""

    def luminance(channels: tuple[float, ...]) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    found = luminance(light_on_dark((*to_rgb(colour), 1.0))[:3])
    background = luminance(light_on_dark((1.0, 1.0, 1.0, 1.0))[:3])
    assert (found + 0.05) / (background + 0.05) >= 4.5


def test_markers_have_the_colour_of_their_line_on_dark() -> None:
    axes = Figure().subplots()
    axes.plot([1, 2], color="black", marker="o")
    line = darkened(axes.figure).axes[0].get_lines()[0]
    assert to_rgb(line.get_markerfacecolor()) == to_rgb(line.get_color())


def test_numbers_on_a_heat_map_keep_their_colour() -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.imshow([[0.0, 1.0]])
    axes.text(1, 0, "1.00", color="black")
    axes.set_xlabel("length", color="black")
    (copy,) = darkened(figure).axes
    assert to_rgb(copy.texts[0].get_color()) == (0.0, 0.0, 0.0)
    assert min(to_rgb(copy.xaxis.label.get_color())) > 0.8


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "sinusoids"])
def test_nothing_of_a_picture_covers_another_or_is_cut_off(name: str) -> None:
    """Panels, their names and legends, as boxes in pixels."""
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    boxes = [legend.get_window_extent() for legend in legends]
    panels = [axes.get_window_extent() for axes in figure.axes]
    assert [box for box in boxes if any(box.overlaps(panel) for panel in panels)] == []
    assert [box for box in boxes if not figure.bbox.padded(1).contains(box.x0, box.y0)] == []
    assert [box for box in boxes if not figure.bbox.padded(1).contains(box.x1, box.y1)] == []


def test_another_suffix_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of .png, .svg, .pdf, got .*plot.gif"):
        save_figure(Figure(), tmp_path / "plot.gif", dark=True)


def test_pictures_touch_no_global_state() -> None:
    import matplotlib.pyplot as plt

    plot_sinusoids((8, 4))
    assert plt.get_fignums() == []
