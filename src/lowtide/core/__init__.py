"""Tree paths and selection, partition, gradients, the layer stack, units and errors."""

from ._batches import argument_shapes as argument_shapes
from ._batches import as_arguments as as_arguments
from ._batches import as_numpy as as_numpy
from ._batches import numbers as numbers
from ._batches import refuse_objects as refuse_objects
from ._errors import ConfigError as ConfigError
from ._errors import DataError as DataError
from ._errors import DonationError as DonationError
from ._errors import LowtideError as LowtideError
from ._errors import ModelFileError as ModelFileError
from ._errors import NonFiniteError as NonFiniteError
from ._errors import OutOfMemoryError as OutOfMemoryError
from ._errors import OutputError as OutputError
from ._errors import PlacementError as PlacementError
from ._errors import PlacementWarning as PlacementWarning
from ._errors import ReportError as ReportError
from ._errors import ScheduleError as ScheduleError
from ._errors import SelectionError as SelectionError
from ._errors import StateError as StateError
from ._errors import StructureError as StructureError
from ._errors import TargetError as TargetError
from ._files import write_files as write_files
from ._grad import accumulate as accumulate
from ._grad import check_differentiable as check_differentiable
from ._grad import fractions as fractions
from ._grad import microbatch_weights as microbatch_weights
from ._grad import split_batch as split_batch
from ._grad import value_and_grad as value_and_grad
from ._inputs import input_file as input_file
from ._inputs import parse_json as parse_json
from ._inputs import read_input as read_input
from ._inputs import shortened as shortened
from ._inputs import shown as shown
from ._inputs import validate as validate
from ._linear import LinearWeight as LinearWeight
from ._linear import linear as linear
from ._linear import products_explained as products_explained
from ._models import ModelObject as ModelObject
from ._naming import ExternalNames as ExternalNames
from ._partition import combine as combine
from ._partition import partition as partition
from ._partition import shared_leaves as shared_leaves
from ._partition import split_static as split_static
from ._paths import Tree as Tree
from ._paths import is_array_like as is_array_like
from ._paths import leaf_bytes as leaf_bytes
from ._paths import leaves_with_paths as leaves_with_paths
from ._paths import path_str as path_str
from ._paths import tree_bytes as tree_bytes
from ._running import RunningGradient as RunningGradient
from ._running import add_running as add_running
from ._running import if_active as if_active
from ._select import Where as Where
from ._select import mask_tree as mask_tree
from ._select import match_names as match_names
from ._select import match_path as match_path
from ._select import select as select
from ._spaces import bytes_by_space as bytes_by_space
from ._spaces import memory_space as memory_space
from ._spaces import on_host as on_host
from ._stack import LayerStack as LayerStack
from ._stack import dividing as dividing
from ._stack import num_layers as num_layers
from ._units import format_bytes as format_bytes
from ._units import parse_bytes as parse_bytes

__all__ = [
    "ConfigError",
    "DataError",
    "DonationError",
    "ExternalNames",
    "LayerStack",
    "LinearWeight",
    "LowtideError",
    "ModelFileError",
    "ModelObject",
    "NonFiniteError",
    "OutOfMemoryError",
    "OutputError",
    "PlacementError",
    "PlacementWarning",
    "ReportError",
    "RunningGradient",
    "ScheduleError",
    "SelectionError",
    "StateError",
    "StructureError",
    "TargetError",
    "Tree",
    "Where",
    "accumulate",
    "add_running",
    "argument_shapes",
    "as_arguments",
    "as_numpy",
    "bytes_by_space",
    "check_differentiable",
    "combine",
    "dividing",
    "format_bytes",
    "fractions",
    "if_active",
    "input_file",
    "is_array_like",
    "leaf_bytes",
    "leaves_with_paths",
    "linear",
    "mask_tree",
    "match_names",
    "match_path",
    "memory_space",
    "microbatch_weights",
    "num_layers",
    "numbers",
    "on_host",
    "parse_bytes",
    "parse_json",
    "partition",
    "path_str",
    "products_explained",
    "read_input",
    "refuse_objects",
    "select",
    "shared_leaves",
    "shortened",
    "shown",
    "split_batch",
    "split_static",
    "tree_bytes",
    "validate",
    "value_and_grad",
    "write_files",
]
