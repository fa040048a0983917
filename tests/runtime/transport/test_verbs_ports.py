"""Which address of which port is used, on made-up tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch.runtime.transport.verbs import ports
from monarch.runtime.transport.verbs.adapter import ETHERNET, INFINIBAND, PortState
from monarch.runtime.transport.verbs.ports import Gid, Way

V4 = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 7])
OTHER_V4 = bytes(10) + b"\xff\xff" + bytes([10, 0, 1, 7])
V6 = bytes.fromhex("20010db8000000000000000000000007")
LINK_LOCAL = bytes.fromhex("fe800000000000000000000000000007")
ROCE = PortState(1, True, ETHERNET, 0, 3, 1 << 30)

TABLE = [
    Gid(0, LINK_LOCAL, "IB/RoCE v1"),
    Gid(1, LINK_LOCAL, "RoCE v2"),
    Gid(2, V6, "RoCE v2"),
    Gid(3, V4, "IB/RoCE v1"),
    Gid(4, V4, "RoCE v2"),
    Gid(5, OTHER_V4, "RoCE v2"),
]


def chosen(table: list[Gid], local: str | None = None, family: str | None = None) -> int | None:
    way = ports.choose(ports.ways(ROCE, table), local, family)
    return None if way is None or way.gid is None else way.gid.index


def test_without_an_address_to_go_by_the_best_family_is_taken() -> None:
    assert chosen(TABLE) == 4
    assert chosen(TABLE[:4]) == 2
    assert chosen(TABLE[:2]) == 1
    assert chosen(TABLE[:1]) == 0
    assert chosen([]) is None


@pytest.mark.parametrize(
    "local, index", [("10.0.1.7", 5), ("2001:db8::7", 2), ("fe80::7%eth0", 1), ("127.0.0.1", 4), ("10.9.9.9", 4)]
)
def test_the_address_by_which_the_peer_is_reached_is_preferred(local: str, index: int) -> None:
    assert chosen(TABLE, local) == index


def test_the_same_address_is_used_as_roce_v2_and_not_v1() -> None:
    assert chosen(TABLE, "10.0.0.7") == 4


def test_an_acceptor_takes_the_family_of_its_dialer() -> None:
    assert chosen(TABLE, "10.0.1.7", "RoCE v2 over IPv6") == 2
    assert chosen(TABLE, None, "RoCE v1") == 0
    assert chosen(TABLE, None, "InfiniBand") is None


def test_infiniband_goes_by_its_local_identifier() -> None:
    port = PortState(2, True, INFINIBAND, 17, 5, 1 << 30)
    (way,) = ports.ways(port, [Gid(0, LINK_LOCAL, "IB/RoCE v1")])
    assert way == Way(port, None, "InfiniBand") and str(way) == "port 2, InfiniBand, LID 17"


def test_a_port_without_a_cable_or_a_subnet_manager_is_none() -> None:
    assert not ports.ways(PortState(1, False, ETHERNET, 0, 3, 1 << 30), TABLE)
    assert not ports.ways(PortState(1, True, INFINIBAND, 0, 3, 1 << 30), [])


def test_the_tables_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    for index, gid, kind in [
        (0, "fe80:0000:0000:0000:0000:0000:0000:0007", "IB/RoCE v1"),
        (2, "0000:0000:0000:0000:0000:ffff:0a00:0007", "RoCE v2"),
        (10, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"),
        (11, "0000:0000:0000:0000:0000:0000:0000:0000", None),  # not in use: its kind cannot be read
    ]:
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        if kind is not None:
            (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
    assert ports.port_numbers("mlx5_0", tmp_path) == [1]
    assert ports.gids("mlx5_0", 1, tmp_path) == [Gid(0, LINK_LOCAL, "IB/RoCE v1"), Gid(2, V4, "RoCE v2")]
    assert ports.text(V4) == "10.0.0.7" and ports.text(LINK_LOCAL) == "fe80::7"


def test_a_device_that_sysfs_does_not_list_has_no_addresses(tmp_path: Path) -> None:
    assert ports.port_numbers("mlx5_9", tmp_path) == [1] and ports.gids("mlx5_9", 1, tmp_path) == []
