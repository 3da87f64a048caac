"""The registry refuses what it does not know, and names what was probably meant."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pellucid import registry
from pellucid.errors import ConfigError
from pellucid.registry import NoOptions, load_plugins, lookup, names, nearest, register


@pytest.fixture(autouse=True)
def empty_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds without Pellucid's own entries, so that these tests neither import the rooms nor leave anything behind."""
    monkeypatch.setattr(registry, "HOMES", dict.fromkeys(registry.HOMES, "pellucid.errors"))
    monkeypatch.setattr(registry, "_entries", {kind: {} for kind in registry.HOMES})


@dataclass(frozen=True)
class Options:
    beta: float = 0.5


def test_an_entry_is_found_with_its_target_and_its_options() -> None:
    @register("strategy", "mine", config=Options)
    def mine() -> None: ...

    entry = lookup("strategy", "mine")
    assert (entry.name, entry.target, entry.config) == ("mine", mine, Options)


def test_the_decorator_hands_the_object_back_unchanged() -> None:
    def mine() -> None: ...

    assert register("strategy", "mine")(mine) is mine
    assert lookup("strategy", "mine").config is NoOptions


def test_an_unknown_name_is_refused_with_the_nearest_and_all_known() -> None:
    register("schedule", "cosine")(lambda: None)
    register("schedule", "linear")(lambda: None)
    with pytest.raises(ConfigError) as error:
        lookup("schedule", "cosin")
    assert str(error.value) == "unknown schedule 'cosin'; did you mean cosine?; known: cosine, linear"


@pytest.mark.parametrize(
    "ask", [lambda: names("stratgey"), lambda: register("stratgey", "x"), lambda: lookup("stratgey", "x")]
)
def test_an_unknown_kind_is_refused_with_the_nearest(ask: object) -> None:
    with pytest.raises(ConfigError, match="unknown kind 'stratgey'; did you mean strategy"):
        ask()  # type: ignore[operator]


def test_a_taken_name_is_refused_and_the_first_owner_stays() -> None:
    @register("optimizer", "sgd")
    def first() -> None: ...

    def second() -> None: ...

    with pytest.raises(ConfigError, match=r"optimizer 'sgd' is already registered by .*test_registry; choose another"):
        register("optimizer", "sgd")(second)
    assert lookup("optimizer", "sgd").target is first


def test_a_module_imported_twice_may_register_the_same_thing_again() -> None:
    def make() -> object:
        @register("optimizer", "sgd")
        def same() -> None: ...

        return same

    first, second = make(), make()
    assert first is not second
    assert lookup("optimizer", "sgd").target is second


def test_the_same_name_may_stand_in_two_kinds() -> None:
    register("optimizer", "none")(lambda: 1)
    register("mode", "none")(lambda: 2)
    assert lookup("optimizer", "none").target() != lookup("mode", "none").target()


@pytest.mark.parametrize("config", [int, Options(), {"beta": 1}])
def test_options_must_be_a_dataclass_type(config: object) -> None:
    with pytest.raises(ConfigError, match="config must be a dataclass"):
        register("strategy", "mine", config=config)  # type: ignore[arg-type]


def test_names_are_sorted_and_come_from_one_kind() -> None:
    for name in ("b", "a"):
        register("callback", name)(lambda: None)
    register("mode", "c")(lambda: None)
    assert names("callback") == ["a", "b"]


def test_a_kind_loads_its_home_when_it_is_first_asked_for(tmp_path: Path) -> None:
    (tmp_path / "late_home.py").write_text(
        "from pellucid.registry import register\n@register('strategy', 'late')\ndef late(): ...\n"
    )
    script = (
        "import sys\nfrom pellucid import registry\nregistry.HOMES['strategy'] = 'late_home'\n"
        "assert 'late_home' not in sys.modules\nprint(registry.names('strategy'))"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:{root}"}, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "['late']", done.stderr


def test_nearest_is_silent_about_words_that_are_far_away() -> None:
    assert nearest("warmup_step", ["warmup_steps", "lr"]) == "; did you mean warmup_steps?"
    assert nearest("zebra", ["warmup_steps", "lr"]) == ""
    assert nearest("", []) == ""


def test_a_plugin_registers_from_outside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_objective.py").write_text(
        "from pellucid.registry import register\n@register('strategy', 'outside')\ndef outside(): return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # as under the console script: no current folder
    load_plugins(("my_objective",))
    assert lookup("strategy", "outside").target() == 7


@pytest.mark.parametrize("module", ["no_such_plugin", "pellucid.no_such_plugin", "", ".relative"])
def test_a_plugin_that_cannot_be_imported_is_named(module: str) -> None:
    with pytest.raises(ConfigError, match="plugins: ") as error:
        load_plugins((module,))
    assert repr(module) in str(error.value)


def test_a_plugin_whose_own_import_fails_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'broken_plugin'.*a_package_nobody_has"):
        load_plugins(("broken_plugin",))


def test_no_plugin_leaves_the_search_path_alone() -> None:
    before = list(sys.path)
    load_plugins(())
    assert sys.path == before
