"""Files from before a run are kept, and the program still reads what it has written."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpuprobe.kept_files import KeptFiles

OLD = "trained for a week"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with files that are an hour old."""
    monkeypatch.chdir(tmp_path)
    for name in ("last.pt", "run/config.json", "run/inner/log.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(OLD)
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3600))
    yield tmp_path
    for name in ("last.pt", "run/config.json", "run/inner/log.txt"):
        assert (tmp_path / name).read_text() == OLD


def test_what_is_written_is_read_again_until_the_run_ends(folder: Path) -> None:
    files = KeptFiles()
    with files.keep():
        with open("last.pt", "wb") as file:  # noqa: PTH123 - what programs do
            torch.save({"step": 1}, file)
        with open("last.pt", "rb") as file:  # noqa: PTH123
            assert torch.load(file) == {"step": 1}
        Path("run/config.json").write_text(json.dumps({"hidden": 512}))
        assert json.loads(Path("run/config.json").read_text()) == {"hidden": 512}
        descriptor = os.open("run/config.json", os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, b"{}")
        os.close(descriptor)
        assert Path("run/config.json").read_text() == "{}"
    assert files.notes == (
        "last.pt is kept: what the program writes there is discarded",
        "run/config.json is kept: what the program writes there is discarded",
    )


@pytest.mark.parametrize("mode", ["a", "r+"])
def test_a_file_that_is_extended_has_its_content(folder: Path, mode: str) -> None:
    with KeptFiles().keep():
        with open("last.pt", mode) as file:  # noqa: PTH123
            file.seek(0, os.SEEK_END)
            file.write(" and a day")
        assert Path("last.pt").read_text() == f"{OLD} and a day"


def test_torch_and_safetensors_write_nothing(folder: Path) -> None:
    from safetensors.torch import save_file

    files = KeptFiles()
    null = Path(os.devnull).stat()
    with files.keep():
        torch.save({}, "last.pt")
        save_file({"x": torch.ones(4)}, "run/config.json")
        save_file({"x": torch.ones(4)}, "new.safetensors")
        torch.save({}, "new.pt")
    assert Path("new.safetensors").stat().st_size > 0
    assert Path("new.pt").stat().st_size > 0
    assert len(files.notes) == 2
    assert os.path.samestat(null, Path(os.devnull).stat())  # safetensors replaces what has a name


def test_a_file_that_is_moved_over_an_older_one(folder: Path) -> None:
    """As programs write checkpoints, so that none is incomplete."""
    with KeptFiles().keep():
        Path("last.tmp").write_text("new")
        os.replace("last.tmp", "last.pt")  # noqa: PTH105
        assert Path("last.pt").read_text() == "new"
        assert not Path("last.tmp").exists()
        Path("run/config.json").rename("run/config.1.json")  # the older one, to another name
        assert Path("run/config.1.json").read_text() == OLD
        Path("last.pt").rename("run/config.json")
        assert Path("run/config.json").read_text() == "new"
        assert Path("last.pt").read_text() == OLD


def test_what_is_deleted_stays(folder: Path) -> None:
    files = KeptFiles()
    with files.keep():
        Path("last.pt").unlink()
        os.remove("run/config.json")  # noqa: PTH107
        shutil.rmtree("run")
        Path("run").mkdir()  # without exist_ok
        with pytest.raises(FileExistsError):
            Path("run").mkdir()
    assert len(files.notes) == 3


def test_new_files_are_those_of_the_program(folder: Path) -> None:
    files = KeptFiles()
    with files.keep():
        Path("new.txt").write_text("1")
        Path("new.txt").write_text("2")
        Path("new.txt").rename("newer.txt")
        os.makedirs("out/inner")  # noqa: PTH103
        shutil.rmtree("out")
        Path("gone.txt").write_text("")
        Path("gone.txt").unlink()
        with pytest.raises(FileExistsError):
            open("last.pt", "x")  # noqa: PTH123, SIM115
    assert Path("newer.txt").read_text() == "2"
    assert not Path("out").exists()
    assert not Path("gone.txt").exists()
    assert files.notes == ()


def test_empty_files_are_opened_as_they_are(folder: Path) -> None:
    """Locks of other processes among them."""
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (0, 0))
    with KeptFiles().keep(), lock.open("w") as file:
        assert os.path.samestat(os.fstat(file.fileno()), lock.stat())


def test_a_large_file_is_changed_in_place_with_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuprobe.kept_files._MOST_COPIED", 4)
    files = KeptFiles()
    with files.keep(), open("last.pt", "r+") as file:  # noqa: PTH123
        assert os.path.samestat(os.fstat(file.fileno()), Path("last.pt").stat())
    assert files.notes == ("last.pt was opened to be changed in place, which is not prevented",)


def test_a_copy_that_may_have_no_room_is_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuprobe.kept_files._ROOM", 1 << 50)
    before = Path("last.pt").stat()
    with KeptFiles().keep():
        Path("last.pt").write_text("new")
        assert Path("last.pt").read_text() == OLD
        os.utime("last.pt")
    assert Path("last.pt").stat().st_mtime == before.st_mtime


def test_afterwards_python_is_as_before(folder: Path) -> None:
    before = (open, io.open, os.open, os.replace, os.unlink, os.mkdir, shutil.rmtree)
    temporary = set(Path(tempfile.gettempdir()).glob("gpuprobe-kept-*"))
    with KeptFiles().keep():
        Path("last.pt").write_text("new")
    assert before == (open, io.open, os.open, os.replace, os.unlink, os.mkdir, shutil.rmtree)
    assert set(Path(tempfile.gettempdir()).glob("gpuprobe-kept-*")) == temporary
