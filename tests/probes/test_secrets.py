"""What is masked in the arguments and the environment of a process, and what is left."""

from __future__ import annotations

import pytest

from gpuprobe.probes.secrets import Redactor


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://ada:pw@host/x", "https://<secret>@host/x"),
        ("use hf_abcdefghijklmnopqrst now", "use <secret> now"),
        ("--password hunter2 --epochs 3", "--password <secret> --epochs 3"),
        ('{"api_key": "abc123"}', '{"api_key": "<secret>"}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer <secret>"),
        ("GET /?sig=abc&n=1", "GET /?sig=<secret>&n=1"),
        ("Xid (PCI:0000:18:00): 79", "Xid (PCI:0000:18:00): 79"),
        ("GPU-3ebf1335-d9db-a275-96b3-7a723d058eed", "GPU-3ebf1335-d9db-a275-96b3-7a723d058eed"),
        ("TOKENIZERS_PARALLELISM=true", "TOKENIZERS_PARALLELISM=<secret>"),
        ("is true", "is true"),
        ("in /data/Zq9planted/x", "in /data/<secret>/x"),
    ],
)
def test_what_is_masked_and_what_is_left(text: str, left: str) -> None:
    environ = {"TOKENIZERS_PARALLELISM": "true", "DB_PASSWORD": "Zq9planted", "MY_PAT": "no"}
    assert Redactor(environ).text(text) == left
