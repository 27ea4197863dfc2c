"""Methods are declared once, found by any of their names, and asked only for options that they have."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_posext.contract import MECHANISMS, RotaryChange, Spectrum
from hf_posext.methods import REGISTRY, Method, get_method, registry
from hf_posext.methods.registry import method

BUILT_IN = ("pi", "ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "abf")
ALIASES = {"linear": "pi", "ntk_aware": "ntk", "su": "longrope", "rope_theta": "abf"}


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    """What a test declares is forgotten after it."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entry-point groups that are looked up, in order; none has a plugin in it."""
    asked: list[str] = []

    def entry_points(*, group: str) -> list[Any]:
        asked.append(group)
        return []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return asked


def declare(name: str = "halve", aliases: tuple[str, ...] = ()) -> Method:
    return method(name, aliases=aliases, summary="halves every frequency", paper="none")


def halve(spectrum: Spectrum, factor: float, *, strength: float = 1.0, table: Any = None) -> RotaryChange:
    return RotaryChange(spectrum.inv_freq / 2, spectrum.attention_scaling)


def needing(spectrum: Spectrum, factor: float, *, first: float, second: float, third: float = 1.0) -> RotaryChange:
    return RotaryChange(spectrum.inv_freq / first / second, spectrum.attention_scaling)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_method_is_found_by_its_name(name: str, groups: list[str]) -> None:
    assert get_method(name).name == name
    assert "rotary" in get_method(name).functions
    assert groups == []


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_alias_is_the_method_itself(alias: str, name: str, groups: list[str]) -> None:
    assert get_method(alias) is get_method(name)
    assert groups == []


@pytest.mark.parametrize("name", BUILT_IN)
def test_method_says_in_one_line_what_it_does_and_where_it_is_from(name: str) -> None:
    info = get_method(name).info()
    assert (info.name, info.aliases) == (name, get_method(name).aliases)
    assert set(info.mechanisms) <= set(MECHANISMS)
    assert info.summary
    assert "\n" not in info.summary
    assert any(character.isdigit() for character in info.paper), "a year or an identifier"


def test_info_lists_every_option_with_its_default() -> None:
    info = get_method("yarn").info()
    assert info.options == {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "ramp": "index",
        "attention_factor": None,
        "temperature": "cos_sin",
    }


def test_declared_method_is_found_by_both_names_and_its_function_stays_a_function() -> None:
    declared = declare(aliases=("half",))
    assert declared.on("rotary")(halve) is halve
    assert get_method("halve") is get_method("half") is declared
    assert declared.functions == {"rotary": halve}


def test_one_method_serves_several_mechanisms() -> None:
    declared = declare()
    declared.on("rotary")(halve)
    declared.on("learned")(lambda table, factor, *, mode="linear": table)
    assert declared.info().mechanisms == ("rotary", "learned")
    assert declared.options("learned") == {"mode": "linear"}


@pytest.mark.parametrize(
    ("name", "aliases", "taken", "owner"),
    [
        ("pi", (), "pi", "pi"),
        ("linear", (), "linear", "pi"),
        ("new", ("yarn",), "yarn", "yarn"),
        ("x", ("su",), "su", "longrope"),
    ],
)
def test_taken_name_is_refused_and_its_owner_named(name: str, aliases: tuple[str, ...], taken: str, owner: str) -> None:
    before = dict(REGISTRY)
    with pytest.raises(TypeError, match=f"`{taken}` is already a name of the method `{owner}`"):
        declare(name, aliases)
    assert before == REGISTRY


def test_unknown_mechanism_is_refused_with_the_nearest_and_all_known() -> None:
    with pytest.raises(TypeError, match=r"Unknown mechanism 'rotery'\. Did you mean `rotary`\?") as caught:
        declare().on("rotery")(halve)
    assert all(f"`{mechanism}`" in str(caught.value) for mechanism in MECHANISMS)


def test_second_function_for_a_mechanism_is_refused() -> None:
    declared = declare()
    declared.on("rotary")(halve)
    with pytest.raises(TypeError, match="`halve` already has a function for `rotary`"):
        declared.on("rotary")(needing)
    assert declared.functions == {"rotary": halve}


