"""Whether other users of this machine can change what a path leads to.

Code and settings are only used from paths that they cannot change: a library that another user has
planted would run with the rights of this one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_MOST_LINKS = 40  # of a path, as in Linux
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def changeable_by(path: Path) -> str:
    """Why another user than root could change what ``path`` leads to, as text; "" if none can.

    Each component that the kernel visits is checked, links too: this user or root has to own it,
    and others must not be able to write to it, apart from a folder with the sticky bit, such as
    ``/tmp``, and from what is inside a folder that they cannot enter. Raises OSError if a component
    does not exist.
    """
    user = os.geteuid()
    private = False
    for component, status in _components(path):
        if status.st_uid not in (0, user) and not _is_unmapped(status.st_uid):
            return f"{component} belongs to another user ({status.st_uid})"
        if stat.S_ISLNK(status.st_mode):
            private = False
            continue
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if not private and not sticky and _is_writable_by_others(status):
            return f"{component} can be written by others"
        entered = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        private = private or (status.st_uid == user and not entered)
    return ""


def _components(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything that is visited when ``path`` is opened. Raises OSError."""
    current = "/"
    yield current, os.lstat(current)
    left = deque(os.path.join(Path.cwd(), path).split("/"))  # noqa: PTH118 - keeps `..`
    links = 0
    while left:
        name = left.popleft()
        if name == "..":
            current = os.path.dirname(current)  # noqa: PTH120
        if name in ("", ".", ".."):
            continue
        component = os.path.join(current, name)  # noqa: PTH118
        status = os.lstat(component)
        yield component, status
        if not stat.S_ISLNK(status.st_mode):
            current = component
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = os.readlink(component)  # noqa: PTH115
        if target.startswith("/"):
            current = "/"
        left.extendleft(reversed(target.split("/")))


def _is_writable_by_others(status: os.stat_result) -> bool:
    if not status.st_mode & _OTHERS_WRITE:
        return False
    return bool(status.st_mode & stat.S_IWOTH) or not _is_private_group(status)


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the group has this user only, as most distributions make one for each user, with a
    umask that lets it write.
    """
    import grp  # not on Windows
    import pwd

    try:
        group = grp.getgrgid(status.st_gid)
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return user.pw_gid == status.st_gid and set(group.gr_mem) <= {user.pw_name}


def _is_unmapped(owner: int) -> bool:
    """Whether this is the number for all users that are not in this user namespace: in a sandbox,
    root of the machine has it.
    """
    try:
        unmapped = int(Path("/proc/sys/fs/overflowuid").read_text())
        if owner != unmapped:
            return False
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", str((1 << 32) - 1)]
    except (OSError, ValueError):
        return False


def private_folder(path: Path) -> Path:
    """Make a folder that no other user can enter, with its parents; one that exists is kept, and
    closed to others. Raises PermissionError if others can change it, or could have.
    """
    if not path.parent.is_dir():
        private_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    reason = changeable_by(path)
    status = path.stat()
    if not reason and _is_writable_by_others(status):
        reason = f"{path} can be written by others"  # if they can enter it, or could
    if reason:
        raise PermissionError(errno.EPERM, reason, str(path))
    if status.st_uid == os.geteuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        path.chmod(0o700)
    return path
