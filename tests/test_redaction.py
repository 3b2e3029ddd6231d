"""What a person may see: no password, no signature, no character that a terminal obeys."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import StorageError, StrandlineError
from strandline.redaction import is_secret, shown, without_controls, without_values
from tests.examples import examples

PASSWORDS = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="@:!$*-_.%"), min_size=5)


@given(PASSWORDS, st.sampled_from(["http", "https", "s3", "hdfs"]), st.text())
@settings(max_examples=examples(100), deadline=None)
def test_an_error_never_shows_the_password_of_a_url(password: str, scheme: str, around: str) -> None:
    password = f"hunter2{password}"
    told = str(StorageError(f"{around} {scheme}://user:{password}@host:9000/bucket failed"))
    assert "hunter2" not in told
    assert f"{scheme}://***@host:9000/bucket failed" in told


@given(st.text(), st.text())
@settings(max_examples=examples(200), deadline=None)
def test_an_error_never_holds_a_character_that_a_terminal_obeys(before: str, after: str) -> None:
    told = str(StrandlineError(f"{before}\x1b]0;owned\x07{after}"))
    assert all(character.isprintable() or character in "\n\t" or ord(character) > 0x9F for character in told)
    assert "\\x1b]0;owned\\x07" in told


@pytest.mark.parametrize(
    "text",
    [
        "a plain text",
        "two\nlines\tand a tab",
        "s3://bucket/a@b",
        "überall 漢字 ✔",
        "mail me@example.com",
        "http://h:80/x@y",
    ],
)
def test_a_text_without_secrets_stays_as_it_is(text: str) -> None:
    assert shown(text) == text


def test_the_signature_of_a_url_is_hidden() -> None:
    url = "https://acc.blob.core.windows.net/c/x?sv=2024&sig=abc%2Fdef&se=2026"
    assert shown(url) == "https://acc.blob.core.windows.net/c/x?sv=2024&sig=***&se=2026"


def test_marks_that_reverse_text_are_shown_as_escapes() -> None:
    assert without_controls("chk-\u202e1\r\n") == "chk-\\u202e1\\r\n"


def test_values_of_secret_options_are_hidden_wherever_they_occur() -> None:
    assert without_values("denied: key s3cr3t is wrong", ["s3cr3t", "a", ""]) == "denied: key *** is wrong"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("secret_access_key", True),
        ("aws_secret_access_key", True),
        ("aws_session_token", True),
        ("azure_storage_account_key", True),
        ("access_key", True),
        ("sas_key", True),
        ("service_account_key", True),
        ("proxy_password", True),
        ("access_key_id", False),
        ("endpoint", False),
        ("region", False),
        ("timeout", False),
        ("google_service_account_path", False),
    ],
)
def test_options_that_give_access_are_known_by_their_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_an_endpoint_with_a_password_is_a_secret() -> None:
    assert is_secret("endpoint", "http://user:pass@host")
    assert not is_secret("endpoint", "http://host:9000")
    assert not is_secret("checkpoint_interval", "\x1b[31m")
