"""Synthetic memory reports: the step of a 32-layer language model, and one small enough to add up by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from lowtide.memory import MemoryReport, SpaceBytes, Target
from lowtide.report._facts import DERIVED_ROLES, Buffer, live_bytes, sum_by_role

ITEM_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u8": 1, "": 1}
SCOPES = {
    "forward": "jit(step)/jvp(forward)",
    "backward": "jit(step)/transpose(jvp(forward))",
    "recompute": "jit(step)/rematted_computation",
    "update": "jit(step)/update",
}
SHAPES = {
    "attn/q_proj/weight": (4096, 4096),
    "attn/k_proj/weight": (1024, 4096),
    "attn/v_proj/weight": (1024, 4096),
    "attn/o_proj/weight": (4096, 4096),
    "mlp/gate_proj/weight": (14336, 4096),
    "mlp/up_proj/weight": (14336, 4096),
    "mlp/down_proj/weight": (4096, 14336),
    "attn_norm/scale": (4096,),
    "mlp_norm/scale": (4096,),
}


class Program:
    """Collects buffers the way a program would make them."""

    def __init__(self, num_moments: int) -> None:
        self.num_moments = num_moments
        self.buffers = list[Buffer]()

    def add(self, role: str, shape: tuple[int, ...], dtype: str, **fields: Any) -> None:
        elements = math.prod(shape) * ITEM_BYTES[dtype]
        num_bytes = max(512, -(-elements // 512) * 512)
        names_array = bool(dtype)
        given = {"space": "device", "start": 0, "end": self.num_moments - 1, **fields}
        self.buffers.append(
            Buffer(
                role=role,
                shape=shape if names_array else (),
                dtype=dtype,
                num_bytes=num_bytes,
                padding_bytes=num_bytes - elements if names_array else 0,
                **given,
            )
        )


def make_report(
    buffers: Sequence[Buffer],
    moments: Sequence[str],
    *,
    capacity: int | None = None,
    name: str = "v5p:1x1x1",
    **fields: Any,
) -> MemoryReport:
    """A report whose totals are what its buffers add up to at the peak."""

    def space(which: str) -> tuple[int, SpaceBytes, dict[str, int]]:
        mine = [b for b in buffers if b.space == which]
        live = live_bytes(mine, len(moments))
        peak = live.index(max(live))
        roles = sum_by_role(b for b in mine if b.alive_at(peak))
        arguments = sum(size for role, size in roles.items() if role not in DERIVED_ROLES)
        code = roles.get("code", 0)
        temp = sum(roles.values()) - arguments - code
        return peak, SpaceBytes(argument_bytes=arguments, temp_bytes=temp, code_bytes=code), roles

    peak, device, by_role = space("device")
    host_peak, host, host_by_role = space("host")
    goal = Target(name=name, platform="tpu", chip=name.split(":")[0], num_devices=1, device_bytes=capacity)
    return MemoryReport(
        **{
            "target": goal,
            "device": device,
            "host": host,
            "by_role": by_role,
            "host_by_role": host_by_role,
            "buffers": tuple(buffers),
            "moments": tuple(moments),
            "peak_moment": peak,
            "host_peak_moment": host_peak,
            **fields,
        }
    )


def add_states(program: Program, layer: int, read: int, backward: int) -> None:
    """A layer's weights and optimizer state, their copies, and their gradients."""
    last = program.num_moments - 1
    for name, shape in SHAPES.items():
        path = f"layers/{layer}/{name}"
        program.add("params", shape, "bf16", path=f"model/{path}")
        for moment in ("mu", "nu"):
            where = "device" if name.startswith("attn") else "host"
            named = {"path": f"opt/{moment}/{path}"}
            program.add("opt_state", shape, "f32", space=where, **named)
            if where == "host":
                program.add("opt_state", shape, "f32", phase="update", start=read, end=min(last, read + 4), **named)
        if len(shape) == 2:
            made = {
                "path": f"model/{path}",
                "phase": "backward",
                "scope": f"{SCOPES['backward']}/layers/{layer}",
                "source": "llama.py:88 (linear)",
            }
            copied = {"operation": f"copy.{layer * 40 + 7}", "start": read, "end": min(last, read + 3)}
            program.add("copies", shape, "bf16", **made, **copied)
            summed = {
                "operation": f"fusion dot_general.{layer * 40 + 1}",
                "start": read + 2,
                "end": backward + layer % 9,
            }
            program.add("gradients", shape, "bf16", **made, **summed)


