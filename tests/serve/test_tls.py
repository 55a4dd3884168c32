"""A certificate that cannot be used is refused before anything starts."""

from __future__ import annotations

import shutil

import pytest

from rayrec.platform.errors import InputError
from rayrec.serve.config.tls import TlsConfig, check_tls
from tests.serve.certificates import make_certificate


def test_a_certificate_and_its_key_are_taken_from_anywhere(tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = TlsConfig(certificate=certificate.name, key=key.name)
    check_tls(config)
    assert config == TlsConfig(certificate=str(certificate), key=str(key))


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    certificate, _ = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    with pytest.raises(InputError, match="are not a certificate and its key"):
        check_tls(TlsConfig(certificate=str(certificate), key=str(other)))


def test_what_is_no_certificate_is_refused(tmp_path):
    certificate, key = make_certificate(tmp_path)
    shutil.copy(key, certificate)
    with pytest.raises(InputError, match="are not a certificate and its key"):
        check_tls(TlsConfig(certificate=str(certificate), key=str(key)))


def test_a_file_that_is_not_there_is_named(tmp_path):
    certificate, _ = make_certificate(tmp_path)
    with pytest.raises(InputError, match=r"--tls-key .*nowhere: cannot be read"):
        check_tls(TlsConfig(certificate=str(certificate), key=str(tmp_path / "nowhere")))


def test_a_key_with_a_password_is_refused(tmp_path):
    certificate, key = make_certificate(tmp_path, password="open sesame")
    with pytest.raises(InputError, match="give a key without one"):
        check_tls(TlsConfig(certificate=str(certificate), key=str(key)))
