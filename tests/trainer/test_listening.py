"""Pages are served over IPv4, IPv6 and both; a machine without IPv6 serves them all the same."""

import socket

import pytest

from grpo_trainer.gang.interfaces import open_listening_socket, split_address

pytestmark = pytest.mark.realtime


def answers(listener: socket.socket, host: str) -> bool:
    port = listener.getsockname()[1]
    try:
        with socket.create_connection((host, port), timeout=60):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("", ["127.0.0.1", "::1"]),
        ("::1", ["::1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
    ],
)
def test_a_listener_answers_on_its_addresses(host: str, answered: list[str]) -> None:
    with open_listening_socket(host, 0) as listener:
        assert [one for one in ("127.0.0.1", "::1") if answers(listener, one)] == answered


def test_a_machine_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with open_listening_socket("", 0) as listener:
        assert listener.family is socket.AF_INET
        assert answers(listener, "127.0.0.1")


def test_a_taken_port_is_no_reason_to_try_another_family() -> None:
    with open_listening_socket("", 0) as first, pytest.raises(OSError, match="in use"):
        open_listening_socket("", first.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        (":8080", ("", 8080)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:8080", ("::1", 8080)),
        ("[::]:1", ("::", 1)),
    ],
)
def test_an_address_may_have_colons_of_its_own(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