@pytest.mark.parametrize(
    "function",
    [
        lambda spectrum: spectrum,
        lambda spectrum, scale: spectrum,
        lambda factor, spectrum: spectrum,
        lambda spectrum, factor, strength=1.0: spectrum,
        lambda spectrum, factor, *rest: spectrum,
        lambda spectrum, factor, **options: spectrum,
        lambda spectrum, *, factor: spectrum,
    ],
    ids=["no factor", "other name", "swapped", "positional option", "star", "double star", "keyword factor"],
)
def test_other_signature_is_refused_with_the_right_one(function: Callable[..., Any]) -> None:
    declared = declare()
    with pytest.raises(TypeError, match=r"must take \(reading, factor, \*, options\) to serve `halve`"):
        declared.on("rotary")(function)
    assert declared.functions == {}


def test_required_option_has_no_default() -> None:
    declared = declare()
    declared.on("rotary")(needing)
    empty = inspect.Parameter.empty
    assert declared.options("rotary") == {"first": empty, "second": empty, "third": 1.0}


@pytest.mark.parametrize("given", [{}, {"beta_fast": 16.0}, {"truncate": False, "ramp": "rotations"}])
def test_known_options_pass(given: dict[str, Any]) -> None:
    get_method("yarn").check_options(given)


def test_unknown_option_is_refused_with_the_nearest_and_all_known() -> None:
    with pytest.raises(
        TypeError, match=r"option of `yarn`: 'beta_fst'\. Did you mean `beta_fast`\? Allowed:"
    ) as caught:
        get_method("yarn").check_options({"truncate": False, "beta_fst": 16})
    assert all(f"`{name}`" in str(caught.value) for name in get_method("yarn").options("rotary"))


def test_option_of_a_method_without_any_is_refused_as_such() -> None:
    with pytest.raises(TypeError, match=r"option of `ntk`: 'beta_fast'\. Allowed: none\."):
        get_method("ntk").check_options({"beta_fast": 16})


def test_option_for_another_mechanism_is_refused_with_those_that_take_it() -> None:
    get_method("pi").check_options({"mode": "cubic"}, ["learned"])
    with pytest.raises(TypeError, match=r"`mode` of `pi` has a meaning for `learned` positions only.*has `rotary`"):
        get_method("pi").check_options({"mode": "cubic"}, ["rotary"])


@pytest.mark.parametrize(("name", "option"), [("abf", "rope_theta"), ("longrope", "long_factor")])
def test_missing_option_is_named_with_how_to_give_it(name: str, option: str) -> None:
    with pytest.raises(TypeError, match=rf"`{name}` needs `{option}`, for example {option}=\.\.\."):
        get_method(name).check_options({})


def test_all_missing_options_are_named_at_once() -> None:
    declared = declare()
    declared.on("rotary")(needing)
    with pytest.raises(TypeError, match=r"`halve` needs `first`, `second`, for example first=\.\.\."):
        declared.check_options({"third": 2.0})


@pytest.mark.parametrize(("name", "near"), [("yarm", "yarn"), ("llama", "llama3"), ("liner", "linear"), ("nkt", "ntk")])
def test_misspelt_method_is_refused_with_the_nearest_and_all_known(name: str, near: str, groups: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"Unknown method '{name}'\. Did you mean `{near}`\? Allowed: ") as caught:
        get_method(name)
    assert all(f"`{word}`" in str(caught.value) for word in (*BUILT_IN, *ALIASES))


def test_name_like_no_other_is_refused_without_a_suggestion(groups: list[str]) -> None:
    with pytest.raises(ValueError, match=r"Unknown method 'zzz'\. Allowed: `\w+`"):
        get_method("zzz")


@pytest.mark.parametrize("name", [None, 2, ("pi",)])
def test_method_that_is_no_name_is_a_type_error_with_all_names(name: object, groups: list[str]) -> None:
    with pytest.raises(TypeError, match=r"`method` must be the name of a method, got .*\. Allowed: ") as caught:
        get_method(name)
    assert repr(name) in str(caught.value)
    assert all(f"`{word}`" in str(caught.value) for word in BUILT_IN)
    assert groups == []


def test_plugins_are_looked_up_for_unknown_names_only(groups: list[str]) -> None:
    get_method("pi"), get_method("linear")
    assert groups == []
    with pytest.raises(ValueError, match="Unknown method"):
        get_method("plugged")
    assert groups == ["hf_posext.methods"]


class Plugin:
    """An installed package that declares `plugged` when it is imported."""

    loads = 0

    def load(self) -> Method:
        self.loads += 1
        declared = declare("plugged", ("socket",))
        declared.on("rotary")(halve)
        return declared


@pytest.mark.parametrize("word", ["plugged", "socket"])
def test_plugin_gives_its_method_and_is_loaded_once(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Plugin()
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [plugin])
    assert get_method(word).name == get_method(word).name == "plugged"
    assert plugin.loads == 1
