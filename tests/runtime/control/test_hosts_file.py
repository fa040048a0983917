"""Which hosts are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch.compiler.plan import MonarchError
from monarch.runtime.control.hosts_file import parse_hosts

BOTH = ["node1:4242", "[fd00::1]:4242"]


def test_a_list_a_text_and_a_file_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the two in the cellar\n node1:4242   # left\n\n[fd00::1]:4242\n")
    assert parse_hosts(BOTH) == BOTH
    assert parse_hosts("node1:4242, [fd00::1]:4242,") == BOTH
    assert parse_hosts("node1:4242") == BOTH[:1]
    assert parse_hosts(path) == BOTH
    assert parse_hosts(str(path)) == BOTH
    for setting in (str(path), ",".join(BOTH)):
        monkeypatch.setenv("MONARCH_HOSTS", setting)
        assert parse_hosts() == BOTH
    monkeypatch.chdir(tmp_path)
    assert parse_hosts("hosts") == BOTH


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "no hosts are named"),
        (" , ", "no hosts are named"),
        (["node1"], "'node1' is no address"),
        (["node1:0"], "node1:0 has no port"),
        (["node1:1", "node2:1", "node1:1"], "node1:1 is named twice"),
        ("/no/such/file", "the hosts file /no/such/file cannot be read"),
        ("node1", "the hosts file node1 cannot be read"),
    ],
)
def test_what_names_no_hosts_is_an_error(value: list[str] | str, says: str) -> None:
    with pytest.raises(MonarchError, match=says):
        parse_hosts(value)


def test_an_error_in_a_file_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("node1:4242\nnode2\n")
    with pytest.raises(MonarchError, match=f"{path}:2: 'node2' is no address"):
        parse_hosts(path)
    path.write_text("# none\n")
    with pytest.raises(MonarchError, match=f"{path}: no hosts are named"):
        parse_hosts(path)


def test_without_any_the_error_says_where_they_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONARCH_HOSTS", raising=False)
    with pytest.raises(MonarchError, match="no hosts to attach"):
        parse_hosts()
