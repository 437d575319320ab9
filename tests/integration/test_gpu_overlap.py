"""Copies of a profile that run under kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _overlap  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def test_copies_are_hidden_where_a_kernel_runs() -> None:
    events = [
        *[("gemm", 0.0, 2.0), ("loop_fusion", 1.0, 3.0), ("gemm", 5.0, 6.0)],  # kernels from 0 to 3 and from 5 to 6
        *[("MemcpyH2D", 2.0, 4.0), ("MemcpyH2D", 3.5, 5.5)],  # from 2 to 5.5; hidden 2 to 3 and 5 to 5.5
        *[("MemcpyD2H", 7.0, 8.0), ("MemcpyD2D", 0.0, 9.0), ("Memset", 0.0, 9.0)],
    ]
    found = _overlap.hidden(events)
    assert found == pytest.approx(
        {
            "kernel_seconds": 4.0,
            "h2d_seconds": 3.5,
            "d2h_seconds": 1.0,
            "copy_seconds": 4.5,
            "h2d_hidden_seconds": 1.5,
            "d2h_hidden_seconds": 0.0,
            "copy_hidden_seconds": 1.5,
        }
    )


PLANE = """
planes {{ id: {id} name: "{name}"
  lines {{ id: 1 name: "{line}" timestamp_ns: 1000
    events {{ metadata_id: 1 offset_ps: 0 duration_ps: 3000000 }}
    events {{ metadata_id: 2 offset_ps: 2000000 duration_ps: 2000000 }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "loop_fusion" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "MemcpyD2H" }} }} }}
"""


def test_a_trace_is_read_by_the_streams_of_its_gpus(tmp_path: Path) -> None:
    from jax.profiler import ProfileData

    planes = [("/device:GPU:0", "Stream #7(Compute,MemcpyD2H)"), ("/device:GPU:0", "XLA Ops"), ("/host:CPU", "Stream")]
    text = "".join(PLANE.format(id=at, name=name, line=line) for at, (name, line) in enumerate(planes))
    folder = tmp_path / "plugins/profile/now"
    folder.mkdir(parents=True)
    (folder / "machine.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    found = _overlap.overlap(tmp_path)
    assert found["kernel_seconds"] == pytest.approx(3e-6) and found["d2h_seconds"] == pytest.approx(2e-6)
    assert found["hidden_share"] == pytest.approx(0.5)
    assert _overlap.overlap(tmp_path / "nothing") == {}


def test_intervals() -> None:
    assert _overlap.union([(3, 4), (0, 1), (1, 2), (0.5, 0.6)]) == [(0, 2), (3, 4)]
    assert _overlap.common([(0, 2), (3, 4)], [(1, 3.5), (3.7, 9)]) == [(1, 2), (3, 3.5), (3.7, 4)]
    assert _overlap.common([], [(0, 1)]) == []
    assert _overlap.length([(0, 2), (3, 4.5)]) == 3.5
