"""`gpuprobe check --comment`: one comment of a pull or merge request, by the services' protocols.

A server on this machine stands for the service: the real ones cannot be reached from a test.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from recipe_project import copied, made

from gpuprobe.cli import main

pytestmark = pytest.mark.xdist_group("recipes")


class Service(ThreadingHTTPServer):
    """Keeps comments by id, gives them in pages, and refuses other tokens than ``secret``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.comments: dict[int, str] = {}
        self.changes: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def answer(self) -> None:
        path = urlsplit(self.path)
        list_path, one_path = "/repos/me/net/issues/7/comments", "/repos/me/net/issues/comments/"
        update = "PATCH"
        if path.path.startswith("/projects"):
            list_path = "/projects/5/merge_requests/9/notes"
            one_path, update = f"{list_path}/", "PUT"
            allowed = self.headers["PRIVATE-TOKEN"] == "secret"
        else:
            allowed = self.headers["Authorization"] == "Bearer secret"
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size))["body"] if size else ""
        comments = self.server.comments
        result: Any = {}
        if not allowed:
            self.send_error(403)
            return
        if self.command == "GET" and path.path == list_path:
            given = {name: int(values[0]) for name, values in parse_qs(path.query).items()}
            first = given["per_page"] * (given["page"] - 1)
            rows = [{"id": number, "body": text} for number, text in comments.items()]
            result = rows[first : first + given["per_page"]]
        elif self.command == "POST" and path.path == list_path:
            comments[len(comments) + 100] = body
        elif self.command == update and path.path.startswith(one_path):
            comments[int(path.path.removeprefix(one_path))] = body
        else:
            self.send_error(404)
            return
        if self.command != "GET":
            self.server.changes.append(self.command)
        text = json.dumps(result).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PATCH = do_PUT = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=["github", "gitlab"])
def job(
    request: pytest.FixtureRequest,
    service: Service,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A job of that service for a pull request, in a folder with recordings and a baseline."""
    github = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_REF": "refs/pull/7/merge",
        "GITHUB_REPOSITORY": "me/net",
        "GITHUB_API_URL": service.address,
        "GITHUB_TOKEN": "secret",
    }
    gitlab = {
        "GITLAB_CI": "true",
        "CI_MERGE_REQUEST_IID": "9",
        "CI_PROJECT_ID": "5",
        "CI_API_V4_URL": service.address,
        "GITLAB_TOKEN": "secret",
    }
    for name in (*github, *gitlab, "GITHUB_WORKSPACE", "CI_PROJECT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (github if request.param == "github" else gitlab).items():
        monkeypatch.setenv(name, value)
    copied(made(tmp_path_factory), tmp_path)
    monkeypatch.chdir(tmp_path)
    name: str = request.param
    return name


CHECK = ["check", "--baseline", "memory.json", "--comment"]


def test_a_later_run_replaces_the_comment(
    job: str, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    # It is found among the comments of others, on the second page.
    service.comments.update(dict.fromkeys(range(1, 120), "of a person"))
    assert main([*CHECK, "large.gpuprobe"]) == 1
    assert "peak_allocated" in capsys.readouterr().out  # the report is printed as without it
    (mine,) = [text for text in service.comments.values() if text != "of a person"]
    assert mine.startswith("<!-- gpuprobe check: memory.json -->\n")
    assert "| peak_allocated |" in mine or "peak_allocated" in mine
    assert main([*CHECK, "small.gpuprobe"]) == 0
    (now,) = [text for text in service.comments.values() if text != "of a person"]
    assert now != mine
    assert service.changes == ["POST", "PATCH" if job == "github" else "PUT"]


def test_another_baseline_has_a_comment_of_its_own(job: str, service: Service) -> None:
    Path("other.json").write_bytes(Path("memory.json").read_bytes())
    assert main([*CHECK, "small.gpuprobe"]) == 0
    assert main(["check", "--baseline", "other.json", "--comment", "small.gpuprobe"]) == 0
    assert len(service.comments) == 2


def test_a_service_that_refuses_does_not_change_how_the_check_ends(
    job: str,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = "GITHUB_TOKEN" if job == "github" else "GITLAB_TOKEN"
    monkeypatch.setenv(token, "of a fork, which may only read")
    assert main([*CHECK, "small.gpuprobe"]) == 0
    error = capsys.readouterr().err
    assert "the comment was not written" in error
    assert "403" in error
    assert "of a fork" not in error
    assert not service.comments


def test_without_a_pull_request_it_is_refused_before_the_program_runs(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    monkeypatch.delenv("GITLAB_TOKEN", raising=False)
    assert main([*CHECK, "missing.py"]) == 2
    assert "_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("GITHUB_REF", "refs/heads/main")
    monkeypatch.delenv("CI_MERGE_REQUEST_IID", raising=False)
    assert main([*CHECK, "missing.py"]) == 2
    assert "is for no" in capsys.readouterr().err
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITLAB_CI", raising=False)
    assert main([*CHECK, "missing.py"]) == 2
    assert "for a job on GitHub or GitLab" in capsys.readouterr().err
