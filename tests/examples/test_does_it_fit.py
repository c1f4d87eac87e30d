"""The notebook for Colab, executed but for its installation."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat
import pytest
import warm_python

BOOK = Path(__file__).resolve().parents[2] / "examples" / "does_it_fit.ipynb"


@pytest.mark.slow
def test_both_questions_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{warm_python.shared().folder}{os.pathsep}{os.environ['PATH']}")
    book = nbformat.read(BOOK, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code)  # of which version they would be is unclear
    (install,) = (cell for cell in code if "install" in cell.metadata.get("tags", ()))
    assert code[0] is install
    install.source = "pass"  # the lines of later cells keep their numbers
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, resources=where).execute()

    printed = "".join(output.text for output in code[1].outputs)
    assert "t4: fits" in printed
    (result,) = (output for output in code[3].outputs if output.output_type == "execute_result")
    assert "t4: fits" in result.data["text/html"]
    assert "In [4]:4" in result.data["text/html"]  # the line that the text above the cell names
