"""The report of a check as one comment of a pull or merge request, which later runs replace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from gpuprobe.errors import EnvironmentUnavailable, UsageError

_MOST: Final = 60_000
"""Characters of a comment; GitHub takes 65,536."""
_PAGE: Final = 100
"""Comments that are read at once, the most that both services give."""
_TIMEOUT_S: Final = 20.0


class Discussion(NamedTuple):
    """Where comments are: ``comments`` is the address of their list, ``one`` that of a comment
    without its id, ``update`` the method that replaces it.
    """

    comments: str
    one: str
    update: str
    headers: Mapping[str, str]


def discussion_of(environment: Mapping[str, str]) -> Discussion:
    """The discussion of the pull or merge request that this job of GitHub or GitLab is for, from
    its environment variables; the token is in ``GITHUB_TOKEN`` or ``GITLAB_TOKEN``.

    Raises UsageError outside such a job, and without a token.
    """
    get = environment.get
    if get("GITHUB_ACTIONS"):
        # refs/pull/7/merge
        kind, number = [*get("GITHUB_REF", "").split("/"), "", ""][1:3]
        if kind != "pull":
            raise UsageError("--comment: this run of GitHub's is for no pull request")
        repository = f"{environment['GITHUB_API_URL']}/repos/{environment['GITHUB_REPOSITORY']}"
        token = _token(environment, "GITHUB_TOKEN", "permissions: pull-requests: write")
        return Discussion(
            f"{repository}/issues/{number}/comments",
            f"{repository}/issues/comments",
            "PATCH",
            {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"},
        )
    if get("GITLAB_CI"):
        number = get("CI_MERGE_REQUEST_IID", "")
        if not number:
            raise UsageError("--comment: this job of GitLab's is for no merge request")
        project = f"{environment['CI_API_V4_URL']}/projects/{environment['CI_PROJECT_ID']}"
        notes = f"{project}/merge_requests/{number}/notes"
        token = _token(environment, "GITLAB_TOKEN", "a project access token with the scope api")
        return Discussion(notes, notes, "PUT", {"PRIVATE-TOKEN": token})
    raise UsageError("--comment is for a job on GitHub or GitLab")


def _token(environment: Mapping[str, str], name: str, hint: str) -> str:
    token = environment.get(name, "")
    if not token:
        raise UsageError(f"--comment needs the variable {name}", hint=hint)
    return token


def comment(where: Discussion, report: str, subject: str) -> None:
    """Write the report, in Markdown, as a comment about ``subject``, in place of an earlier one.

    Raises EnvironmentUnavailable if the service does not accept it.
    """
    mark = f"<!-- gpuprobe check: {subject} -->"
    if len(report) > _MOST:
        report = report[:_MOST].rpartition("\n")[0] + "\n\nThe rest is in the log of the job."
    body = f"{mark}\n{report}"
    for one in _comments(where):
        if str(one.get("body", "")).startswith(mark):
            _request(where, f"{where.one}/{one['id']}", where.update, body)
            return
    _request(where, where.comments, "POST", body)


def _comments(where: Discussion) -> Iterator[dict[str, Any]]:
    page = 1
    while True:
        rows = _request(where, f"{where.comments}?per_page={_PAGE}&page={page}", "GET")
        yield from rows
        if len(rows) < _PAGE:
            return
        page += 1


def _request(where: Discussion, address: str, method: str, body: str | None = None) -> Any:
    data = None if body is None else json.dumps({"body": body}).encode()
    headers = {"Content-Type": "application/json", **where.headers}
    request = Request(address, data, headers, method=method)
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except HTTPError as error:
        why = f"{error.code} {error.reason}"
    except (URLError, OSError, ValueError) as error:
        why = str(error)
    raise EnvironmentUnavailable(f"the comment was not written: {method} {address}: {why}")
