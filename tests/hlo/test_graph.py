"""The graph of values, on programs written by hand as a compiler would dump them."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.hlo._graph import Edge, Graph
from lowtide.hlo._proto import _message_class
from lowtide.memory._dataflow import Dataflow

F32, TUPLE, S32 = 11, 13, 4


def array(*dims: int, kind: int = F32) -> dict[str, Any]:
    return {"element_type": kind, "dimensions": dims}


def tuple_of(*shapes: dict[str, Any]) -> dict[str, Any]:
    return {"element_type": TUPLE, "tuple_shapes": shapes}


def module(*computations: list[dict[str, Any]], called: int = 1) -> Any:
    """A module whose first computation is the entry; the last instruction of each is its root."""
    hlo = _message_class()()
    for number, instructions in enumerate(computations, start=1):
        computation = hlo.module.computations.add(id=number, name=f"c{number}", root_id=instructions[-1]["id"])
        for fields in instructions:
            computation.instructions.add(name=f"{fields['opcode']}.{fields['id']}", **fields)
        entry = hlo.module.schedule.sequences.add(key=number)
        entry.value.instruction_ids.extend(fields["id"] for fields in instructions)
    hlo.module.entry_computation_id = 1
    return hlo.module


def test_an_asynchronous_operation_that_packs_its_results_in_a_way_of_its_own() -> None:
    start = tuple_of(tuple_of(array(8)), array(4), array(kind=S32))
    entry = [
        {"id": 1, "opcode": "parameter", "shape": array(8)},
        {"id": 2, "opcode": "async-start", "shape": start, "operand_ids": [1], "called_computation_ids": [2]},
        # One level less than its start has.
        {"id": 3, "opcode": "async-update", "shape": tuple_of(array(8), array(4)), "operand_ids": [2]},
        {"id": 4, "opcode": "async-done", "shape": array(4), "operand_ids": [3]},
    ]
    inner = [
        {"id": 11, "opcode": "parameter", "shape": array(8)},
        {"id": 12, "opcode": "slice", "shape": array(4), "operand_ids": [11]},
    ]
    graph = Graph(module(entry, inner))
    values = set(graph.values())
    assert all(source in values for value in values for source, _ in graph.sources(value))
    flow = Dataflow(graph, {(1, ()): 0})
    assert flow.copy_of((4, ())) == 0


def test_a_loop_s_state_comes_from_its_start_and_from_its_body() -> None:
    state = tuple_of(array(kind=S32), array(8))
    entry = [
        {"id": 1, "opcode": "parameter", "shape": array(8)},
        {"id": 2, "opcode": "constant", "shape": array(kind=S32)},
        {"id": 3, "opcode": "tuple", "shape": state, "operand_ids": [2, 1]},
        {"id": 4, "opcode": "while", "shape": state, "operand_ids": [3], "called_computation_ids": [2, 3]},
        {"id": 5, "opcode": "get-tuple-element", "shape": array(8), "operand_ids": [4], "tuple_index": 1},
    ]
    body = [
        {"id": 11, "opcode": "parameter", "shape": state},
        {"id": 12, "opcode": "get-tuple-element", "shape": array(8), "operand_ids": [11], "tuple_index": 1},
        {"id": 13, "opcode": "get-tuple-element", "shape": array(kind=S32), "operand_ids": [11]},
        {"id": 14, "opcode": "reverse", "shape": array(8), "operand_ids": [12]},
        {"id": 15, "opcode": "tuple", "shape": state, "operand_ids": [13, 14]},
    ]
    condition = [{"id": 21, "opcode": "parameter", "shape": state}, {"id": 22, "opcode": "constant", "shape": array()}]
    graph = Graph(module(entry, body, condition))
    assert graph.sources((4, (1,))) == [((3, (1,)), Edge.ALIAS), ((15, (1,)), Edge.ALIAS)]
    assert graph.sources((11, (1,))) == [((3, (1,)), Edge.ALIAS), ((15, (1,)), Edge.ALIAS)]
    assert graph.order.index(22) < graph.order.index(12) < graph.order.index(4)
    assert Dataflow(graph, {(1, ()): 7}).copy_of((5, ())) == 7


@pytest.mark.parametrize(("opcode", "copied"), [("transpose", True), ("add", False), ("sine", False)])
def test_only_moves_make_copies(opcode: str, copied: bool) -> None:
    operands = [1, 1] if opcode == "add" else [1]
    entry = [
        {"id": 1, "opcode": "parameter", "shape": array(8)},
        {"id": 2, "opcode": opcode, "shape": array(8), "operand_ids": operands},
    ]
    flow = Dataflow(Graph(module(entry)), {(1, ()): 0})
    assert (flow.copy_of((2, ())) == 0) is copied


@pytest.mark.parametrize("opcode", ["all-gather", "all-gather-start", "all-reduce", "collective-permute-start"])
def test_results_of_combined_collectives_come_from_their_own_operand(opcode: str) -> None:
    arrays = [array(8), array(4, 2)]
    results = tuple_of(tuple_of(*arrays), tuple_of(*arrays))
    is_start = opcode.endswith("-start")
    entry = [
        {"id": 1, "opcode": "parameter", "shape": arrays[0]},
        {"id": 2, "opcode": "parameter", "shape": arrays[1], "parameter_number": 1},
        {"id": 3, "opcode": opcode, "shape": results if is_start else tuple_of(*arrays), "operand_ids": [1, 2]},
    ]
    if is_start:
        done = opcode.replace("start", "done")
        entry.append({"id": 4, "opcode": done, "shape": tuple_of(*arrays), "operand_ids": [3]})
    graph = Graph(module(entry))
    for at in (0, 1):
        value = (entry[-1]["id"], (at,))
        while graph.sources(value):
            ((value, _),) = graph.sources(value)
        assert value == (at + 1, ())
