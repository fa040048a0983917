"""Messages as bytes, and the memory that travels with them. In one process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monarch.runtime.actors.messages import memory
from monarch.runtime.actors.messages.message import BUFFER, INLINE, PACKET, Payload, packet, unpack


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No files that other tests have left."""
    fresh = memory.FilePool()
    monkeypatch.setattr(memory, "kept_files", fresh)
    yield
    for file in fresh.files:
        file.close()


def sent(payload: Payload) -> Payload:
    """As it arrives."""
    files = [] if payload.memory is None else [os.dup(payload.memory.fd)]
    data = packet(("head", 1), payload)
    assert len(data) < PACKET
    head, arrived = unpack(data, files)
    assert head == ("head", 1)
    return arrived


def file_of(payload: Payload) -> int:
    assert payload.memory is not None
    return os.fstat(payload.memory.fd).st_ino


def test_small_values_are_in_the_packet() -> None:
    for value in (None, {"a": [1, 2.5, "x"]}, torch.arange(10), b"x" * (INLINE - 100)):
        payload = Payload.of(value)
        assert payload.memory is None
        arrived = sent(payload).decode()
        assert torch.equal(arrived, value) if isinstance(value, torch.Tensor) else arrived == value


def test_large_values_are_in_a_file() -> None:
    many = [torch.full((BUFFER // 8,), float(at)) for at in range(4)]  # none large, together too large for a packet
    large = [torch.full((BUFFER,), float(at)) for at in range(3)]
    for value in (many, large, [*large, b"x" * (2 * INLINE)], b"y" * (1 << 20)):
        payload = Payload.of(value)
        assert payload.memory is not None
        arrived = sent(payload).decode()
        assert all(map(torch.equal, arrived[:3], value[:3])) if isinstance(value, list) else arrived == value


def test_each_receiver_has_its_own_copy_and_the_sender_another() -> None:
    tensor = torch.zeros(BUFFER)
    payload = Payload.of(tensor)
    one, two = sent(payload).decode(), sent(payload).decode()
    tensor.fill_(1)
    one.fill_(2)
    assert (float(one.sum()), float(two.sum())) == (2 * BUFFER, 0)


def test_a_file_is_used_again_once_all_receivers_have_let_it_go() -> None:
    payload = Payload.of(torch.zeros(BUFFER))
    one, two = sent(payload).decode(), sent(payload).decode()
    first = file_of(payload)
    del payload
    other = Payload.of(torch.full((BUFFER,), 1.0))
    assert file_of(other) != first
    three = sent(other).decode()
    del one
    again = Payload.of(torch.full((BUFFER,), 2.0))
    assert file_of(again) != first and float(two.sum()) == 0
    del two
    last = Payload.of(torch.full((BUFFER,), 3.0))
    assert file_of(last) == first
    assert float(sent(last).decode()[0]) == 3 and float(three[0]) == 1


def test_part_of_what_came_keeps_the_file() -> None:
    payload = Payload.of([torch.zeros(BUFFER), torch.ones(BUFFER)])
    part = sent(payload).decode()[1][5:7]
    first = file_of(payload)
    del payload
    assert file_of(Payload.of([torch.zeros(BUFFER), torch.zeros(BUFFER)])) != first
    assert part.tolist() == [1, 1]


def own_mappings() -> int:
    """How many files this process has mapped to write them again."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        found += "monarch-message" in line and " rw-s 00000000 " in line and end - begin > memory.SLOTS
    return found


def test_what_is_used_again_has_what_was_written_last() -> None:
    """However much larger it was, however it was written, and whatever receivers wrote to theirs."""
    files = set()
    for at, count in enumerate((2 * BUFFER, BUFFER, 2 * BUFFER, BUFFER + 1, 2 * BUFFER)):
        value = [torch.full((count,), float(at)), b"%d" % at * (2 * INLINE), torch.full((BUFFER,), -float(at))]
        payload = Payload.of(value)
        files.add(file_of(payload))
        got = sent(payload).decode()
        assert torch.equal(got[0], value[0]) and got[1] == value[1] and torch.equal(got[2], value[2])
        got[0].fill_(9)
        assert torch.equal(sent(payload).decode()[0], value[0])
        del payload, got
    assert len(files) == 1


def own_files() -> int:
    """How many files of messages this process has open."""
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists() or entry.is_symlink()]
    return sum("monarch-message" in name for name in names)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "kept_files", memory.FilePool())
    before, files = own_mappings(), own_files()
    for size in (BUFFER, 2 * BUFFER):  # used again, and so mapped; then pushed out by others
        for _ in range(2):
            many = [sent(Payload.of(torch.zeros(size))) for _ in range(memory.KEEP_FILES)]
            assert all(float(payload.decode()[0]) == 0 for payload in many)
            del many
    assert before < own_mappings() <= before + memory.KEEP_FILES
    held = [sent(Payload.of(torch.zeros(BUFFER))) for _ in range(3 * memory.KEEP_FILES)]
    assert own_mappings() <= before
    assert own_files() <= files + memory.KEEP_FILES + 1  # what other tests have left may be in use
    assert all(float(payload.decode()[0]) == 0 for payload in held)


def test_files_that_were_lost_are_an_error_where_the_value_is_wanted() -> None:
    payload = Payload.of(torch.zeros(BUFFER))
    head, arrived = unpack(packet(("head",), payload), [])
    assert head == ("head",)
    for payload in (arrived, sent(arrived)):  # also by whom it was handed on to
        with pytest.raises(OSError, match="ulimit -n"):
            payload.decode()


def test_tensors_keep_what_they_are() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.float16), requires_grad=False)
    value = {
        "parameter": weight,
        "again": weight,
        "grad": torch.ones(2, requires_grad=True),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "sparse": torch.eye(3).to_sparse(),
        "module": torch.nn.Linear(2, 3),
        "dtype": torch.bfloat16,
    }
    got = sent(Payload.of(value)).decode()
    assert isinstance(got["parameter"], torch.nn.Parameter) and not got["parameter"].requires_grad
    assert got["parameter"] is got["again"] and got["parameter"].dtype is torch.float16
    assert got["grad"].requires_grad and got["scalar"].shape == () and got["dtype"] is torch.bfloat16
    assert torch.equal(got["transposed"], value["transposed"]) and torch.equal(got["bool"], value["bool"])
    assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
    assert [name for name, _ in got["module"].named_parameters()] == ["weight", "bias"]
    assert pickle.loads(pickle.dumps(got["scalar"])) == 2.5


@pytest.mark.parametrize("size", [2, 40])
def test_tensors_that_are_dense_keep_their_strides(size: int) -> None:
    """In the packet and in a file; those with gaps, or elements that lie on each other, arrive contiguous."""
    images = torch.randn(2, 3, size, size + 1)
    dense = [
        images.to(memory_format=torch.channels_last),
        images.permute(3, 1, 0, 2),
        images[0].transpose(1, 2),
        torch.nn.Parameter(images[0, 0].t()),
    ]
    gaps = [images[:, ::2], images[:, :, :, 1:].mT, torch.ones(1).expand(4), torch.ones(3, 1).expand(3, size).t()]
    for tensor in [*dense, *gaps]:
        came = Payload.of(tensor).received().decode()
        assert torch.equal(came, tensor) and came.requires_grad == tensor.requires_grad
        assert came.stride() == tensor.stride() if any(tensor is one for one in dense) else came.is_contiguous()
