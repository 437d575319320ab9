"""What a machine without a network lacks for a GPU day: `benchmarks/gpu.py --missing` and `--wheels`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _packages  # noqa: E402
import gpu  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def test_nothing_but_the_standard_library_is_needed_to_say_what_is_missing() -> None:
    """In a Python that sees no installed package."""
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; "
    command = [sys.executable, "-I", "-S", "-c", program + "sys.exit(gpu.main())"]
    done = subprocess.run([*command, "--missing"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == gpu.wanted(gpu.WHEELS.read_text(), sys.version_info[:2])
    assert any(line.startswith("optax==") for line in done.stdout.split())
    done = subprocess.run([*command, "--rehearse"], capture_output=True, text=True, check=False)
    assert (done.returncode, "JAX is not here" in done.stdout) == (2, True)


def test_markers_and_mistakes_of_the_list() -> None:
    text = 'a==1.0 # why\n\nb_c==2 ; python_version < "3.12"\nb-c==3; python_version >= "3.12"\n'
    assert gpu.wanted(text, (3, 11)) == ["a==1.0", "b_c==2"]
    assert gpu.wanted(text, (3, 13)) == ["a==1.0", "b-c==3"]
    for line in ("a>=1", "a", 'a==1; sys_platform == "linux"'):
        with pytest.raises(ValueError, match="is not"):
            gpu.wanted(line, (3, 12))


def normal(requirement: str) -> str:
    name, equal, version = requirement.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower() + equal + version


def test_the_list_agrees_with_the_constraints_and_has_what_lowtide_requires() -> None:
    text = gpu.WHEELS.read_text()
    lines = {line for python in ((3, 11), (3, 14)) for line in gpu.wanted(text, python)}
    listed = {normal(line) for line in lines}
    pinned = [word for path in ROOT.glob("constraints*/**/*.txt") for word in path.read_text().split()]
    pinned += [word for path in ROOT.glob("constraints*.txt") for word in path.read_text().split()]
    assert {line.split("==")[0] for line in listed} == {
        line.split("==")[0] for line in listed & {normal(word) for word in pinned}
    }
    project = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", project, flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    required = set(re.findall(r'"([\w-]+)>=', block[1])) - {"jax", "numpy", "scipy"}  # the last two come with JAX
    assert {normal(name) for name in required} <= {line.split("==")[0] for line in listed}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what is installed: versions and requirements by name."""

    def put(**given: tuple[str, str]) -> None:
        found = {
            _packages.normal(name): SimpleNamespace(version=version, requires=needs.split(", ") if needs else None)
            for name, (version, needs) in given.items()
        }
        monkeypatch.setattr(_packages, "installed", lambda: found)

    return put


JAX = {"jax": ("0.10.2", ""), "numpy": ("2.1", ""), "scipy": ("1.16", "")}


def test_a_version_out_of_the_bounds_is_missing(environment: Any) -> None:
    environment(optax=("0.2.7", ""), rich=("14.10", ""), safetensors=("0.9.1", ""))
    assert gpu.lacking("optax==0.2.8\nrich==15.0.0\nsafetensors==0.8.0") == ["optax==0.2.8", "safetensors==0.8.0"]


def test_what_is_replaced_takes_its_partners_along(environment: Any) -> None:
    text = "pydantic==2.14.3\npydantic_core==2.50.4\norbax-checkpoint==0.12.8\ntensorstore==0.1.86\nprotobuf==7.36.2"
    core, store = ("2.27.1", ""), ("0.1.71", "")
    environment(
        **JAX,
        **{"pydantic": ("2.10.3", "pydantic-core==2.27.1"), "pydantic-core": core, "tensorstore": store},
        **{"orbax-checkpoint": ("0.11.5", "tensorstore>=0.1.71, protobuf"), "protobuf": ("6.0", "")},
    )
    assert gpu.lacking(text) == text.split()[:4]  # protobuf is in a version that Lowtide takes
    pairs = {"orbax-checkpoint": ("0.12.8", ""), "tensorstore": ("0.1.86", ""), "protobuf": ("6.0", "")}
    environment(**JAX, **pairs, pydantic=("2.12.0", "pydantic-core==2.41.1"), **{"pydantic-core": ("2.41.1", "")})
    assert gpu.lacking(text) == []
    # What an installation that left the partner out brought about.
    environment(**JAX, **pairs, pydantic=("2.14.3", "pydantic-core==2.50.4"), **{"pydantic-core": core})
    assert gpu.lacking(text) == ["pydantic_core==2.50.4"]


def test_what_does_not_fit_together_is_said(environment: Any) -> None:
    text = "tokenizers==0.23.3\npydantic==2.14.3"
    environment(**JAX, pydantic=("2.14.3", ""), tokenizers=("0.22.2", ""), unrelated=("1", "numpy<2"))
    assert gpu.conflicts(text) == []
    environment(
        jax=("0.13.0", ""),
        numpy=("2.1", ""),
        pydantic=("2.14.3", "tokenizers==9"),
        tokenizers=("0.22.0", ""),
        transformers=("5.1.0", 'tokenizers<=0.23.0,>=0.22.0, numpy<2; extra == "x"'),
    )
    assert gpu.conflicts(text) == [
        "scipy is not here: the list does not have it",
        "lowtide needs jax<0.13,>=0.10.2, here is 0.13.0",
        "pydantic 2.14.3 here needs tokenizers==9, which would be 0.23.3",
        "transformers 5.1.0 here needs tokenizers<=0.23.0,>=0.22.0, which would be 0.23.3",
    ]


def test_this_environment_fits_together() -> None:
    assert gpu.conflicts(gpu.WHEELS.read_text()) == []


def test_wheels_of_one_python_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(words: list[str], check: bool) -> Any:
        (Path(words[-1]) / "new.whl").write_bytes(b"x" * 2**20)
        return SimpleNamespace(returncode=0)

    (tmp_path / "old.whl").write_bytes(b"x" * 2**20)
    monkeypatch.setattr(gpu.subprocess, "run", download)
    gpu.download(tmp_path, "3.13")
    assert capsys.readouterr().out.startswith("1.0 MiB of") and (tmp_path / "new.whl").exists()
    monkeypatch.setattr(gpu.subprocess, "run", lambda words, check: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match=r"pip could not download the wheels for Python 3.13: it ended with 1"):
        gpu.download(tmp_path, "3.13")


def test_wheels_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.whl").write_bytes(b"x" * 1000)
    assert gpu.total_bytes(tmp_path.glob("*.whl")) == 1000
    monkeypatch.setattr(gpu, "MAX_WHEEL_BYTES", 999)
    with pytest.raises(SystemExit, match="too large"):
        gpu.total_bytes(tmp_path.glob("*.whl"))
