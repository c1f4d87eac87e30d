"""Paths that other users can change, with real files of another user."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprobe.model.io.trust import changeable_by, private_folder

OTHER = 4242
"""A user that this machine does not have."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file in a private folder."""
    folder = private_folder(tmp_path / "cache" / "inner")
    (folder / "library.so").write_bytes(b"")
    return folder / "library.so"


def test_what_this_user_made_is_trusted(own: Path) -> None:
    assert changeable_by(own) == ""
    assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(own.parent.parent.stat().st_mode) == 0o700


@as_root
@pytest.mark.parametrize("part", ["library.so", "inner", "cache"])
def test_a_component_of_another_user_is_not(own: Path, part: str) -> None:
    component = next(one for one in (own, *own.parents) if one.name == part)
    os.chown(component, OTHER, OTHER)
    assert changeable_by(own) == f"{component} belongs to another user ({OTHER})"


@as_root
def test_a_link_of_another_user_is_not(own: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(own.parent)
    assert changeable_by(link / own.name) == ""
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert changeable_by(link / own.name) == f"{link} belongs to another user ({OTHER})"


@as_root
def test_a_link_in_the_middle_is_not(own: Path, tmp_path: Path) -> None:
    """Neither the first link nor the file belongs to another user."""
    middle, first = tmp_path / "middle", tmp_path / "first"
    middle.symlink_to(own.parent)
    first.symlink_to(middle)
    os.chown(middle, OTHER, OTHER, follow_symlinks=False)
    assert changeable_by(first / own.name) == f"{middle} belongs to another user ({OTHER})"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users can enter, in the folder for temporary files."""
    folder = Path("/tmp") / f"gpuprobe-test-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_what_others_can_write_to_is_not_trusted(shared: Path) -> None:
    file = shared / "library.so"
    file.touch(0o644)
    assert changeable_by(file) == ""
    file.chmod(0o666)
    assert changeable_by(file) == f"{file} can be written by others"
    file.chmod(0o644)
    shared.chmod(0o777)
    assert changeable_by(file) == f"{shared} can be written by others"
    shared.chmod(0o700)  # others cannot enter it
    file.chmod(0o666)
    assert changeable_by(file) == ""


def test_a_folder_that_others_can_write_to_is_not_private(tmp_path: Path, shared: Path) -> None:
    for parent in (tmp_path, shared):
        folder = private_folder(parent / "folder")
        folder.chmod(0o777)
        with pytest.raises(PermissionError, match="can be written by others"):
            private_folder(folder)


def test_a_loop_of_links_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        changeable_by(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        changeable_by(tmp_path / "nothing")


def test_dots_lead_to_the_parent_of_the_target(own: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(own.parent)
    assert changeable_by(tmp_path / "link" / ".." / "inner" / own.name) == ""


def test_a_folder_of_this_user_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    assert stat.S_IMODE(private_folder(folder).stat().st_mode) == 0o700
