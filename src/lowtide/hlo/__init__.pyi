"""Compile a function for a target, and read the result: graph of values, heap of temporaries, arguments, outputs."""

from ._compile import CompiledProgram as CompiledProgram
from ._compile import compile_lowered as compile_lowered
from ._compile import compile_program as compile_program
from ._compile import crossed_donations as crossed_donations
from ._compile import is_out_of_memory as is_out_of_memory
from ._compile import lower_program as lower_program
from ._compile import place_arguments as place_arguments
from ._compile import positions as positions
from ._compile import read_dump as read_dump
from ._executable import ArgumentLeaf as ArgumentLeaf
from ._executable import aliased as aliased
from ._executable import aliased_in as aliased_in
from ._executable import argument_leaves as argument_leaves
from ._executable import host_outputs as host_outputs
from ._executable import lowered_leaves as lowered_leaves
from ._executable import named_leaves as named_leaves
from ._executable import parameter_arrays as parameter_arrays
from ._graph import DEVICE_COLOR as DEVICE_COLOR
from ._graph import HOST_COLOR as HOST_COLOR
from ._graph import Edge as Edge
from ._graph import Graph as Graph
from ._graph import Segment as Segment
from ._graph import Value as Value
from ._graph import reachable as reachable
from ._graph import segments as segments
from ._traffic import Traffic as Traffic
