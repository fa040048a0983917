"""Settings: where values come from, what they may be, and that blocks restore them."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.config import (
    ConfigError,
    Settings,
    clear_runtime_config,
    configure,
    configured,
    for_spawned,
    get_global_config,
    get_runtime_config,
    settings,
    spawned_with,
    store,
)
from monarch.compiler.config.kinds import Count, Duration, Size
from monarch.compiler.errors import MonarchError

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "settings.md").read_text()
SECONDS = Duration("0s", "30d")


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for each in Settings.definitions().values():
        monkeypatch.delenv(each.variable, raising=False)
    yield
    store.follow(None)


def test_each_layer_overrules_those_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settings.kernels == "auto"
    (tmp_path / "settings.toml").write_text('kernels = "off"\nlog = ["plan"]\nverify = true\n')
    monkeypatch.setenv("MONARCH_CONFIG", str(tmp_path / "settings.toml"))
    assert (settings.kernels, settings.log, settings.verify) == ("off", {"plan"}, True)
    monkeypatch.setenv("MONARCH_KERNELS", "all")
    assert settings.kernels == "all"
    configure(kernels="auto")
    assert (settings.kernels, settings.verify) == ("auto", True)
    clear_runtime_config()
    assert settings.kernels == "all"
    monkeypatch.setenv("MONARCH_KERNELS", "")
    assert settings.kernels == "off", "an empty variable gives no value"


def test_a_file_in_the_users_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "monarch").mkdir()
    (tmp_path / "monarch" / "config.toml").write_text("verify = true\n")
    program = "import monarch.config; print(monarch.config.get_global_config()['verify'])"
    for folder, shown in ((tmp_path, "True"), (tmp_path / "none", "False")):
        monkeypatch.delenv("MONARCH_CONFIG", raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == shown


def test_blocks_nest_and_restore_what_they_set() -> None:
    with configured(kernels="off") as outer:
        assert outer["kernels"] == "off"
        with configured(kernels="all", verify=True) as inner:
            assert (inner["kernels"], inner["verify"], inner["templates"]) == ("all", True, "auto")
            assert get_runtime_config() == {"kernels": "all", "verify": True}
            configure(templates="off")
        assert get_runtime_config() == {"kernels": "off", "templates": "off"}, "what the block did not set stays"
        with pytest.raises(ZeroDivisionError), configured(kernels="auto"):
            raise ZeroDivisionError
        assert settings.kernels == "off"
    assert get_runtime_config() == {"templates": "off"}
    with configured() as values:
        assert values == get_global_config()


def test_an_unknown_name_is_an_error_with_names_near_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no setting is called 'kernel'\n  did you mean kernels?"):
        configure(verify=True, kernel="off")
    assert get_runtime_config() == {}, "nothing is set"
    with pytest.raises(ConfigError, match=re.escape("docs/reference/settings.md")), configured(zzzzzz=1):
        pass
    path = tmp_path / "settings.toml"
    path.write_text("kernel = 1\n")
    monkeypatch.setenv("MONARCH_CONFIG", str(path))
    with pytest.raises(ConfigError, match=re.escape(f"{path}: no setting is called 'kernel'")):
        get_global_config()


@pytest.mark.parametrize(
    ("name", "value", "error", "form"),
    [
        ("kernels", "some", ValueError, "auto, all or off"),
        ("kernels", 4, TypeError, "auto, all or off"),
        ("kernels", None, TypeError, "auto, all or off"),
        ("verify", "maybe", TypeError, "True or False"),
        ("verify", 1, TypeError, "True or False"),
        ("log", "plan,plans", ValueError, "any of passes, plan and commands"),
        ("log", 7, TypeError, "any of passes, plan and commands"),
        ("log", [7], TypeError, "any of passes, plan and commands"),
        ("dump", 7, TypeError, "the path of a folder, or None"),
        ("token", 7, TypeError, "a token, or the path"),
        ("hosts", ["a:1"], TypeError, "addresses with commas"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_is_right(
    name: str, value: object, error: type[Exception], form: str
) -> None:
    with pytest.raises(error, match=re.escape(f"{name}={value!r}: it has to be {form}")) as raised:
        configure(**{name: value})
    assert isinstance(raised.value, MonarchError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again)) == (type(raised.value), str(raised.value))


def test_wrong_values_of_the_environment_and_of_files_name_their_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MONARCH_KERNELS", "some")
    with pytest.raises(ConfigError, match="MONARCH_KERNELS='some': it has to be auto, all or off"):
        _ = settings.kernels
    for name, text, error in (
        ("a.toml", "verify = 3\n", "{}: verify=3: it has to be True or False"),
        ("b.toml", "verify = \n", "the settings in {} cannot be read: Invalid value"),
    ):
        path = tmp_path / name  # another each time: a thread of another test's may read it while it is written
        path.write_text(text)
        monkeypatch.setenv("MONARCH_CONFIG", str(path))
        for _ in range(2):  # a file that cannot be read is tried again
            with pytest.raises(MonarchError, match=re.escape(error.format(path))):
                _ = settings.verify
    monkeypatch.setenv("MONARCH_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="cannot be read: .*No such file"):
        _ = settings.verify


def test_settings_are_set_by_configure_alone() -> None:
    with pytest.raises(AttributeError, match="monarch.config.configure"):
        settings.kernels = "off"


@pytest.mark.parametrize(
    ("given_", "seconds", "shown"),
    [
        ("30s", 30, "30s"),
        ("5m", 300, "5m"),
        ("90s", 90, "1m 30s"),
        ("1h30m", 5400, "1h 30m"),
        ("1h 30m", 5400, "1h 30m"),
        (" 500 MS ", 0.5, "500ms"),
        ("0.25s", 0.25, "250ms"),
        ("1.5h", 5400, "1h 30m"),
        ("7us", 7e-6, "7us"),
        ("0s", 0, "0s"),
        (timedelta(days=1, seconds=1), 86401, "1d 1s"),
    ],
)
def test_durations_as_text(given_: object, seconds: float, shown: str) -> None:
    assert SECONDS.read(given_) == seconds
    assert SECONDS.show(seconds) == shown


@pytest.mark.parametrize("given_", ["30", "", "s", "abc", "-3s", "3 weeks", "1e3s", 30, 30.5, True, None])
def test_what_is_no_duration_is_a_type_error(given_: object) -> None:
    with pytest.raises(TypeError):
        SECONDS.read(given_)


@given(st.integers(0, 30 * 86400 * 10**6))
def test_a_duration_is_read_as_it_is_shown(microseconds: int) -> None:
    text = SECONDS.show(microseconds / 10**6)
    assert SECONDS.read(text) == microseconds / 10**6


def test_sizes_counts_and_durations_have_bounds() -> None:
    size, count = Size(1 << 10, 1 << 40), Count(1, 256)
    assert [size.read(each) for each in ("2 GiB", "2GB", 4096, "4096")] == [2 << 30, 2 * 10**9, 4096, 4096]
    assert [count.read(each) for each in (1, "256")] == [1, 256]
    for kind, wrong in ((size, 0), (size, "1 B"), (count, 0), (count, "257"), (Duration("1s", "5m"), "301s")):
        with pytest.raises(ValueError):
            kind.read(wrong)
    for kind, wrong in ((size, "much"), (size, 1.5), (size, True), (count, "1.5"), (count, True), (count, None)):
        with pytest.raises(TypeError):
            kind.read(wrong)


def test_a_spawned_process_follows_its_spawner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNELS", "off")
    monkeypatch.setenv("MONARCH_TOKEN", "secret")
    configure(log="plan,passes", cache="/somewhere")
    values = for_spawned()
    assert values == {"kernels": "off", "log": "passes,plan"}, "neither defaults, nor what is the machine's"

    clear_runtime_config()
    monkeypatch.setenv("MONARCH_KERNELS", "all")
    monkeypatch.setenv("MONARCH_TEMPLATES", "all")
    monkeypatch.setenv("MONARCH_CACHE", "/here")
    spawned_with(values)
    assert (settings.kernels, settings.templates, settings.log) == ("off", "auto", {"passes", "plan"})
    assert settings.cache == Path("/here")
    assert get_runtime_config() == {}
    assert for_spawned() == values, "and hands it on"
    with configured(kernels="auto"):
        assert settings.kernels == "auto"
        assert for_spawned() == {"log": "passes,plan"}


def test_what_is_shown_can_be_set() -> None:
    configure(**get_global_config())
    assert get_runtime_config() == get_global_config()
    assert get_global_config() == {name: each.kind.show(each.default) for name, each in Settings.definitions().items()}


def test_the_example_of_the_page_prints_what_stands_below_it() -> None:
    example, output = re.findall(r"^```(?:python|text)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == output
