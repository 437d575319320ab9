"""Files that are there whole or not at all."""

from __future__ import annotations

import os

import pytest

from lowtide.core import OutputError, write_files


def test_makes_folders_and_replaces_files(tmp_path):
    write_files(tmp_path / "a" / "b", {"x": b"old", "y": b"1"})
    write_files(tmp_path / "a" / "b", {"x": b"new"})
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()} == {"x": b"new", "y": b"1"}


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    write_files(tmp_path, {"x": b""})
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failure_leaves_everything_as_it_was(tmp_path, monkeypatch):
    write_files(tmp_path, {"x": b"old", "y": b"old"})
    sync, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write x, y(.|\n)*No space left(.|\n)*hint: choose another folder"):
        write_files(tmp_path, {"x": b"new", "y": b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"old", "y": b"old"}