def add_values(program: Program, layer: int, made: int, read: int, width: int, batch: int) -> None:
    """A layer's activations and temporaries."""
    at, last = f"layers/{layer}", program.num_moments - 1
    kept = {"phase": "forward", "end": read}
    residual = {"scope": f"{SCOPES['forward']}/{at}/residual", "source": "llama.py:141 (block)", "start": made}
    program.add("activations", (batch, 2048, 4096), "bf16", operation=f"fusion add.{layer}", **kept, **residual)
    query = {"scope": f"{SCOPES['forward']}/{at}/attn/q", "source": "llama.py:97 (attention)", "start": made + 2}
    program.add("activations", (batch, 32, 2048, 128), "bf16", operation=f"fusion rope.{layer}", **kept, **query)
    for piece in range(22):
        phase = ("forward", "recompute", "backward")[piece % 3]
        start = (made if phase == "forward" else read) + piece * width // 44
        program.add(
            "temporaries",
            (batch, 2048, (14336, 4096, 1024)[piece % 3]),
            "bf16",
            phase=phase,
            start=start,
            end=min(last, start + 3),
            scope=f"{SCOPES[phase]}/{at}/mlp",
            operation=f"fusion loop_multiply_fusion.{layer * 40 + piece}",
            source="llama.py:120 (mlp)",
        )


def llm_program(num_layers: int, num_moments: int, *, batch: int = 8) -> Program:
    """Forward, recomputing backward and update of a decoder, with frozen embeddings and states on both sides."""
    program = Program(num_moments)
    forward, backward = int(num_moments * 0.35), int(num_moments * 0.92)
    program.add("frozen", (128256, 4096), "bf16", path="model/embed/weight")
    program.add("batch", (batch, 2048), "s32", path="batch/tokens")
    for layer in range(num_layers):
        made = 20 + layer * (forward - 40) // num_layers
        read = backward - 20 - layer * (backward - forward - 40) // num_layers
        add_states(program, layer, read, backward)
        add_values(program, layer, made, read, max(6, (backward - forward) // num_layers), batch)
    logits = forward - 10
    softmax = {"operation": "fusion log_softmax.1", "source": "train.py:41 (loss_fn)", "phase": "forward"}
    lives = {"start": logits, "end": logits + 60, "scope": f"{SCOPES['forward']}/loss"}
    program.add("temporaries", (batch, 2048, 128256), "f32", **lives, **softmax)
    program.add("outputs", (), "f32", path="metrics/loss", phase="output", start=logits + 60)
    program.add("constants", (4096, 64), "f32", phase="", operation="constant.12")
    program.add("code", (23_068_672,), "", phase="", operation="program")
    program.add("unattributed", (70_000,), "", phase="")
    return program


def llm_report(
    num_layers: int = 32,
    num_moments: int = 6000,
    *,
    capacity: int | None = int(95.73 * 2**30),
    batch: int = 8,
    **fields: Any,
) -> MemoryReport:
    """About 80 buffers a layer; the peak holds some fragmentation."""
    program = llm_program(num_layers, num_moments, batch=batch)
    live = live_bytes([b for b in program.buffers if b.space == "device"], num_moments)
    peak = live.index(max(live))
    program.add("fragmentation", (341 * 2**20,), "", phase="", start=peak, end=peak)
    names = ("dot_general", "loop_multiply_fusion", "copy-start", "rope", "all-gather", "reduce")
    moments = [f"fusion {names[at % len(names)]}.{at}" for at in range(num_moments)]
    notes = ("loop bodies are counted once: the step scans 1 microbatch",)
    return make_report(program.buffers, moments, **{"capacity": capacity, "notes": notes, **fields})


def small_report(**fields: Any) -> MemoryReport:
    """Five buffers over four moments: 100, 130, 145 (the peak, with 5 of fragmentation), 100 bytes; 60 on the host."""
    evil = "</script><!-- <b>&\"'\u2028 ü/w"
    common = {"start": 0, "end": 3}
    buffers = [
        Buffer(space="device", role="params", path=evil, shape=(5, 5), dtype="f32", num_bytes=100, **common),
        Buffer(
            space="device",
            role="activations",
            scope="jit(f)/jvp(<lambda>)/tanh",
            operation="fusion.1",
            phase="forward",
            source="f.py:1 (<lambda>)",
            shape=(5,),
            dtype="f32",
            num_bytes=30,
            padding_bytes=10,
            start=1,
            end=2,
        ),
        Buffer(space="device", role="temporaries", operation="copy.2", phase="backward", num_bytes=10, start=2, end=2),
        Buffer(space="device", role="fragmentation", phase="", num_bytes=5, start=2, end=2),
        Buffer(space="host", role="state", path="opt/mu", shape=(15,), dtype="f32", num_bytes=60, **common),
    ]
    moments = ["parameter", "fusion.1 <script>alert(1)</script>", "copy.2", "root"]
    return make_report(buffers, moments, **{"capacity": 200, "notes": ("a <note> & more",), **fields})


@dataclasses.dataclass(frozen=True)
class Reports:
    """What the tests of the views draw."""

    make = staticmethod(make_report)
    llm = staticmethod(llm_report)
    small = staticmethod(small_report)


@pytest.fixture
def reports() -> Reports:
    """Makers of synthetic reports."""
    return Reports()
